"""The table of a comparison: a line for each alternative, with the Pareto front marked."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ...formatting import metric, one_line
from ...run_display import WORST
from ..results import FRONT, Result, cells, head, legend
from ..tables import aligned

SPARE = ("time", "ratio", "rounds")  # columns that a narrow terminal omits, the first one first
NARROWEST = 11  # characters of a name before it is folded


def show(lines: Sequence[Result], target: float | None) -> None:
    """Print the table, fitted to the width of a terminal."""
    said = [one_line(f"{line.label} {line.note}") for line in lines if line.note]
    said += legend(lines)
    if sys.stdout.isatty():
        console = Console(highlight=False, markup=False)
        console.print(fitted(lines, target, console.width), *said, sep="\n")
    else:
        print("\n".join([*plain(lines, target), *said]))


def plain(lines: Sequence[Result], target: float | None) -> list[str]:
    """Return the table as lines of text."""
    titles, figures = _columns(lines, target)
    rows = [
        ["", "alternative", *titles],
        *(
            [FRONT if line.on_front else "", _label(line), *row]
            for line, row in zip(lines, figures, strict=True)
        ),
    ]
    return aligned(rows, left=2)


def fitted(lines: Sequence[Result], target: float | None, width: int) -> Table:
    """Return the table for `width` characters, without rounds if all lines have the same.

    Columns that do not fit are omitted, those of SPARE first, then from the right. Names are folded; figures are never cut.
    """
    alike = len({line.rounds for line in lines}) == 1
    titles, rows = _columns(lines, target)
    titles = [title.replace(" to ", "\nto ") for title in titles]
    kept = [i for i, title in enumerate(titles) if not (alike and title == "rounds")]
    wide = [
        max(len(part) for part in (*title.split("\n"), *(row[i] for row in rows)))
        for i, title in enumerate(titles)
    ]
    spare = [i for title in SPARE for i in kept if titles[i] == title]
    for i in spare + [i for i in reversed(kept) if i not in spare]:
        if 2 + NARROWEST + sum(wide[j] + 1 for j in kept) > width:
            kept.remove(i)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    table.add_column("alternative", overflow="fold", min_width=NARROWEST)
    for i in kept:
        table.add_column(titles[i], justify="right", no_wrap=True, vertical="top")
    for line, row in zip(lines, rows, strict=True):
        table.add_row(
            FRONT if line.on_front else "",
            _label(line),
            *(row[i] for i in kept),
            style="bold" if line.on_front else "",
        )
    return table


def _columns(lines: Sequence[Result], target: float | None) -> tuple[list[str], list[list[str]]]:
    """Return the titles and rows of the figures, with the worst decile of the clients after the accuracy where it is known."""
    titles, rows = head(target), [cells(line, target) for line in lines]
    if any(line.worst_decile is not None for line in lines):
        titles.insert(1, WORST)
        for line, row in zip(lines, rows, strict=True):
            name = "loss" if line.accuracy is None else "accuracy"
            row.insert(1, metric(name, line.worst_decile))
    return titles, rows


def _label(line: Result) -> str:
    return line.label + f", {line.note.partition(':')[0]}" * bool(line.note)
