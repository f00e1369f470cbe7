"""Curves of runs, one line for each group, as figures of matplotlib. Lines differ in dashes and markers too: no colour is needed."""

import io
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from ...runs import Group, Run

COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
    "#000000",
    "#7f7f7f",
)  # Okabe and Ito 2008, for all eyes
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 1)))
MARKERS = "os^DvPX*<"  # as many as have no common divisor: hundreds of lines differ
MARKS = 8  # on a line
WIDTH, HEIGHT = 6.4, 3.9  # inches
ACROSS_LEGEND = 70  # characters of a line of the legend
SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedcomp",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,
}


@dataclass(frozen=True)
class Axis:
    """What is shown along one side: a value for each round of a run; NaN where there is none."""

    label: str
    values: Callable[[Run], np.ndarray]
    share: bool = False  # 0..1, shown in percent
    unit: str = ""  # with a prefix: 3.2 MB
    whole: bool = False  # numbers


def spent(run: Run) -> np.ndarray:
    """Bytes both ways up to each round."""
    return np.cumsum(run.metrics["uplink_bytes"] + run.metrics["downlink_bytes"])


def hours(run: Run) -> np.ndarray:
    """Simulated hours up to each round; NaN for runs without a network."""
    return run.metrics.get("simulated_hours", np.full(len(run.records), np.nan))


ACCURACY = Axis("accuracy", lambda run: run.metrics["accuracy"], share=True)
LOSS = Axis("test loss", lambda run: run.metrics["loss"])
ACROSS = (
    ("rounds", Axis("round", lambda run: run.metrics["round"], whole=True)),
    ("bytes", Axis("bytes sent, up and down", spent, unit="B")),
    ("hours", Axis("simulated hours", hours)),
)
UPWARDS = (("accuracy", ACCURACY), ("loss", LOSS))
NAMES = tuple(f"{what}-{against}" for what, _ in UPWARDS for against, _ in ACROSS)


@dataclass(frozen=True)
class Chart:
    name: str  # of its file: accuracy-bytes
    title: str
    figure: Figure

    def svg(self) -> str:
        """The picture as an <svg> element, its text as text."""
        text = self._saved(format="svg", metadata={"Date": None, "Creator": None}).decode()
        return text[text.index("<svg") :].replace(
            "<svg ", f'<svg role="img" aria-label="{self.title}" ', 1
        )

    def png(self) -> bytes:
        return self._saved(format="png", dpi=200)

    def _saved(self, **how: Any) -> bytes:
        out = io.BytesIO()
        with (
            matplotlib.rc_context(SETTINGS),
            warnings.catch_warnings(action="ignore", category=UserWarning),
        ):  # glyphs that a font lacks
            self.figure.savefig(out, **how)
        return out.getvalue()


def charts(groups: Sequence[Group]) -> Iterator[Chart]:
    """Accuracy and loss against everything that was measured."""
    for what, up in UPWARDS:
        for against, across in ACROSS:
            lines = [line for group in groups if (line := _line(group, across, up))]
            if lines:
                title = f"{up.label.capitalize()} against {across.label.replace('round', 'rounds')}"
                yield Chart(f"{what}-{against}", title, _figure(lines, across, up))


@dataclass(frozen=True)
class Line:
    label: str
    x: np.ndarray
    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: int


def _line(group: Group, across: Axis, up: Axis) -> Line | None:
    """The mean over the seeds, and how far they lie apart, in the rounds that all have; None where nothing was measured."""
    rounds = min(len(run.records) for run in group.runs)
    if not rounds:
        return None
    x, y = (np.stack([axis.values(run)[:rounds] for run in group.runs]) for axis in (across, up))
    x, kept = x.mean(0), np.isfinite(x).all(0) & np.isfinite(y).all(0)
    if across.unit and not x[kept].any():
        return None  # nothing was sent
    y = y[:, kept]
    return (
        Line(group.label, x[kept], y.mean(0), y.min(0), y.max(0), len(group.runs))
        if kept.any()
        else None
    )


def _figure(lines: Sequence[Line], across: Axis, up: Axis) -> Figure:
    with matplotlib.rc_context(SETTINGS):
        figure = Figure((WIDTH, HEIGHT + 0.2 * len(lines)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for i, line in enumerate(lines):
            style = {
                "color": COLOURS[i % len(COLOURS)],
                "linestyle": DASHES[i % len(DASHES)],
                "marker": MARKERS[i % len(MARKERS)],
            }
            first = (
                i * len(line.x) // (MARKS * len(lines))
            )  # so that markers of different lines do not stand upon each other
            axes.plot(
                line.x,
                line.middle,
                linewidth=1.6,
                markersize=5,
                markevery=(first, max(1, len(line.x) // MARKS)),
                label=_named(line),
                **style,
            )
            if line.seeds > 1:
                axes.fill_between(
                    line.x, line.low, line.high, color=style["color"], alpha=0.15, linewidth=0
                )
        axes.set_xlabel(across.label)
        axes.set_ylabel(up.label)
        axes.grid(color="0.88", linewidth=0.8)
        axes.set_axisbelow(True)
        if up.share:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
        if across.whole:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if across.unit:
            if _apart(lines):
                axes.set_xscale("log")
            axes.xaxis.set_major_formatter(EngFormatter(across.unit))
        columns = 1 if max(len(_named(line)) for line in lines) > 28 else 2
        figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=10)
        return figure


def _apart(lines: Sequence[Line]) -> bool:
    """Whether one line ends far to the left of another, so that it would be lost on a plain scale."""
    ends = [float(line.x[-1]) for line in lines if line.x[-1] > 0]
    return len(ends) > 1 and max(ends) > 8 * min(ends)


def _named(line: Line) -> str:
    label = f"{line.label} ({line.seeds} seeds)" if line.seeds > 1 else line.label
    return "\n".join(
        textwrap.wrap(f" {label}" if label.startswith("_") else label, ACROSS_LEGEND)
    )  # what begins with _ is not shown
