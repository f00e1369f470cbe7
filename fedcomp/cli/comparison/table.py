"""The table at the end: a line for each alternative, those on the Pareto front marked."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ...formatting import one_line
from ..results import FRONT, Result, cells, head, legend

SPARE = ("time", "ratio", "rounds")  # what a narrow terminal does without, the first one first
NARROWEST = 11  # characters of a name before it is folded


def show(lines: Sequence[Result], target: float | None) -> None:
    """On a terminal fitted to its width; elsewhere in columns as wide as they need."""
    said = [one_line(f"{line.label} {line.note}") for line in lines if line.note]
    said += legend(lines)
    if sys.stdout.isatty():
        console = Console(highlight=False, markup=False)
        console.print(fitted(lines, target, console.width), *said, sep="\n")
    else:
        print("\n".join([*plain(lines, target), *said]))


def plain(lines: Sequence[Result], target: float | None) -> list[str]:
    """Lines of text, columns two blanks apart."""
    rows = [
        ["", "alternative", *head(target)],
        *([FRONT if line.on_front else "", _label(line), *cells(line, target)] for line in lines),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def fitted(lines: Sequence[Result], target: float | None, width: int) -> Table:
    """For `width` characters; rounds are left out where they say nothing, names are folded.

    Columns that find no room are left out, those of SPARE first, then from the right: a figure that is cut would be another figure.
    """
    alike = len({line.rounds for line in lines}) == 1
    titles = [title.replace(" to ", "\nto ") for title in head(target)]
    kept = [i for i, title in enumerate(titles) if not (alike and title == "rounds")]
    rows = [cells(line, target) for line in lines]
    wide = [
        max(len(part) for part in (*title.split("\n"), *(row[i] for row in rows)))
        for i, title in enumerate(titles)
    ]
    spare = [i for title in SPARE for i in kept if titles[i] == title]
    for i in spare + [i for i in reversed(kept) if i not in spare]:
        if 2 + NARROWEST + sum(wide[j] + 1 for j in kept) > width:
            kept.remove(i)
    figures = sum(wide[i] + 2 for i in kept)
    longest = max((len(_label(line)) for line in lines), default=0)
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 2 if figures + min(longest, 30) + 3 <= width else 1, 0, 0),
        header_style="dim",
    )
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


def _label(line: Result) -> str:
    return line.label + f", {line.note.partition(':')[0]}" * bool(line.note)
