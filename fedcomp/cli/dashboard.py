"""The terminal dashboard of a run: options, progress, a curve of accuracy or loss, the last rounds, and the results at the end."""

import io
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import replace
from threading import Lock
from time import monotonic
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..callbacks import Header, RoundRecord
from ..formatting import duration, metric, one_line
from ..run_display import (
    GAP,
    RunDisplay,
    columns_for,
    columns_of,
    header_rows,
    how_to_load,
    model_file,
    rejections,
    summary_rows,
    suspects,
    table_line,
    total_ratio,
    waiting_text,
)
from .screen import (
    DONE,
    LABEL,
    REFRESHES_PER_SECOND,
    REJECTED,
    WARNING,
    curve,
    facts_panel,
    progress_bar,
    truncated,
)

SLOW_ROUND_S = 2.0  # if rounds take longer, the progress line counts the clients that have answered
MIN_WIDTH, MIN_HEIGHT = 30, 10  # characters; on a smaller terminal, the dashboard is cut off
MAX_CURVE_HEIGHT = 24  # lines; a taller terminal shows more rounds in the table below the curve


class Dashboard(RunDisplay):
    """A dashboard that fills the terminal while its context is open. Output of other code is buffered meanwhile.

    On exit, the last state of the dashboard, the buffered output and the results are printed on the main screen. Outside of its context, a
    dashboard prints nothing, but `picture` returns its content.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = monotonic):
        super().__init__(clock)
        self.console = console or Console(file=sys.stdout, highlight=False)
        self._screen = ExitStack()  # open spinner or live dashboard
        self._entered = False
        self._records: deque[RoundRecord] = deque(maxlen=100)
        self._notes: deque[Text] = deque(maxlen=6)  # the latest warnings and rejected updates
        self._warnings: deque[Text] = deque(maxlen=100)  # warnings without duplicates
        self._answered, self._cohort = 0, 0  # numbers of clients in the current round
        self._waiting = ""  # text that is shown while the run waits for more clients
        self._lock = Lock()  # protects data that the run updates and the drawing thread reads
        self._other_output = _LastLines()

    def __enter__(self) -> Self:
        spinner = self.console.status("preparing the run", spinner="line")
        self._screen.enter_context(spinner)
        self._entered = True
        return self

    def __exit__(self, *error: object) -> None:
        self._screen.close()
        if self.last:
            height = min(max(self.console.height - 14, 15), 28)
            self.console.print(self.picture(self.console.width, height, notes=0))
        rejected = [note for note in self._notes if note not in self._warnings]
        for note in [*self._warnings, *rejected]:
            self.console.print(note)
        for line in self._other_output.lines():
            self.console.print(Text(line), soft_wrap=True)
        if self.summary:
            self.console.print(self.verdict())
            for line in how_to_load(self.header.out):
                self.console.print(Text("  " + line), soft_wrap=True)

    def on_run_start(self, header: Header) -> None:
        super().on_run_start(header)
        if not self._entered:
            return
        self._screen.close()
        live = Live(
            console=self.console,
            screen=True,
            refresh_per_second=REFRESHES_PER_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
            get_renderable=lambda: self.picture(*self.console.size),
        )
        other = self._other_output
        for context in (redirect_stdout(other), redirect_stderr(other), live):
            self._screen.enter_context(context)

    def on_waiting(self, connected: Sequence[int], wanted: int) -> None:
        self._waiting = waiting_text(connected, wanted) if len(connected) < wanted else ""

    def on_progress(self, round: int, answered: int, cohort: int) -> None:
        self._answered, self._cohort, self._waiting = answered, cohort, ""

    def on_round_end(self, record: RoundRecord) -> None:
        with self._lock:
            super().on_round_end(record)
            self._answered, self._cohort = 0, 0
            self._records.append(record)
            self._notes.extend(Text(f"× {line}", REJECTED) for line in rejections(record))

    def on_warning(self, sentence: str) -> None:
        note = Text(f"! {one_line(sentence)}", WARNING)
        with self._lock:
            if note not in self._warnings:
                self._warnings.append(note)
                self._notes.append(note)

    def picture(self, width: int, height: int, notes: int | None = None) -> RenderableType:
        """Return the dashboard in at most `height` lines of at most `width` characters, with at most `notes` warnings and rejections."""
        if not self.has_started:
            return Text("preparing the run", LABEL)
        width, height = max(width, MIN_WIDTH), max(height, MIN_HEIGHT)
        if notes is None:
            notes = 1 if height < 20 else 3 if height < 40 else 6
        with self._lock:
            head, lines = self._head(width, height), [self._bar(width), *self._sums(width)]
            last_notes = [note.copy() for note in list(self._notes)[-notes:]] if notes else []
            used = len(lines) + len(last_notes)
            used += 1 if isinstance(head, Text) else head.height or 0
            lines += [*self._body(width, height - used), *last_notes]
        return Group(head, *truncated(lines, width))

    def _head(self, width: int, height: int) -> Panel | Text:
        h = self.header
        if height < 20:
            return truncated([Text(f"{h.task}, {h.clients:,} clients, {h.uplink}", "bold")], width)[
                0
            ]
        reason = h.engine_reason and f"engine: {h.engine_reason}"
        notice = "; ".join(filter(None, (h.notice, reason)))
        notes, rows = (1, 3) if height < 24 else (2, 4) if height < 36 else (2, 8)
        note = textwrap.wrap(notice, max(width - 13, 20), max_lines=notes, placeholder="…")
        short = header_rows(replace(h, notice="", engine_reason=""))[:-1]
        return facts_panel(short, note, h.out, width, rows)

    def _bar(self, width: int) -> Text:
        rounds, done, pace = self.header.rounds, self.last_round, self.seconds_a_round
        answered, cohort = self._answered, self._cohort
        now = done + answered / max(cohort, 1)
        fraction = min(now / max(rounds, 1), 1.0)
        before, after = f"round {done}/{rounds} ", f" {100 * fraction:.0f} %"
        if pace is not None and done < rounds:
            after += f", {duration(pace * max(rounds - now, 0))} left"
        if answered and width >= 60 and (pace is None or pace > SLOW_ROUND_S):
            before += f"+ {answered}/{cohort} clients "
        return progress_bar(before, fraction, after, width)

    def _sums(self, width: int) -> list[Text]:
        """Return a line about connected clients if the run waits for clients, else lines with the bytes since the start or resumption."""
        if self._waiting:
            return [Text(f"waiting: {self._waiting}", WARNING)]
        t, pace = self.totals, self.seconds_a_round
        first, hours = self.header.first_round, self.last.simulated_hours if self.last else None
        since = f"since round {first - 1}: " if first > 1 else ""
        up, down = t.links()
        parts = [since + up, down, f"both {total_ratio(t)}"]
        parts += [f"{t.rejected:,} rejected"] if t.rejected else []
        parts += [f"{duration(3600 * hours)} virtual"] if hours is not None else []
        parts += [f"{duration(pace)} a round"] if pace is not None else []
        while len(parts) > 1 and len(", ".join(parts)) > width:
            parts.pop()
        lines = [Text(", ".join(parts), LABEL)]
        if self.last and (suspected := suspects(self.last)):
            lines.append(Text(f"suspected: {suspected}", LABEL))
        return lines

    def _body(self, width: int, height: int) -> list[Text]:
        """Return the curve of accuracy or loss, and a table of the last rounds below it."""
        blank = [Text()] * (height >= 16)
        columns = columns_for(width, columns_of(self.header))
        records = list(self._records)[-max(2, 2 * height // 5 - 1, height - MAX_CURVE_HEIGHT - 3) :]
        rows = [Text(table_line(columns), LABEL), *(Text(table_line(columns, r)) for r in records)]
        room = min(height - len(rows) - 2 * len(blank), MAX_CURVE_HEIGHT)
        return [*blank, *self._titled_curve(width, room), *blank, *rows]

    def _titled_curve(self, width: int, height: int) -> list[Text]:
        judged, best = self.header.judged, self.best
        if height < 3:
            return []
        if height < 6:
            return curve(self.points, judged, width, height)
        title = Text.assemble((judged, "bold"))
        if best:
            latest = next((r for r in reversed(self._records) if self.merit(r) is not None), best)
            spread = latest.client_metrics.get(judged)
            title.append(f" {metric(judged, self.judged(latest))}", "bold")
            more = f", best {metric(judged, self.judged(best))} in round {best.round}"
            if self.header.evaluate == "both" and spread:
                more += f", on clients {metric(judged, spread.mean)}"
            if spread:
                more += f", worst decile {metric(judged, spread.worst_decile)}"
            title.append(more, LABEL)
        return [title, *curve(self.points, judged, width, height - 1)]

    def verdict(self) -> Panel:
        """Return a panel with the results of a run that has ended."""
        assert self.summary is not None
        summary, out = self.summary, self.header.out
        grid = Table.grid(padding=(0, GAP))
        grid.add_column(style=LABEL)
        grid.add_column(overflow="fold")
        for label, value in [*summary_rows(summary, self.totals), ("model", model_file(out))]:
            grid.add_row(label, Text(value, "bold" if label == self.header.judged else ""))
        title = f"{summary.rounds} round{'s' * (summary.rounds != 1)} done"
        return Panel(grid, title=title, title_align="left", border_style=DONE)


class _LastLines(io.TextIOBase):
    """A text stream that stores only its last 200 lines."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=200)
        self._unfinished = ""

    def write(self, text: str) -> int:
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        self._lines.extend(lines)
        return len(text)

    def lines(self) -> list[str]:
        return [*self._lines, *([self._unfinished] if self._unfinished else [])]
