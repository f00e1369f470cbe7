"""Axes, markers and charts as <svg> elements.

A chart is as wide as the screen of a phone, with one SVG unit per pixel. The colours are CSS variables. While the mouse pointer is over a
point, CSS shows the point's value above the chart.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

WIDTH, HEIGHT = 360, 270
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 36, 42  # margins around the plot, in pixels
LEGEND, ROW = 300, 16  # width of a legend, and height of each of its rows, in pixels
LETTER = 7.2  # width of a character in a wide font of 12 px
MARGIN = 0.05  # margin at both ends of an axis, as a fraction of the range of values

COLOURS = 8  # number of colours, --c0 to --c7 in style.css
DASHES = ("", "7 3", "7 3 2 3", "2 3", "10 4", "10 3 2 3 2 3", "4 2")
MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0Z",  # circle
    "M-3.6-3.6h7.2v7.2h-7.2Z",  # square
    "M0-4.8L4.6 3.4h-9.2Z",  # triangle
    "M0-5.2L4.6 0L0 5.2L-4.6 0Z",  # diamond
    "M0 4.8L4.6-3.4h-9.2Z",  # triangle downwards
    "M-1.5-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3Z",  # plus
    "M-4.3-2.2L-2.2-4.3L0-2.1L2.2-4.3L4.3-2.2L2.1 0L4.3 2.2L2.2 4.3L0 2.1L-2.2 4.3L-4.3 2.2L-2.1 0Z",  # cross
    "M0-5.4L1.4-1.8L5.2-1.7L2.2.6L3.3 4.3L0 2.1L-3.3 4.3L-2.2.6L-5.2-1.7L-1.4-1.8Z",  # star
    "M-4.8 0L3.4-4.6v9.2Z",  # triangle that points left
)


@dataclass(frozen=True)
class Axis:
    """An axis of a chart, which maps values from `low` to `high` to pixels from `start` to `end`.

    If `log` is true, the axis is logarithmic: values are positive, and `low` and `high` are decimal logarithms.
    """

    label: str
    tick: Callable[[float], str]  # formats the label of a tick
    low: float
    high: float
    start: float  # pixels
    end: float
    log: bool = False
    whole: bool = False  # only integers get a tick

    @classmethod
    def around(
        cls,
        label: str,
        values: Sequence[float],
        tick: Callable[[float], str],
        *,
        across: bool = False,
        log: bool = False,
        whole: bool = False,
    ) -> "Axis":
        """Return an axis for `values` with a margin at both ends. The axis is horizontal if `across`, else vertical."""
        start, end = (LEFT, WIDTH - RIGHT) if across else (HEIGHT - BOTTOM, TOP)
        low, high = min(values), max(values)
        if log:
            low, high = math.log10(low), math.log10(high)
        beyond = MARGIN * (high - low) or abs(low) * MARGIN or 1.0
        return cls(label, tick, low - beyond, high + beyond, start, end, log, whole)

    def __call__(self, value: float) -> float:
        value = math.log10(value) if self.log else value
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, count: int) -> list[float]:
        """Return the values of about `count` ticks: multiples of 1, 2 or 5 times a power of ten."""
        low, high = self.low, self.high
        if self.log:
            decades = range(math.ceil(low), math.floor(high) + 1)
            if len(decades) >= 3:
                return [10.0**power for power in decades[:: math.ceil(len(decades) / count)]]
            powers = range(math.floor(low), math.floor(high) + 1)
            found = [m * 10.0**power for power in powers for m in (1, 2, 5)]
            found = [value for value in found if low <= math.log10(value) <= high]
            if len(found) >= 2:
                return found
            low, high = 10**low, 10**high
        raw = (high - low) / count
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
        step = max(step, 1.0) if self.whole else step
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


@dataclass(frozen=True)
class Point:
    """A data point of a chart."""

    x: float
    y: float
    text: str  # shown while the mouse pointer is over the point
    marked: bool = True  # whether the point has a visible marker
    data: str = ""  # HTML attributes with exact numbers


@dataclass(frozen=True)
class Series:
    """A data series of a chart: points and a line of the same style."""

    name: str
    style: int  # number of the line style, which determines colour, dashes and marker
    points: Sequence[Point]
    line: Sequence[tuple[float, float]] = ()
    # (x, lowest value, highest value) for each x, drawn as an area, or as a vertical line if there is only one x.
    band: Sequence[tuple[float, float, float]] = ()
    ring: bool = False  # draw circles around the points
    faint: bool = False  # fade the series
    size: float = 1.0  # scale of the markers


def dashes(style: int) -> str:
    pattern = DASHES[style % len(DASHES)]
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def classes(style: int) -> str:
    """Return the CSS classes of a line style, such as `s s9 c1`: `s` and `s9` are for highlighting, and `c1` sets the colour."""
    return f"s s{style} c{style % COLOURS}"


def marker(style: int, x: float, y: float, size: float = 1.0) -> str:
    place = f"translate({x:.1f} {y:.1f})" + (f" scale({size:g})" if size != 1 else "")
    return f'<use href="#m{style % len(MARKERS)}" transform="{place}"/>'


def markers() -> str:
    """Return an <svg> element that defines the shapes of the markers for all charts of a page."""
    shapes = "".join(f'<path id="m{i}" d="{path}"/>' for i, path in enumerate(MARKERS))
    return (
        f'<svg width="0" height="0" class="shapes" aria-hidden="true"><defs>{shapes}</defs></svg>'
    )


def swatch(style: int) -> str:
    """Return a line and a marker of a style as an <svg> element, for legends and tables."""
    return (
        f'<svg class="swatch c{style % COLOURS}" viewBox="0 0 34 14" width="34" height="14" aria-hidden="true">'
        f'<path class="line" d="M1 7H33"{dashes(style)}/>{marker(style, 17, 7)}</svg>'
    )


def chart(
    title: str,
    across: Axis,
    up: Axis,
    series: Sequence[Series],
    front: Sequence[tuple[float, float]] = (),
) -> str:
    """Return a chart as an <svg> element. `front` contains the corners of the Pareto front."""
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{escape(title)}</title>'
        f"{_plot(across, up, series, front)}</svg>"
    )


def picture(title: str, across: Axis, up: Axis, series: Sequence[Series]) -> str:
    """Return a chart with a legend as an SVG document."""
    height = max(HEIGHT, ROW * (len(series) + 2))
    legend = "".join(
        f'<g class="{classes(one.style)}">{marker(one.style, WIDTH + 12, ROW * (i + 1) - 4)}'
        f'<text x="{WIDTH + 24}" y="{ROW * (i + 1)}">{escape(one.name)}</text></g>'
        for i, one in enumerate(series)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + LEGEND} {height}">'
        f"<title>{escape(title)}</title><style>{style_sheet()}</style>{markers()}"
        f'<rect width="100%" height="100%" fill="var(--bg)"/>'
        f'<g class="chart">{_plot(across, up, series)}{legend}</g></svg>\n'
    )


def style_sheet() -> str:
    return resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")


def _plot(
    x: Axis, y: Axis, series: Sequence[Series], front: Sequence[tuple[float, float]] = ()
) -> str:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for value in y.ticks(6):
        at = y(value)
        parts.append(
            f'<path class="grid" d="M{LEFT} {at:.1f}H{right}"/>'
            f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{escape(y.tick(value))}</text>'
        )
    end = 0.0  # right end of the previous tick label, in pixels
    for value in x.ticks(5):
        text = x.tick(value)
        half = len(text) * LETTER / 2
        at = min(x(value), WIDTH - half)
        if at - half < end + LETTER:
            continue
        end = at + half
        parts.append(
            f'<path class="grid" d="M{x(value):.1f} {TOP}V{bottom + 4}"/>'
            f'<text x="{at:.1f}" y="{bottom + 17}" text-anchor="middle">{escape(text)}</text>'
        )
    parts.append(
        f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>'
        f'<text class="up" x="4" y="{TOP - 12}">{escape(y.label)}</text>'
        f'<text x="{right}" y="{HEIGHT - 6}" text-anchor="end">{escape(x.label)}</text>'
    )
    if front:
        path = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in front)
        parts.append(f'<path class="front" d="M{path}"/>')
    parts += [_series(one, x, y) for one in series]
    return "".join(parts)


def _series(one: Series, x: Axis, y: Axis) -> str:
    faint = " faint" if one.faint else ""
    parts = [f'<g class="{classes(one.style)}{faint}">']
    if len(one.band) == 1:
        ((at, low, high),) = one.band
        parts.append(f'<path class="whisker" d="M{x(at):.1f} {y(low):.1f}V{y(high):.1f}"/>')
    elif one.band:
        there = "L".join(f"{x(a):.1f} {y(high):.1f}" for a, _, high in one.band)
        back = "L".join(f"{x(a):.1f} {y(low):.1f}" for a, low, _ in reversed(one.band))
        parts.append(f'<path class="band" d="M{there}L{back}Z"/>')
    if len(one.line) > 1:
        path = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in one.line)
        parts.append(f'<path class="line" d="M{path}"{dashes(one.style)}/>')
    for point in one.points:
        a, b = x(point.x), y(point.y)
        ring = f'<circle class="ring" cx="{a:.1f}" cy="{b:.1f}" r="9"/>' if one.ring else ""
        parts.append(
            f'<g class="p"{point.data}>{ring}<circle class="hit" cx="{a:.1f}" cy="{b:.1f}" r="8"/>'
            + (marker(one.style, a, b, one.size) if point.marked else "")
            + _tip(one.name, point.text)
            + "</g>"
        )
    return "".join([*parts, "</g>"])


def _tip(name: str, text: str) -> str:
    """Return the <text> element that appears while the mouse pointer is over a point."""
    longest = int((WIDTH - 8) / LETTER)
    name = name if len(name) <= longest else name[: longest - 1] + "…"
    return (
        f'<text class="tip"><tspan x="{WIDTH - 4}" y="12">{escape(name)}</tspan>'
        f'<tspan x="{WIDTH - 4}" y="27">{escape(text)}</tspan></text>'
    )
