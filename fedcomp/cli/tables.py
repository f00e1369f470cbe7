"""Text tables on standard output."""

import sys
from collections.abc import Collection, Sequence

from ..formatting import NOTHING


def print_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: Collection[str],
    *,
    title: str = "",
    legend: str = "",
    styles: Sequence[str] = (),
    below: Sequence[str] = (),
) -> None:
    """Print a table that fits the terminal, with `title` above and `legend` below it.

    `head` contains the titles of the columns. Columns in `left` are aligned to the left, others to the right. `styles` contains a style of
    the package rich for each row. The cells of the columns in `below` are printed as text below the first cell of their row.

    If standard output is not a terminal, `head` and the rows are printed there as tab-separated lines, and `title` and `legend` on standard
    error.
    """
    if not sys.stdout.isatty():
        if title:
            print(title, file=sys.stderr)
        print("\n".join("\t".join(row) for row in [head, *rows]))
        if legend:
            print(legend, file=sys.stderr)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    columns = [i for i, name in enumerate(head) if name not in below]
    for i in columns:
        table.add_column(
            head[i],
            justify="left" if head[i] in left else "right",
            style="" if i or below else "bold",
            overflow="fold",
        )
    for row, style in zip(rows, styles or [""] * len(rows), strict=True):
        first: Text | str = row[0]
        if below:
            texts = (row[head.index(name)] for name in below)
            details = "; ".join(text.rstrip(".") for text in texts if text != NOTHING)
            first = Text.assemble((row[0], "bold"), "\n", (details, "dim"))
        table.add_row(first, *(row[i] for i in columns[1:]), style=style)
    console = Console(highlight=False, markup=False)
    if title:
        console.print(title)
    console.print(table)
    if legend:
        console.print(legend, style="dim")


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return rows as lines of text. The first `left` columns are aligned to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
