"""The command `fedcomp reproduce`: list the reproductions, or run one and print its verdict."""

import dataclasses
import shutil
import sys
import textwrap
from pathlib import Path

import typer

from fedcomp.errors import INTERRUPTED, UserError

from . import CAVEAT, available_reproductions, reproduction

CELLS = (34, 24, 12, 40, 5)  # widths of the table's columns where there is no terminal
GAP = "  "
PAGE = Path(__file__).parents[1] / "docs" / "reproductions.md"


def run(
    name: str | None,
    full: bool,
    seeds: int | None,
    data: Path | None,
    out: Path | None,
    device: str,
    write: bool,
) -> None:
    """Run a reproduction by its name; None lists all. The arguments are the options of `fedcomp reproduce`. Raises UserError."""
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
        raise UserError(
            f"--data {data} is not a folder; give the folder that holds the tasks' data"
        )
    if write and not PAGE.is_file():
        raise UserError(f"--write changes {PAGE}, which is not there; leave --write out")
    from fedcomp.cli.exits import Signals

    from . import running, table

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
        raise typer.Exit(128 + signals.received if signals.received else INTERRUPTED) from None
    print("\n" + _drawn(table.RUNS, table.run_rows(results), (30, 24, 16, 10, 10)))
    print(_drawn(table.COLUMNS, table.rows(found), CELLS))
    print(
        f"{spent.wall_s / 60:.1f} minutes by the clock, {spent.processor_s / 60:.1f} of one core; runs in {folder}"
    )
    if write:
        table.write(
            name + "-full" * full, table.section(chosen, form, full, results, found, spent), PAGE
        )
        print(f"{PAGE} is written")
    print(f"{table.verdict(found)}\n{_wrapped(CAVEAT)}")


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
