"""`fedcomp reproduce`: the claims of papers, tested here."""

import dataclasses
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from ..errors import INTERRUPTED, UserError

CELLS = (34, 24, 12, 40, 5)  # widths of the table's columns where there is no terminal
GAP = "  "


def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Of a reproduction; all are listed when none is given.",
            show_default=False,
        ),
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="In the paper's setting, or near it: hours, best on a GPU."),
    ] = False,
    seeds: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=1000,
            help="Of each method; those of the reproduction when not given.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the tasks' data; FEDCOMP_DATA when not given."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the runs, one each; runs/reproduce-NAME when not given. What "
            "is finished in it is not done again.",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="[auto|cpu|cuda|cuda:N]", help="Where clients train.")
    ] = "auto",
    write: Annotated[
        bool,
        typer.Option("--write", help="Put the result into docs/reproductions.md of a checkout."),
    ] = False,
) -> None:
    """Test what papers claim: run both sides, and say whether the claim holds here.

    The small form takes minutes on two cores. Where it is interrupted, the same command goes on.
    """
    from ..reproductions import CAVEAT, available_reproductions, reproduction

    if name is None:
        for r in available_reproductions().values():
            print(
                f"{r.name:<14}{r.minutes:>4g} min  {r.title}\n"
                + "\n".join(f"{'':24}{claim.text}" for claim in r.claims)
            )
        print(CAVEAT)
        return
    chosen = reproduction(name)
    form = (
        chosen.form(full) if seeds is None else dataclasses.replace(chosen.form(full), seeds=seeds)
    )
    if data is not None and not data.is_dir():
        raise UserError(f"--data {data} is no folder; give the one that holds the tasks' data")
    page = _page() if write else None
    from ..reproductions import running, table
    from .signals import Signals

    folder = out or Path("runs", f"reproduce-{name}" + "-full" * full)
    machine = running.Machine(data and str(data), device)
    print(
        f"{chosen.title}\n{chosen.paper}\n\n{_wrapped(chosen.full_setting if full else chosen.setting)}\n",
        flush=True,
    )
    try:
        with Signals() as signals:
            results, spent = running.reproduce(
                chosen, form, folder, machine, lambda line: print(line, flush=True)
            )
            found = table.judged(chosen, results)
    except KeyboardInterrupt:
        print(
            f"fedcomp: interrupted; what is finished is in {folder}, and the same command goes on",
            file=sys.stderr,
        )
        raise typer.Exit(128 + signals.heard if signals.heard else INTERRUPTED) from None
    print("\n" + _drawn(table.RUNS, table.run_rows(results), (30, 24, 16, 10, 10)))
    print(_drawn(table.COLUMNS, table.rows(found), CELLS))
    print(
        f"{spent.wall_s / 60:.1f} minutes by the clock, {spent.processor_s / 60:.1f} of one core; runs in {folder}"
    )
    if page is not None:
        table.write(
            name + "-full" * full, table.section(chosen, form, full, results, found, spent), page
        )
        print(f"{page} is written")
    print(f"{table.verdict(found)}\n{_wrapped(CAVEAT)}")


def _page() -> Path:
    """Raises UserError outside of a checkout."""
    from ..reproductions.table import PAGE

    page = Path(__file__).parents[2] / PAGE
    if not page.is_file():
        raise UserError(
            f"--write is for {PAGE} of a checkout, and there is none beside this fedcomp; leave --write out"
        )
    return page


def _wrapped(text: str) -> str:
    return textwrap.fill(text, min(100, shutil.get_terminal_size().columns))


def _drawn(columns: tuple[str, ...], lines: list[tuple[str, ...]], widths: tuple[int, ...]) -> str:
    """A table whose cells are folded."""
    drawn = []
    for line in (columns, *lines):
        cells = [
            textwrap.wrap(cell, width) or [""] for cell, width in zip(line, widths, strict=True)
        ]
        for i in range(max(map(len, cells))):
            folded = [
                (cell[i] if i < len(cell) else "").ljust(width)
                for cell, width in zip(cells, widths, strict=True)
            ]
            drawn.append(GAP.join(folded).rstrip())
        drawn += [""] * (widths == CELLS)  # between claims, which are sentences
    return "\n".join(drawn) + "\n" * bool(drawn[-1])
