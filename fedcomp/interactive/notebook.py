"""The display of a run in a notebook: one output cell, updated in place and small when the notebook is saved."""

import math
from collections.abc import Callable
from html import escape
from time import monotonic
from typing import Any, Self

from ..callbacks import Header, RoundRecord, Summary
from ..formatting import decimal, one_line, percent
from ..run_display import verdict
from .displays import ProgressDisplay

EVERY_S = 0.25  # between updates
POINTS = 200  # of the curve, at most
WIDTH, HEIGHT = 480, 120  # pixels
MARGIN, SMALL = 54, 11  # pixels for the labels left of the curve, and height of the letters
NOTES = 5  # warnings that are shown


class NotebookDisplay(ProgressDisplay):
    """Shows the run through `display`, which is IPython's unless given: `display(bundle, raw=True, display_id=True)` → a handle.

    A bundle has the picture as HTML, and a sentence as text for places that show no HTML. Colours are those of the notebook.
    """

    def __init__(
        self, display: Callable[..., Any] | None = None, clock: Callable[[], float] = monotonic
    ):
        super().__init__(clock)
        if display is None:
            from IPython.display import display
        self._display, self._handle, self._next_s = display, None, 0.0
        self._points: list[tuple[int, float]] = []
        self._notes: list[str] = []
        self._ending: list[tuple[str, str]] = []
        self._last_words = ""

    def __enter__(self) -> Self:
        self._show()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt):
            self._last_words = f"failed: {error}"
        self._show()

    def on_run_start(self, header: Header) -> None:
        super().on_run_start(header)
        self._show()

    def on_progress(self, round: int, answered: int, cohort: int) -> None:
        self._show_sometimes()

    def on_round_end(self, record: RoundRecord) -> None:
        super().on_round_end(record)
        value = self.judged(record)
        if value is not None and math.isfinite(value):
            self._points.append((record.round, value))
        self._show_sometimes()

    def on_warning(self, sentence: str) -> None:
        if (note := one_line(sentence)) not in self._notes:
            self._notes.append(note)

    def stopped(self, sentence: str) -> None:
        self._last_words = sentence

    def on_run_end(self, summary: Summary, out: str) -> None:
        self._ending = [*verdict(summary, self.totals), ("folder", out)]

    def _show_sometimes(self) -> None:
        if self.clock() >= self._next_s:
            self._show()

    def _show(self) -> None:
        bundle = {"text/html": self.html(), "text/plain": self._last_words or self.sentence()}
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)
        self._next_s = self.clock() + EVERY_S

    def html(self) -> str:
        """Return the picture as HTML."""
        if self.header is None:
            return f"<div>{escape(self._last_words or self.sentence())}</div>"
        h, done = self.header, self.last_round
        head = f"<b>{escape(h.task)}</b>, {h.clients:,} clients, {h.cohort:,} a round, {escape(h.uplink)}"
        bar = f'<progress value="{done}" max="{h.rounds}" style="width:100%"></progress>'
        state = self._last_words or ", ".join(filter(None, (self.sentence(), self.time_left())))
        progress = [] if self._ending else [bar, escape(state)]
        notes = [f"! {escape(note)}" for note in self._notes[-NOTES:]]
        parts = [head, *progress, self._curve(), self._table(), *notes]
        inner = "".join(f"<div>{part}</div>" for part in parts if part)
        return f'<div style="max-width:{WIDTH + 20}px">{inner}</div>'

    def _table(self) -> str:
        cell = '<td style="text-align:left">{}</td>'
        rows = "".join(
            f"<tr>{cell.format(escape(label))}{cell.format(escape(value))}</tr>"
            for label, value in self._ending
        )
        return f"<table>{rows}</table>" if rows else ""

    def _curve(self) -> str:
        """Return an <svg> of accuracy or loss over rounds."""
        if len(self._points) < 2:
            return ""
        stride = -(-len(self._points) // POINTS)
        points = [*self._points[:-1:stride], self._points[-1]]
        low, high = min(value for _, value in points), max(value for _, value in points)
        first, last = points[0][0], points[-1][0]
        across = (WIDTH - MARGIN - 4) / (last - first)
        up = (HEIGHT - 2 * SMALL - 4) / ((high - low) or 1.0)
        line = " ".join(
            f"{MARGIN + (x - first) * across:.1f},{SMALL + (high - y) * up:.1f}" for x, y in points
        )
        bottom, shown = HEIGHT - SMALL - 4, percent if self.header.judged == "accuracy" else decimal
        said = [
            (MARGIN - 4, SMALL + 4, "end", shown(high)),
            (MARGIN - 4, bottom, "end", shown(low)),
            (MARGIN, HEIGHT - 2, "start", f"round {first}"),
            (WIDTH - 4, HEIGHT - 2, "end", f"{self.header.judged}, round {last}"),
        ]
        texts = "".join(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'
            for x, y, anchor, text in said
        )
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-size="{SMALL}" fill="currentColor">{texts}'
            f'<polyline points="{line}" fill="none" stroke="#1f83c4" stroke-width="1.8"/></svg>'
        )
