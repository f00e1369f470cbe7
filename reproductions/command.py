"""The command `fedcomp reproduce`, which lists the reproductions, or runs one and prints whether its claims hold."""

import dataclasses
import shutil
import textwrap
from pathlib import Path

from fedcomp.errors import UserError

from . import CAVEAT, available_reproductions, reproduction

CELL_WIDTHS = (34, 24, 12, 40, 5)  # widths of the columns in the table of claims
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
    """Run the reproduction `name`, or list all reproductions if `name` is None. The arguments are the options of `fedcomp reproduce`.

    Raises UserError.
    """
    if name is None:
        for r in available_reproductions().values():
            print(
                f"{r.name:<14}{r.minutes:>4g} min  {r.title}\n"
                + "\n".join(f"{'':24}{claim.text}" for claim in r.claims)
            )
        print(CAVEAT)
        return
    chosen = reproduction(name)
    experiment = (
        chosen.experiment(full)
        if seeds is None
        else dataclasses.replace(chosen.experiment(full), seeds=seeds)
    )
    if data is not None and not data.is_dir():
        raise UserError(
            f"--data {data} is not a folder; give the folder with the data of the tasks"
        )
    if write and not PAGE.is_file():
        raise UserError(f"--write changes {PAGE}, which does not exist; leave --write out")
    from fedcomp.cli.exits import stoppable

    from . import running, table

    folder = out or Path("runs", f"reproduce-{name}" + "-full" * full)
    local = running.LocalOptions(data and str(data), device)
    print(
        f"{chosen.title}\n{chosen.paper}\n\n{_wrap(chosen.full_setting if full else chosen.setting)}\n",
        flush=True,
    )
    advice = f"finished runs are in {folder}; repeat the command to continue"
    with stoppable(lambda cause: f"{cause}; {advice}"):
        results, time = running.reproduce(
            chosen, experiment, folder, local, lambda line: print(line, flush=True)
        )
        judged = table.judge_claims(chosen, results)
    print("\n" + _table(table.RUNS, table.run_rows(results), (30, 24, 16, 10, 10)))
    print(_table(table.COLUMNS, table.rows(judged), CELL_WIDTHS))
    print(
        f"{time.wall_s / 60:.1f} minutes, {time.processor_s / 60:.1f} minutes of processor time; the runs are in {folder}"
    )
    if write:
        table.write(
            name + "-full" * full,
            table.section(chosen, full, results, judged, time),
            PAGE,
        )
        print(f"wrote {PAGE}")
    print(f"{table.summary_line(judged)}\n{_wrap(CAVEAT)}")


def _wrap(text: str) -> str:
    return textwrap.fill(text, min(100, shutil.get_terminal_size().columns))


def _table(columns: tuple[str, ...], lines: list[tuple[str, ...]], widths: tuple[int, ...]) -> str:
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
        drawn += [""] * (widths == CELL_WIDTHS)  # a blank line after each claim
    return "\n".join(drawn) + "\n" * bool(drawn[-1])
