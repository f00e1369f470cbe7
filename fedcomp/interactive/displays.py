"""Displays for `fedcomp.simulate`: a progress bar in a terminal, ten lines in a log, or a chart in a notebook."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from html import escape
from time import monotonic
from typing import Any, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..callbacks import Callback, CallbackList, Header, RoundRecord, Summary
from ..errors import ConfigError
from ..formatting import decimal, duration, metric, one_line
from ..run_display import RunDisplay, evenly_spaced, rejections, summary_rows

LOG_LINES = 10  # maximum number of progress lines that a run prints to a log
BAR_WIDTH = 24  # width of the progress bar, in characters
# Constants of the notebook display:
UPDATE_S = 0.25  # minimum time between updates, in seconds
MAX_POINTS = 200  # maximum number of points of the curve
WIDTH, HEIGHT = 480, 120  # size of the curve in pixels
MARGIN, FONT_SIZE = 54, 11  # pixels; the left margin contains the axis labels
MAX_WARNINGS = 5


class ProgressDisplay(RunDisplay):
    """Base class of the displays for `simulate`. It records the progress of a run, but shows nothing."""

    _has_rejections = False

    def on_round_end(self, record: RoundRecord) -> None:
        super().on_round_end(record)
        if not self._has_rejections and (lines := rejections(record)):
            self._has_rejections = True
            self.on_warning(f"{lines[0]}; metrics.jsonl lists all rejections")

    def on_interrupt(self, message: str) -> None:
        """Show that the run was interrupted. `message` says how to continue the run."""

    def progress_text(self) -> str:
        """Return the progress as text, such as "round 12/50, accuracy 91.20 %, up 1.2 kB ×98, down 2.3 kB ×51"."""
        if not self.has_started:
            return "preparing the run"
        last, parts = self.last, [f"round {self.last_round}/{self.header.rounds}"]
        if last is not None and last.measured_loss is not None:
            judged = self.header.judged
            parts.append(f"{judged} {metric(judged, self.judged(last))}")
            if spread := last.client_metrics.get(judged):
                parts.append(f"worst decile of clients {metric(judged, spread.worst_decile)}")
            parts += [f"{name} {decimal(value)}" for name, value in last.metrics.items()]
        return ", ".join(parts + (self.totals.links() if last is not None else []))

    def time_left(self) -> str:
        """Return text such as "12 s left", or "" if the remaining time is unknown or no round remains."""
        pace = self.seconds_a_round
        rest = self.header.rounds - self.last_round if self.has_started else 0
        return f"{duration(pace * rest)} left" if pace is not None and rest else ""

    def progress_with_time(self) -> str:
        return ", ".join(filter(None, (self.progress_text(), self.time_left())))


class LogDisplay(ProgressDisplay):
    """A display that prints at most ten lines of progress per run, and warnings, to `stream`. The default is standard error."""

    def __init__(self, stream: TextIO | None = None):
        super().__init__()
        self.stream = stream or sys.stderr

    def on_run_start(self, header: Header) -> None:
        super().on_run_start(header)
        self._print(f"{header.task}, {header.clients:,} clients, {header.uplink}, in {header.out}")

    def on_round_end(self, record: RoundRecord) -> None:
        super().on_round_end(record)
        rounds, done = self.header.rounds, record.round
        if done * LOG_LINES // rounds > (done - 1) * LOG_LINES // rounds:
            self._print(self.progress_with_time())

    def on_warning(self, sentence: str) -> None:
        self._print(f"warning: {one_line(sentence)}")

    def on_interrupt(self, message: str) -> None:
        self._print(message)

    def _print(self, line: str) -> None:
        print(line, file=self.stream, flush=True)


class TerminalDisplay(ProgressDisplay):
    """A progress bar in the terminal, on standard error, with warnings above the bar."""

    def __init__(self, console: Console | None = None):
        super().__init__()
        self.console = console or Console(stderr=True, highlight=False)
        self._live = Live(
            console=self.console,
            refresh_per_second=5,
            get_renderable=self._picture,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=True,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def on_warning(self, sentence: str) -> None:
        self.console.print(Text(f"! {one_line(sentence)}", "dark_orange3"))

    def on_interrupt(self, message: str) -> None:
        self.console.print(Text(message), soft_wrap=True)

    def _picture(self) -> Table:
        line = Table.grid(padding=(0, 1))
        done, rounds = self.last_round, self.header.rounds if self.has_started else 1
        line.add_row(
            ProgressBar(rounds, done, BAR_WIDTH),
            Text(self.progress_text(), no_wrap=True, overflow="ellipsis"),
            Text(self.time_left(), "dim"),
        )
        return line


class NotebookDisplay(ProgressDisplay):
    """A display that shows progress and a curve of accuracy or loss in a notebook.

    `display` is a function such as `IPython.display.display`. It is called as `display(bundle, raw=True, display_id=True)`, and must return
    a handle with which the output can be updated. `bundle` maps the MIME types text/html and text/plain to text.
    """

    def __init__(self, display: Callable[..., Any], clock: Callable[[], float] = monotonic):
        super().__init__(clock)
        self._display = display
        self._next_s = 0.0
        self._handle: Any = None  # handle of the notebook output, or None before the first output
        self._notes: list[str] = []
        self._result: list[tuple[str, str]] = []
        self._final_text = ""  # why the run ended early

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
        self._show_if_due()

    def on_warning(self, sentence: str) -> None:
        if (note := one_line(sentence)) not in self._notes:
            self._notes.append(note)

    def on_interrupt(self, message: str) -> None:
        self._final_text = message

    def on_run_end(self, summary: Summary, out: str) -> None:
        self._result = [*summary_rows(summary, self.totals), ("folder", out)]

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
        """Return the progress of the run, or the results of an ended run, as HTML."""
        if not self.has_started:
            return f"<div>{escape(self._final_text or self.progress_text())}</div>"
        h, done = self.header, self.last_round
        head = f"<b>{escape(h.task)}</b>, {h.clients:,} clients, {h.cohort:,} a round, {escape(h.uplink)}"
        bar = f'<progress value="{done}" max="{h.rounds}" style="width:100%"></progress>'
        state = self._final_text or self.progress_with_time()
        progress = [] if self._result else [bar, escape(state)]
        notes = [f"! {escape(note)}" for note in self._notes[-MAX_WARNINGS:]]
        row = 2 * '<td style="text-align:left">{}</td>'
        rows = [f"<tr>{row.format(escape(k), escape(v))}</tr>" for k, v in self._result]
        table = f"<table>{''.join(rows)}</table>" if rows else ""
        parts = [head, *progress, self._curve(), table, *notes]
        inner = "".join(f"<div>{part}</div>" for part in parts if part)
        return f'<div style="max-width:{WIDTH + 20}px">{inner}</div>'

    def _curve(self) -> str:
        """Return the curve of accuracy or loss over rounds as an <svg> element, or "" if there are fewer than two points."""
        if len(self.points) < 2:
            return ""
        points = [self.points[i] for i in evenly_spaced(len(self.points), MAX_POINTS)]
        low, high = min(value for _, value in points), max(value for _, value in points)
        first, last = points[0][0], points[-1][0]
        across = (WIDTH - MARGIN - 4) / (last - first)
        up = (HEIGHT - 2 * FONT_SIZE - 4) / ((high - low) or 1.0)
        line = " ".join(
            f"{MARGIN + (x - first) * across:.1f},{FONT_SIZE + (high - y) * up:.1f}"
            for x, y in points
        )
        bottom, judged = HEIGHT - FONT_SIZE - 4, self.header.judged
        labels = [
            (MARGIN - 4, FONT_SIZE + 4, "end", metric(judged, high)),
            (MARGIN - 4, bottom, "end", metric(judged, low)),
            (MARGIN, HEIGHT - 2, "start", f"round {first}"),
            (WIDTH - 4, HEIGHT - 2, "end", f"{judged}, round {last}"),
        ]
        texts = "".join(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'
            for x, y, anchor, text in labels
        )
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-size="{FONT_SIZE}" fill="currentColor">{texts}'
            f'<polyline points="{line}" fill="none" stroke="#1f83c4" stroke-width="1.8"/></svg>'
        )


@contextmanager
def open_display(progress: bool | Callback | None) -> Iterator[tuple[Callback, ProgressDisplay]]:
    """Open the display that `progress`, an argument of `simulate`, chooses. Yield the callback to pass to the run, and the display.

    Raises ConfigError if `progress` has another type.
    """
    if progress is None or progress is True:
        progress = default_display()
    if progress is False:
        progress = ProgressDisplay()
    if not isinstance(progress, Callback):
        raise ConfigError(
            f"progress is a {type(progress).__name__}; give None, False, or a fedcomp.callbacks.Callback"
        )
    with progress if isinstance(progress, RunDisplay) else nullcontext():
        if isinstance(progress, ProgressDisplay):
            yield progress, progress
        else:
            display = ProgressDisplay()
            yield CallbackList(progress, {"the display": display}), display


def default_display() -> ProgressDisplay:
    """Return the display that suits this process: a notebook, terminal or log display."""
    # IPython has a kernel in a notebook, but not in a terminal.
    ipython = sys.modules.get("IPython")
    if ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None:
        from IPython.display import display

        return NotebookDisplay(display)
    terminal = os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    return TerminalDisplay() if terminal and sys.stderr.isatty() else LogDisplay()
