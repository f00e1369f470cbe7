"""The display of a run in a notebook: one output cell that is updated in place."""

import math
from collections.abc import Callable
from html import escape
from time import monotonic
from typing import Any, Self

from ..callbacks import Header, RoundRecord, Summary
from ..formatting import decimal, one_line, percent
from ..run_display import verdict
from .displays import ProgressDisplay

UPDATE_S = 0.25  # between updates
MAX_POINTS = 200  # of the curve
WIDTH, HEIGHT = 480, 120  # pixels
MARGIN, FONT_SIZE = 54, 11  # pixels; the margin holds the labels to the left of the curve
MAX_WARNINGS = 5


class NotebookDisplay(ProgressDisplay):
    """Shows the run through `display`, which is IPython's unless given: `display(bundle, raw=True, display_id=True)` → a handle.

    A bundle has the picture as HTML, and a line of text for front ends without HTML. Colours are those of the notebook.
    """

    def __init__(
        self, display: Callable[..., Any] | None = None, clock: Callable[[], float] = monotonic
    ):
        super().__init__(clock)
        self._display = _ipython_display() if display is None else display
        self._next_s = 0.0
        self._handle: Any = None  # None before the first display
        self._points: list[tuple[int, float]] = []
        self._notes: list[str] = []
        self._result: list[tuple[str, str]] = []
        self._final_text = ""

    def __enter__(self) -> Self:
        self._show()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt):
            self._final_text = f"failed: {error}"
        self._show()

    def on_run_start(self, header: Header) -> None:
        super().on_run_start(header)
        self._show()

    def on_progress(self, round: int, answered: int, cohort: int) -> None:
        self._show_if_due()

    def on_round_end(self, record: RoundRecord) -> None:
        super().on_round_end(record)
        value = self.judged(record)
        if value is not None and math.isfinite(value):
            self._points.append((record.round, value))
        self._show_if_due()

    def on_warning(self, sentence: str) -> None:
        if (note := one_line(sentence)) not in self._notes:
            self._notes.append(note)

    def on_interrupt(self, message: str) -> None:
        self._final_text = message

    def on_run_end(self, summary: Summary, out: str) -> None:
        self._result = [*verdict(summary, self.totals), ("folder", out)]

    def _show_if_due(self) -> None:
        if self.clock() >= self._next_s:
            self._show()

    def _show(self) -> None:
        bundle = {"text/html": self.html(), "text/plain": self._final_text or self.progress_text()}
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)
        self._next_s = self.clock() + UPDATE_S

    def html(self) -> str:
        """Return the picture as HTML."""
        if not self.has_started:
            return f"<div>{escape(self._final_text or self.progress_text())}</div>"
        h, done = self.header, self.last_round
        head = f"<b>{escape(h.task)}</b>, {h.clients:,} clients, {h.cohort:,} a round, {escape(h.uplink)}"
        bar = f'<progress value="{done}" max="{h.rounds}" style="width:100%"></progress>'
        state = self._final_text or ", ".join(
            filter(None, (self.progress_text(), self.time_left()))
        )
        progress = [] if self._result else [bar, escape(state)]
        notes = [f"! {escape(note)}" for note in self._notes[-MAX_WARNINGS:]]
        parts = [head, *progress, self._curve(), self._table(), *notes]
        inner = "".join(f"<div>{part}</div>" for part in parts if part)
        return f'<div style="max-width:{WIDTH + 20}px">{inner}</div>'

    def _table(self) -> str:
        cell = '<td style="text-align:left">{}</td>'
        rows = "".join(
            f"<tr>{cell.format(escape(label))}{cell.format(escape(value))}</tr>"
            for label, value in self._result
        )
        return f"<table>{rows}</table>" if rows else ""

    def _curve(self) -> str:
        """Return an <svg> of accuracy or loss over rounds."""
        if len(self._points) < 2:
            return ""
        stride = -(-len(self._points) // MAX_POINTS)
        points = [*self._points[:-1:stride], self._points[-1]]
        low, high = min(value for _, value in points), max(value for _, value in points)
        first, last = points[0][0], points[-1][0]
        across = (WIDTH - MARGIN - 4) / (last - first)
        up = (HEIGHT - 2 * FONT_SIZE - 4) / ((high - low) or 1.0)
        line = " ".join(
            f"{MARGIN + (x - first) * across:.1f},{FONT_SIZE + (high - y) * up:.1f}"
            for x, y in points
        )
        bottom, shown = (
            HEIGHT - FONT_SIZE - 4,
            percent if self.header.judged == "accuracy" else decimal,
        )
        labels = [
            (MARGIN - 4, FONT_SIZE + 4, "end", shown(high)),
            (MARGIN - 4, bottom, "end", shown(low)),
            (MARGIN, HEIGHT - 2, "start", f"round {first}"),
            (WIDTH - 4, HEIGHT - 2, "end", f"{self.header.judged}, round {last}"),
        ]
        texts = "".join(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'
            for x, y, anchor, text in labels
        )
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-size="{FONT_SIZE}" fill="currentColor">{texts}'
            f'<polyline points="{line}" fill="none" stroke="#1f83c4" stroke-width="1.8"/></svg>'
        )


def _ipython_display() -> Callable[..., Any]:
    from IPython.display import display

    return display
