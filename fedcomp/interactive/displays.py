"""Displays of a simulation that is called from Python: a line in a terminal, ten lines in a log, a picture in a notebook."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..callbacks import Callback, CallbackList, Header, RoundRecord
from ..errors import ConfigError
from ..formatting import decimal, duration, human_bytes, metric, one_line, ratio
from ..run_display import RunDisplay, rejections

LOG_LINES = 10  # for each run
BAR_WIDTH = 24  # characters


class ProgressDisplay(RunDisplay):
    """Records a run and shows nothing. The base class of the other displays."""

    _has_rejections = False

    def on_round_end(self, record: RoundRecord) -> None:
        super().on_round_end(record)
        if not self._has_rejections and (lines := rejections(record)):
            self._has_rejections = True
            self.on_warning(f"{lines[0]}; metrics.jsonl lists all rejections")

    def on_interrupt(self, message: str) -> None:
        """Show that the run was interrupted. The message says how to continue."""

    def progress_text(self) -> str:
        """Return the progress, for example "round 12/50, accuracy 91.20 %, up 1.2 kB ×98, down 2.3 kB ×51"."""
        if not self.has_started:
            return "preparing the run"
        t, last, parts = self.totals, self.last, [f"round {self.last_round}/{self.header.rounds}"]
        if last is not None and last.measured_loss is not None:
            judged = self.header.judged
            parts.append(f"{judged} {metric(judged, self.judged(last))}")
            if spread := last.client_metrics.get(judged):
                parts.append(f"worst decile of clients {metric(judged, spread.worst_decile)}")
            parts += [f"{name} {decimal(value)}" for name, value in last.metrics.items()]
        if last is not None:
            parts += [
                f"up {human_bytes(t.uplink_bytes)} {ratio(t.dense_uplink_bytes, t.uplink_bytes)}",
                f"down {human_bytes(t.downlink_bytes)} {ratio(t.dense_downlink_bytes, t.downlink_bytes)}",
            ]
        return ", ".join(parts)

    def time_left(self) -> str:
        """Return the estimated time of the remaining rounds."""
        pace = self.seconds_a_round
        rest = self.header.rounds - self.last_round if self.has_started else 0
        return f"{duration(pace * rest)} left" if pace is not None and rest else ""


class LogDisplay(ProgressDisplay):
    """Writes a line after each tenth of the rounds to `stream`, by default standard error."""

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
            self._print(", ".join(filter(None, (self.progress_text(), self.time_left()))))

    def on_warning(self, sentence: str) -> None:
        self._print(f"warning: {one_line(sentence)}")

    def on_interrupt(self, message: str) -> None:
        self._print(message)

    def _print(self, line: str) -> None:
        print(line, file=self.stream, flush=True)


class TerminalDisplay(ProgressDisplay):
    """Shows a progress bar on the terminal of standard error, below the warnings."""

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

    def __enter__(self) -> "TerminalDisplay":
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


@contextmanager
def open_display(progress: bool | Callback | None) -> Iterator[tuple[Callback, ProgressDisplay]]:
    """Enter the display of a run. Yield the callback for the run, and the display. Raises ConfigError for an invalid `progress`."""
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
    """Return the display for a notebook, a terminal, or a log."""
    if in_notebook():
        from .notebook import NotebookDisplay

        return NotebookDisplay()
    terminal = os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    return TerminalDisplay() if terminal and sys.stderr.isatty() else LogDisplay()


def in_notebook() -> bool:
    """Return whether this process is an IPython kernel, which shows HTML. IPython in a terminal has no kernel."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return getattr(shell, "kernel", None) is not None
