"""Parts of terminal displays: a panel of labels and values, a progress bar, and a curve of accuracy or loss."""

import math
from collections.abc import Sequence

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from ..run_display import GAP, evenly_spaced

REFRESHES_PER_SECOND = 5
# Colours of medium lightness, readable on dark and on light backgrounds.
LABEL = "dim"
FRAME = "dim"
BAR = "deep_sky_blue3"
DONE = "spring_green4"
WARNING = "dark_orange3"
REJECTED = "red3"
MAX_POINTS = 1024  # maximum number of points of a curve; more points would be slow to draw
MIN_ROUNDS = 10  # minimum length of the axis of rounds, so that the first points of a curve do not move in each round
# DOTS[column][row] is the bit that sets this dot in a Unicode braille character.
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def truncated(lines: list[Text], width: int) -> list[Text]:
    """Truncate lines to `width` characters, in place."""
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return lines


def progress_bar(before: str, fraction: float, after: str, width: int) -> Text:
    """Return a line of `width` characters: the text `before`, a bar that is filled to `fraction` in [0, 1], and the text `after`."""
    room = max(width - len(before) - len(after), 0)
    filled = int(2 * room * fraction)
    bar = "━" * (filled // 2) + "╸" * (filled % 2)
    return Text.assemble(
        (before, "bold"),
        (bar, DONE if fraction == 1 else BAR),
        ("─" * (room - len(bar)), LABEL),
        after,
    )


def facts_panel(
    pairs: Sequence[tuple[str, str]], note: Sequence[str], path: str, width: int, max_rows: int
) -> Panel:
    """Return a panel of labels and values in up to four columns and `max_rows` rows, with the lines of a note below them.

    The lower border shows `path`, the run folder.
    """
    indent = 1 + max(len(label) for label, _ in pairs)
    cells = [Text.assemble((label.ljust(indent), LABEL), value) for label, value in pairs]
    for columns in (4, 3, 2, 1):
        lines = _columns(cells, columns, max_rows)
        if max(line.cell_len for line in lines) <= width - 4:
            break
    for i, text in enumerate(note):
        lines.append(Text.assemble((("" if i else "note").ljust(indent), LABEL), text))
    lines = truncated(lines, width - 4)
    if len(path) > width - 6:
        path = "…" + path[len(path) - width + 7 :]
    panel = Panel(Group(*lines), title="[bold]fedcomp", subtitle=Text(path), border_style=FRAME)
    panel.title_align = panel.subtitle_align = "left"
    panel.width, panel.height = width, len(lines) + 2
    return panel


def _columns(cells: Sequence[Text], columns: int, max_rows: int) -> list[Text]:
    """Return the rows of a table that is filled with `cells` column by column. Cells beyond `columns` · `max_rows` are left out."""
    rows = min(-(-len(cells) // columns), max_rows)
    lines = [Text() for _ in range(rows)]
    for first in range(0, rows * columns, rows):
        left = max(line.cell_len for line in lines)
        for line, cell in zip(lines, cells[first : first + rows], strict=False):
            line.pad_right(left - line.cell_len + 2 * GAP * bool(first))
            line.append_text(cell)
    return lines


def curve(points: Sequence[tuple[int, float]], metric: str, width: int, height: int) -> list[Text]:
    """Plot the curve of a metric over rounds, with axes, in `height` ≥ 2 lines of text of at most `width` ≥ 30 characters.

    `points` are pairs (round, finite value) in ascending order of rounds. `metric` is "loss", or "accuracy" for values in [0, 1], whose
    axis is labelled in percent.
    """
    rows = height - 1
    if not points:
        empty = ["│"] * rows + ["└" + "─" * (width - 1)]
        empty[rows // 2] += f"no {metric} yet".center(width - 1)
        return [Text(line.rstrip(), LABEL) for line in empty]
    points = [points[i] for i in evenly_spaced(len(points), MAX_POINTS)]
    low, high, digits = _bounds([value for _, value in points])
    labels = {
        row: f"{100 * value:.{digits}f} %" if metric == "accuracy" else f"{value:.4g}"
        for row, value in ((rows - 1, low), (0, high))
    }
    margin = max(map(len, labels.values()))
    first, last = points[0][0], max(points[-1][0], points[0][0] + MIN_ROUNDS - 1)
    drawn = _braille(points, (first, last), (low, high), width - margin - 2, rows)
    lines = []
    for row, dots in enumerate(drawn):
        label = f"{labels.get(row, ''):>{margin}} {'┤' if row in labels else '│'}"
        lines.append(Text.assemble((label, LABEL), (dots, BAR)))
    left, right = f"└ {first} ", f" {last}"
    middle = " round ".center(width - margin - 1 - len(left) - len(right), "─")
    return [*lines, Text(" " * (margin + 1) + left + middle + right, LABEL)]


def _bounds(values: list[float]) -> tuple[float, float, int]:
    """Return the limits of an axis that contains all `values`, and the number of decimals if the limits are shown as percentages.

    The limits are multiples of a step such as 0.1, 0.2 or 0.5.
    """
    low, high = min(values), max(values)
    raw = max((high - low) / 10, 0.001)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    if high <= low:
        low, high = low - step, high + step
    return low, high, max(0, -math.floor(math.log10(100 * step) + 1e-9))


def _braille(
    points: list[tuple[int, float]],
    x: tuple[int, int],
    y: tuple[float, float],
    columns: int,
    rows: int,
) -> list[str]:
    """Return the points, connected by lines, as rows of braille characters. `x` and `y` are the limits of the axes."""
    cells = [[0] * columns for _ in range(rows)]
    across, down = (2 * columns - 1) / (x[1] - x[0]), (4 * rows - 1) / (y[1] - y[0])
    dots = [
        (round((round_ - x[0]) * across), round((y[1] - value) * down)) for round_, value in points
    ]
    for (column, row), (to_column, to_row) in zip(dots, dots[1:], strict=False):
        length = max(to_column - column, abs(to_row - row), 1)
        for i in range(length + 1):
            c = column + (to_column - column) * i // length
            r = row + round((to_row - row) * i / length)
            cells[r // 4][c // 2] |= DOTS[c % 2][r % 4]
    return ["".join(chr(0x2800 + bits) if bits else " " for bits in row).rstrip() for row in cells]
