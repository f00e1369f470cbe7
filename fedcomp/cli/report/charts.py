"""The charts of a report: final accuracy against bytes, and curves of accuracy and loss over rounds, bytes and simulated hours."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ...callbacks import RoundRecord
from ...formatting import decimal, duration, human_bytes, percent
from ...run_display import evenly_spaced
from ...runs import Group, Run
from ..results import Result
from . import svg

# An axis of bytes or loss is logarithmic if its largest value divided by its smallest value is above this limit. On an axis of bytes, the
# values in this rule are the last values of the curves.
LOG_BYTES, LOG_LOSS = 8, 50
MAX_VALUE = 1e30  # values of larger magnitude are not drawn
MAX_SEGMENTS = 300  # maximum number of line segments of a curve, about one per pixel
# Number of points that show their values under the mouse pointer: at most MAX_POINTS per chart, but at least MIN_POINTS_OF_CURVE per curve.
MAX_POINTS, MIN_POINTS_OF_CURVE = 400, 8
MARKERS_PER_CURVE = 6


@dataclass(frozen=True)
class ReportEntry:
    """A group of runs that differ only in the seed, with its results, its name in charts, and the number of its line style."""

    group: Group
    result: Result
    name: str
    style: int


@dataclass(frozen=True)
class Panel:
    """Results that are drawn in the same charts."""

    title: str
    entries: Sequence[ReportEntry]

    @property
    def comparable(self) -> bool:
        """Whether the panel has several results, and all are of one learning problem. Only then, the charts show a Pareto front."""
        return len(self.entries) > 1 and len({str(e.result.problem) for e in self.entries}) == 1

    @property
    def by_loss(self) -> bool:
        """Whether results are compared by loss, because none has an accuracy."""
        return all(entry.result.accuracy is None for entry in self.entries)


def panels(groups: Sequence[Group], lines: Sequence[Result]) -> list[Panel]:
    """Return one panel per learning problem, or a single panel if there is only one problem or no problem has several results."""
    problems = dict.fromkeys(group.problem_label for group in groups)
    separate = 1 < len(problems) < len(groups)
    names = [group.method_label if separate else group.label for group in groups]
    styles = [*dict.fromkeys(names)]
    entries = [*map(ReportEntry, groups, lines, names, map(styles.index, names))]
    if not separate:
        return [Panel("", entries)]
    return [
        Panel(title, [e for e in entries if e.group.problem_label == title]) for title in problems
    ]


@dataclass(frozen=True)
class Quantity:
    """A quantity that is measured in each round, such as accuracy or bytes, and that a chart shows along an axis."""

    label: str
    value: Callable[[RoundRecord], float | None]  # returns None if the quantity was not measured
    tick: Callable[[float], str]  # formats the label of an axis tick
    show: Callable[[float], str]  # formats the value of a data point
    whole: bool = False  # only integers get an axis tick
    cumulative: bool = False  # add up the values of the round and of all earlier rounds
    log_from: float = math.inf  # ratio above which the axis is logarithmic; see LOG_BYTES

    def of(self, run: Run) -> np.ndarray:
        """Return the value of each round, or NaN where it was not measured."""
        values = np.array([self.value(record) for record in run.records], np.float64)
        return values.cumsum() if self.cumulative else values


def _bytes_tick(count: float) -> str:
    number, unit = human_bytes(round(count)).split()
    return f"{float(number):g} {unit}"


def _percent_tick(fraction: float) -> str:
    return f"{round(100 * fraction, 6):g} %"


def _worst_decile(record: RoundRecord) -> float | None:
    return getattr(record.client_metrics.get("accuracy"), "worst_decile", None)


ACCURACY = Quantity("accuracy", lambda r: r.measured_accuracy, _percent_tick, percent)
WORST_DECILE = Quantity(
    "accuracy of the worst decile of clients", _worst_decile, _percent_tick, percent
)
LOSS = Quantity("test loss", lambda r: r.measured_loss, "{:.4g}".format, decimal, log_from=LOG_LOSS)
ROUNDS = Quantity("round", lambda r: r.round, "{:,.0f}".format, "round {:,.0f}".format, whole=True)
BYTES = Quantity(
    "bytes up and down",
    lambda r: r.uplink_bytes + r.downlink_bytes,
    _bytes_tick,
    lambda count: human_bytes(round(count)),
    cumulative=True,
    log_from=LOG_BYTES,
)
HOURS = Quantity(
    "simulated hours",
    lambda r: r.simulated_hours,
    "{:.6g}".format,
    lambda hours: duration(3600 * hours),
)


def final_charts(all_panels: Sequence[Panel]) -> list[tuple[str, str]]:
    """Return (title, <svg>) for each panel: a chart of the final accuracy or loss of each result against its bytes."""
    drawn = []
    for panel in all_panels:
        if not (points := _final_points(panel)):
            continue
        up = LOSS if panel.by_loss else ACCURACY
        # Charts of the same vertical quantity have equal axes.
        same = [p for p in all_panels if p.by_loss == panel.by_loss]
        on_axes = [series for other in same for series in _final_points(other)]
        title = f"{up.label.capitalize()} against bytes"
        title += f", {panel.title}" if panel.title else ""
        front = _staircase(points) if panel.comparable else []
        across, upwards = _axis(BYTES, on_axes, across=True), _axis(up, on_axes)
        drawn.append((panel.title, svg.chart(title, across, upwards, points, front)))
    return drawn


def _final_points(panel: Panel) -> list[svg.Series]:
    return [point for entry in panel.entries if (point := _final_point(entry, panel))]


def _final_point(entry: ReportEntry, panel: Panel) -> svg.Series | None:
    """Return the point (bytes, final accuracy or loss) of an entry, or None if a value is missing or cannot be drawn."""
    result, by_loss = entry.result, panel.by_loss
    up = LOSS if by_loss else ACCURACY
    value = result.loss if by_loss else result.accuracy
    if value is None or not result.sent_bytes or abs(value) > MAX_VALUE:
        return None
    seeds = [] if by_loss else [r.accuracy for r in entry.group.runs if r.accuracy is not None]
    text, band = up.show(value), []
    if len(seeds) > 1:
        low, high = min(seeds), max(seeds)
        band = [(result.sent_bytes, low, high)]
        text += f" ({up.show(low)} to {up.show(high)} over {len(seeds)} seeds)"
    text += f", {BYTES.show(result.sent_bytes)}"
    text += f", {result.note.partition(':')[0]}" if result.note else ""
    name = "loss" if by_loss else "accuracy"
    data = f' data-bytes="{result.sent_bytes!r}" data-{name}="{value!r}"'
    points = [svg.Point(result.sent_bytes, value, text, data=data)]
    ring, faint = result.on_front and panel.comparable, bool(result.note)
    return svg.Series(entry.name, entry.style, points, band=band, ring=ring, faint=faint, size=1.25)


def _staircase(drawn: Sequence[svg.Series]) -> list[tuple[float, float]]:
    """Return the corners of the Pareto front, drawn as a staircase, as pairs (bytes, accuracy or loss) from left to right."""
    points = sorted({(p.x, p.y) for one in drawn if one.ring for p in one.points})
    steps = points[:1]
    for (_, before), (x, y) in pairwise(points):
        steps += [(x, before), (x, y)]
    return steps


def curve_charts(panel: Panel, all_panels: Sequence[Panel]) -> list[list[tuple[str, str]]]:
    """Return rows of (title, <svg>): accuracy, worst-decile accuracy and loss, each over rounds, bytes and simulated hours."""
    rows = []
    for up in (ACCURACY, WORST_DECILE, LOSS):
        row = []
        for across in (ROUNDS, BYTES, HOURS):
            if series := _curves(panel, across, up):
                on_axes = [curve for other in all_panels for curve in _curves(other, across, up)]
                title = f"{up.label.capitalize()} over {across.label.replace('round', 'rounds')}"
                axes = _axis(across, on_axes, across=True), _axis(up, on_axes)
                row.append((title, svg.chart(title, *axes, series)))
        rows += [row] if row else []
    return rows


def _curves(panel: Panel, across: Quantity, up: Quantity) -> list[svg.Series]:
    curves = [_curve(entry, across, up, len(panel.entries)) for entry in panel.entries]
    return [curve for curve in curves if curve is not None]


def _curve(entry: ReportEntry, across: Quantity, up: Quantity, curves: int) -> svg.Series | None:
    """Return a curve of the mean and range over the seeds, up to the last round of the shortest run.

    `curves` is the number of curves in the chart. Return None if nothing was measured.
    """
    runs = entry.group.runs
    rounds = min(len(run.records) for run in runs)
    if not rounds:
        return None
    x = np.stack([across.of(run)[:rounds] for run in runs]).mean(0)
    y = np.stack([up.of(run)[:rounds] for run in runs])
    valid = np.isfinite(x) & (np.abs(y) < MAX_VALUE).all(0)
    if across is BYTES:
        valid &= x > 0  # so that the axis can be logarithmic
    if not valid.any():
        return None
    x, y = x[valid], y[:, valid]
    middle, low, high = y.mean(0).tolist(), y.min(0).tolist(), y.max(0).tolist()
    x = x.tolist()
    drawn = evenly_spaced(len(x), MAX_SEGMENTS)
    shown = evenly_spaced(len(x), max(MIN_POINTS_OF_CURVE, MAX_POINTS // curves))
    step = max(len(shown) // MARKERS_PER_CURVE, 1)
    # The first marker of each curve is at a different point, so that markers do not overlap.
    marked = set(shown[entry.style * step // curves :: step])
    points = []
    for i in shown:
        spread = f" ({up.show(low[i])} to {up.show(high[i])})" if len(runs) > 1 else ""
        text = f"{across.show(x[i])}, {up.show(middle[i])}{spread}"
        points.append(svg.Point(x[i], middle[i], text, i in marked))
    line = [(x[i], middle[i]) for i in drawn]
    band = [(x[i], low[i], high[i]) for i in drawn] if len(runs) > 1 and len(drawn) > 1 else ()
    return svg.Series(entry.name, entry.style, points, line, band)


def _axis(quantity: Quantity, drawn: Sequence[svg.Series], across: bool = False) -> svg.Axis:
    """Return an axis for all data series in `drawn`."""
    points = [(p.x, p.y) for one in drawn for p in one.points]
    points += [end for one in drawn for end in one.line]
    if across:
        values, compared = [x for x, _ in points], [max(p.x for p in s.points) for s in drawn]
    else:
        values = [y for _, y in points] + [y for s in drawn for _, *ends in s.band for y in ends]
        compared = values
    low, high = min(compared), max(compared)
    log = min(values) > 0 and math.log10(high) - math.log10(low) > math.log10(quantity.log_from)
    look = {"across": across, "log": log, "whole": quantity.whole}
    return svg.Axis.around(quantity.label, values, quantity.tick, **look)
