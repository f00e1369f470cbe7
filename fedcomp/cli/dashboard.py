"""The run on one screen: what runs, how far it is, the curve of accuracy, the last rounds, and the verdict at the end."""

import io
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from threading import Lock
from time import monotonic
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..callbacks import Header, RoundRecord, Summary
from ..formatting import decimal, duration, human_bytes, one_line, percent, ratio
from ..watch import (
    GAP,
    Column,
    Watch,
    awaited,
    columns_for,
    columns_of,
    facts,
    how_to_load,
    model_file,
    rejections,
    suspects,
    verdict,
)
from .curve import Curve

REFRESHES_A_SECOND = 5
SLOW = (
    2.0  # seconds; in rounds that take longer, the clients that answered are counted on the screen
)
NARROWEST, LOWEST = 30, 10  # below, the picture is cut off
WIDE = 150  # from here on, the curve and the rounds stand side by side
TALLEST = 24  # lines of the curve; what is left goes to the rounds
# Colours of middle lightness, to be read on a dark and on a light background.
LABEL = "dim"
FRAME = "dim"
BAR = "deep_sky_blue3"
DONE = "spring_green4"
WARNING = "dark_orange3"
REJECTED = "red3"


class Dashboard(Watch):
    """Draws on the terminal's second screen while it is entered; leaves the last picture and the verdict on the first one.

    What others print meanwhile is held back and printed afterwards. Not entered, it only follows, for whoever asks for a `picture`.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = monotonic):
        super().__init__(clock)
        self.console = console or Console(file=sys.stdout, highlight=False)
        self._curve = Curve()
        self._records: deque[RoundRecord] = deque(maxlen=100)
        self._notes: deque[Text] = deque(maxlen=6)  # the newest warnings and rejections
        self._warnings: deque[Text] = deque(maxlen=100)  # each once
        self._running = (0, 0)  # clients that answered in the round that runs, and its cohort
        self._awaited = ""  # who is connected, while a round waits for clients
        self._ending: tuple[Summary, str] | None = None
        self._lock = Lock()  # between the run and the thread that draws
        self._screen: ExitStack | None = None  # what is to be undone on the terminal, once entered
        self._aside = _Aside()

    def __enter__(self) -> Self:
        self._screen = ExitStack()
        self._screen.enter_context(self.console.status("preparing the run", spinner="line"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._screen.close()
        if self.last:
            self.console.print(
                self.picture(
                    self.console.width, min(max(self.console.height - 14, 15), 28), notes=0
                )
            )
        for note in [
            *self._warnings,
            *(note for note in self._notes if note not in self._warnings),
        ]:
            self.console.print(note)
        for line in self._aside.lines():
            self.console.print(Text(line), soft_wrap=True)
        if self._ending:
            self.console.print(self.verdict())
            for line in how_to_load(self._ending[1]):
                self.console.print(Text("  " + line), soft_wrap=True)

    def started(self, header: Header) -> None:
        super().started(header)
        self._curve.share = header.judged == "accuracy"
        if self._screen:
            self._screen.close()
            self._screen.enter_context(redirect_stdout(self._aside))
            self._screen.enter_context(redirect_stderr(self._aside))
            self._screen.enter_context(
                Live(
                    console=self.console,
                    screen=True,
                    refresh_per_second=REFRESHES_A_SECOND,
                    redirect_stdout=False,
                    redirect_stderr=False,
                    get_renderable=lambda: self.picture(*self.console.size),
                )
            )

    def waiting(self, here: Sequence[int], wanted: int) -> None:
        self._awaited = awaited(here, wanted) if len(here) < wanted else ""

    def progress(self, round: int, answered: int, cohort: int) -> None:
        self._running, self._awaited = (answered, cohort), ""

    def round_done(self, record: RoundRecord) -> None:
        with self._lock:
            super().round_done(record)
            self._running = (0, 0)
            self._records.append(record)
            if (
                judged := getattr(record, self.header.judged if self.header else "accuracy")
            ) is not None:
                self._curve.add(record.round, judged)
            self._notes.extend(Text(f"× {line}", REJECTED) for line in rejections(record))

    def warning(self, sentence: str) -> None:
        note = Text(f"! {one_line(sentence)}", WARNING)
        with self._lock:
            if note not in self._warnings:
                self._warnings.append(note)
                self._notes.append(note)

    def finished(self, summary: Summary, out: str) -> None:
        super().finished(summary, out)
        self._ending = (summary, out)

    def picture(self, width: int, height: int, notes: int | None = None) -> RenderableType:
        """The whole screen in at most `height` lines of at most `width` characters, with at most so many `notes`."""
        if not self.header:
            return Text("preparing the run", LABEL)
        width, height = max(width, NARROWEST), max(height, LOWEST)
        with self._lock:
            head, lines = self._head(width, height), [self._bar(width), *self._sums(width)]
            taken = len(lines) + (1 if isinstance(head, Text) else head.height)
            room = notes if notes is not None else 1 if height < 20 else 3 if height < 40 else 6
            said = [note.copy() for note in self._notes][
                len(self._notes) - min(room, len(self._notes)) :
            ]
            rest = height - taken - len(said)
            body = self._side_by_side(width, rest) if width >= WIDE else self._stacked(width, rest)
        for line in (*lines, *body, *said):
            line.truncate(width, overflow="ellipsis")
            line.no_wrap = True
        return Group(head, *lines, *body, *said)

    def _head(self, width: int, height: int) -> Panel | Text:
        h = self.header
        if height < 20:
            return Text(
                f"{h.task}, {h.clients:,} clients, {h.uplink}",
                "bold",
                overflow="ellipsis",
                no_wrap=True,
            )
        pairs = [(label, value) for label, value in facts(h)[:-1] if value != h.notice]
        most = 1 if width < 76 else 2 if width < WIDE else 4
        high = 3 if height < 24 else 4 if height < 36 else 8
        for columns in range(most, 0, -1):
            lines = _side_by_side(
                [Text.assemble((f"{label:<9}", LABEL), value) for label, value in pairs],
                columns,
                high,
            )
            if max(line.cell_len for line in lines) <= width - 4:
                break
        for i, line in enumerate(
            textwrap.wrap(
                h.notice, max(width - 13, 20), max_lines=1 if height < 24 else 2, placeholder="…"
            )
        ):
            lines.append(Text.assemble((f"{'' if i else 'note':<9}", LABEL), line))
        for line in lines:
            line.truncate(width - 4, overflow="ellipsis")
        return Panel(
            Group(*lines),
            title="[bold]fedcomp",
            title_align="left",
            subtitle=_framed(h.out, width),
            subtitle_align="left",
            border_style=FRAME,
            width=width,
            height=len(lines) + 2,
        )

    def _bar(self, width: int) -> Text:
        rounds, done, (answered, cohort) = self.header.rounds, self.last_round, self._running
        pace, now = self.seconds_a_round, done + answered / max(cohort, 1)
        share = min(now / max(rounds, 1), 1.0)
        before, after = f"round {done}/{rounds} ", f" {100 * share:.0f} %"
        if pace is not None and done < rounds:
            after += f", {duration(pace * max(rounds - now, 0))} left"
        if answered and width >= 60 and (pace is None or pace > SLOW):
            before += f"+ {answered}/{cohort} clients "
        room = width - len(before) - len(after)
        filled = int(2 * room * share)
        bar = "━" * (filled // 2) + "╸" * (filled % 2)
        return Text.assemble(
            (before, "bold"),
            (bar, DONE if share == 1 else BAR),
            ("─" * (room - len(bar)), LABEL),
            after,
        )

    def _sums(self, width: int) -> list[Text]:
        """Who is there while a round waits, else what was sent since the run began or was resumed; from the left, as much as fits.

        Who is suspected has a line of its own where there is no room for all.
        """
        if self._awaited:
            return [Text(f"waiting: {self._awaited}", WARNING, overflow="ellipsis")]
        t, pace = self.totals, self.seconds_a_round
        since = (
            f"since round {self.header.first_round - 1}: " if self.header.first_round > 1 else ""
        )
        suspected = [f"suspected: {who}"] if self.last and (who := suspects(self.last)) else []
        said = [
            f"{since}up {human_bytes(t.uplink_bytes)} {ratio(t.dense_uplink_bytes, t.uplink_bytes)}",
            f"down {human_bytes(t.downlink_bytes)} {ratio(t.dense_downlink_bytes, t.downlink_bytes)}",
            f"both {ratio(t.dense_uplink_bytes + t.dense_downlink_bytes, t.uplink_bytes + t.downlink_bytes)}",
            *([f"{t.rejected:,} rejected"] if t.rejected else []),
            *suspected,
            *(
                [f"{duration(3600 * hours)} virtual"]
                if self.last and (hours := self.last.simulated_hours) is not None
                else []
            ),
            *([f"{duration(pace)} a round"] if pace is not None else []),
        ]
        if len(line := ", ".join(said)) <= width:
            return [Text(line, LABEL)]
        said = [figure for figure in said if figure not in suspected]
        while len(said) > 1 and len(", ".join(said)) > width:
            said.pop()
        return [Text(line, LABEL) for line in (", ".join(said), *suspected)]

    def _stacked(self, width: int, height: int) -> list[Text]:
        blank = [Text()] * (height >= 16)
        table = self._table(
            columns_for(width, columns_of(self.header)),
            max(2, 2 * height // 5 - 1, height - TALLEST - 3),
        )
        room = min(height - len(table) - 2 * len(blank), TALLEST)
        return [*blank, *self._titled_curve(width, room), *blank, *table]

    def _side_by_side(self, width: int, height: int) -> list[Text]:
        columns = columns_for(width // 2 + 20, columns_of(self.header))
        height = min(height, TALLEST + 8)
        table = self._table(columns, height - 2)
        room = width - sum(c.width + GAP for c in columns) - GAP
        lines = [Text()]
        for i, line in enumerate(self._titled_curve(room, height - 1)):
            line.truncate(room, pad=True)
            lines.append(line.append(" " * GAP).append_text(table[i]) if i < len(table) else line)
        return lines

    def _titled_curve(self, width: int, height: int) -> list[Text]:
        if height < 3:
            return []
        if height < 6:
            return self._curve.lines(width, height)
        judged, shown = self.header.judged, percent if self.header.judged == "accuracy" else decimal
        title = Text.assemble((judged, "bold"))
        if self.best:
            newest = next(
                (r for r in reversed(self._records) if self.merit(r) is not None), self.best
            )
            title.append(f" {shown(getattr(newest, judged))}", "bold")
            title.append(
                f", best {shown(getattr(self.best, judged))} in round {self.best.round}", LABEL
            )
        return [title, *self._curve.lines(width, height - 1)]

    def _table(self, columns: list[Column], rows: int) -> list[Text]:
        between = " " * GAP
        lines = [Text(between.join(c.title.rjust(c.width) for c in columns), LABEL)]
        for record in list(self._records)[-rows:]:
            lines.append(Text(between.join(c.cell(record).rjust(c.width) for c in columns)))
        return lines

    def verdict(self) -> Panel:
        """How the run ended; to be asked for after `finished`."""
        summary, out = self._ending
        grid = Table.grid(padding=(0, GAP))
        grid.add_column(style=LABEL)
        grid.add_column(overflow="fold")
        for label, value in [*verdict(summary, self.totals), ("model", model_file(out))]:
            grid.add_row(label, Text(value, "bold" if label == self.header.judged else ""))
        return Panel(
            grid,
            title=f"{summary.rounds} round{'s' * (summary.rounds != 1)} done",
            title_align="left",
            border_style=DONE,
        )


def _framed(text: str, width: int) -> Text:
    """A text for the frame of a panel; of a path too long for it, the end."""
    room = width - 6
    return Text(text if len(text) <= room else "…" + text[len(text) - room + 1 :])


class _Aside(io.TextIOBase):
    """Holds the last 200 lines that were printed."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=200)
        self._unfinished = ""

    def write(self, text: str) -> int:
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        self._lines.extend(lines)
        return len(text)

    def lines(self) -> list[str]:
        return [*self._lines, *([self._unfinished] if self._unfinished else [])]


def _side_by_side(cells: Sequence[Text], columns: int, high: int) -> list[Text]:
    """The first of the cells in columns, down one and then down the next, at most `high` lines."""
    rows = min(-(-len(cells) // columns), high)
    lines = [Text() for _ in range(rows)]
    for first in range(0, rows * columns, rows):
        left = max(line.cell_len for line in lines)
        for line, cell in zip(lines, cells[first : first + rows], strict=False):
            line.pad_right(left - line.cell_len + 2 * GAP * bool(first))
            line.append_text(cell)
    return lines
