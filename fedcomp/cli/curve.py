"""A curve of accuracy or loss over rounds, drawn with braille dots: 2 × 4 dots in a character."""

import math

from rich.text import Text

# Beyond this number of points, every other one is dropped, so that drawing a long run stays cheap.
MAX_POINTS = 1024
MIN_ROUNDS = 10  # on the axis, so that the first points do not jump
# Bits of a braille character, by column and row within it.
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
AXIS, LINE = "dim", "deep_sky_blue3"


class Curve:
    """A curve over rounds. `is_fraction`: values are 0..1 and labelled in percent, else they are losses."""

    def __init__(self, is_fraction: bool = True) -> None:
        self.is_fraction = is_fraction
        self._points: list[tuple[int, float]] = []
        self._latest: tuple[int, float] | None = None
        self._seen, self._stride = 0, 1

    def add(self, round: int, value: float) -> None:
        """Append a point. Rounds must ascend. A value that is not finite is skipped."""
        if not math.isfinite(value):
            return
        if self._seen % self._stride == 0:
            self._points.append((round, value))
        self._latest = (round, value)
        self._seen += 1
        if len(self._points) > MAX_POINTS:
            self._points, self._stride = self._points[::2], 2 * self._stride

    def lines(self, width: int, height: int) -> list[Text]:
        """Return the curve with its axes as `height` lines of at most `width` characters; height ≥ 2, width ≥ 30."""
        rows = height - 1
        if self._latest is None:
            empty = ["│"] * rows + ["└" + "─" * (width - 1)]
            empty[rows // 2] += f"no {'accuracy' if self.is_fraction else 'loss'} yet".center(
                width - 1
            )
            return [Text(line.rstrip(), AXIS) for line in empty]
        points = self._points + [self._latest]
        low, high, digits = _bounds([value for _, value in points])
        labels = {
            row: f"{100 * value:.{digits}f} %" if self.is_fraction else f"{value:.4g}"
            for row, value in ((rows - 1, low), (0, high))
        }
        margin = max(map(len, labels.values()))
        first, last = points[0][0], max(points[-1][0], points[0][0] + MIN_ROUNDS - 1)
        drawn = _braille(points, (first, last), (low, high), width - margin - 2, rows)
        lines = [
            Text.assemble(
                (f"{labels.get(row, ''):>{margin}} {'┤' if row in labels else '│'}", AXIS),
                (dots, LINE),
            )
            for row, dots in enumerate(drawn)
        ]
        left, right = f"└ {first} ", f" {last}"
        middle = " round ".center(width - margin - 1 - len(left) - len(right), "─")
        return [*lines, Text(" " * (margin + 1) + left + middle + right, AXIS)]


def _bounds(values: list[float]) -> tuple[float, float, int]:
    """Return round numbers below and above all values, and the decimals needed to distinguish them as percentages."""
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
    """Return the points, connected by lines, as rows of braille characters. `x` and `y`: the bounds of the axes."""
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
