"""The table of a comparison: a line for each alternative, with the Pareto front marked."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ...formatting import metric, one_line
from ...run_display import WORST
from ..results import FRONT, Result, cells, column_titles, legend
from ..tables import aligned

OPTIONAL_COLUMNS = ("time", "ratio", "rounds")  # omitted on a narrow terminal, the first one first
MIN_NAME_WIDTH = 11  # characters; longer names are folded


def print_results(lines: Sequence[Result], target: float | None) -> None:
    """Print the table, fitted to the width of a terminal."""
    notes = [one_line(f"{line.label} {line.note}") for line in lines if line.note]
    notes += legend(lines)
    if sys.stdout.isatty():
        console = Console(highlight=False, markup=False)
        console.print(as_rich_table(lines, target, console.width), *notes, sep="\n")
    else:
        print("\n".join([*as_text(lines, target), *notes]))


def as_text(lines: Sequence[Result], target: float | None) -> list[str]:
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


def as_rich_table(lines: Sequence[Result], target: float | None, width: int) -> Table:
    """Return the table for a terminal of `width` characters, without the column of rounds if all lines have the same number.

    Columns that do not fit are omitted, those of OPTIONAL_COLUMNS first, then from the right. Long names are wrapped, numbers never cut.
    """
    same_rounds = len({line.rounds for line in lines}) == 1
    titles, rows = _columns(lines, target)
    titles = [title.replace(" to ", "\nto ") for title in titles]
    visible = [i for i, title in enumerate(titles) if not (same_rounds and title == "rounds")]
    widths = [
        max(len(part) for part in (*title.split("\n"), *(row[i] for row in rows)))
        for i, title in enumerate(titles)
    ]
    optional = [i for title in OPTIONAL_COLUMNS for i in visible if titles[i] == title]
    for i in optional + [i for i in reversed(visible) if i not in optional]:
        if 2 + MIN_NAME_WIDTH + sum(widths[j] + 1 for j in visible) > width:
            visible.remove(i)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    table.add_column("alternative", overflow="fold", min_width=MIN_NAME_WIDTH)
    for i in visible:
        table.add_column(titles[i], justify="right", no_wrap=True, vertical="top")
    for line, row in zip(lines, rows, strict=True):
        table.add_row(
            FRONT if line.on_front else "",
            _label(line),
            *(row[i] for i in visible),
            style="bold" if line.on_front else "",
        )
    return table


def _columns(lines: Sequence[Result], target: float | None) -> tuple[list[str], list[list[str]]]:
    """Return the titles and rows of the figures, with the worst decile of the clients after the accuracy where it is known."""
    titles, rows = column_titles(target), [cells(line, target) for line in lines]
    if any(line.worst_decile is not None for line in lines):
        titles.insert(1, WORST)
        for line, row in zip(lines, rows, strict=True):
            name = "loss" if line.accuracy is None else "accuracy"
            row.insert(1, metric(name, line.worst_decile))
    return titles, rows


def _label(line: Result) -> str:
    return line.label + f", {line.note.partition(':')[0]}" * bool(line.note)
