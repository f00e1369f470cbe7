"""All alternatives on one screen: how far each is, what it has reached, what it has sent, and its curve."""

import sys
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from threading import Lock
from time import monotonic
from types import TracebackType
from typing import Self

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.status import Status
from rich.text import Text

from ...callbacks import RoundRecord
from ...formatting import NOTHING, duration, human_bytes, one_line
from ..dashboard import BAR, FRAME, LABEL, REFRESHES_A_SECOND, REJECTED, WARNING
from ..dashboard import DONE as GOOD
from .progress import DONE, FAILED, RUNS, WAITS, Progress, Watch

SIGNS = {WAITS: "·", RUNS: "▸", DONE: "✓", FAILED: "×"}
COLOURS = {WAITS: LABEL, RUNS: "bold", DONE: GOOD, FAILED: REJECTED}
STEPS = "▁▂▃▄▅▆▇█"
NARROWEST, LOWEST = 40, 8
NAME, ROUND, REACHED, BYTES, CURVE = (
    12,
    9,
    9,
    8,
    12,
)  # column widths in characters; those of NAME and CURVE are minima
NOTES = 3


class ComparisonView(Watch):
    """Draws on the terminal's second screen while it is entered, and leaves the last picture on the first one."""

    def __init__(self, console: Console | None = None):
        super().__init__(monotonic)
        self.console = console or Console(file=sys.stdout, highlight=False)
        self._notes: deque[Text] = deque(maxlen=100)  # warnings and failures, each once
        self._lock = Lock()  # between what is heard and the thread that draws
        self._screen: ExitStack | None = None
        self._status: Status | None = None

    def __enter__(self) -> Self:
        self._screen = ExitStack()
        self._status = self._screen.enter_context(
            self.console.status("preparing the alternatives", spinner="line")
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._screen.close()
        if self.all and error is not None:
            self.console.print(
                self.picture(self.console.width, max(self.console.height - 4, LOWEST))
            )
        for note in self._notes:
            self.console.print(note)

    def checked(self, done: int, of: int) -> None:
        self._status.update(f"preparing the alternatives: {done} of {of}")

    def started(self, out: str, facts: Sequence[tuple[str, str]], all: list[Progress]) -> None:
        super().started(out, facts, all)
        self._screen.close()
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

    def hear(self, number: int, answer: dict) -> None:
        with self._lock:
            super().hear(number, answer)

    def round_done(self, progress: Progress, record: RoundRecord) -> None: ...

    def warning(self, sentence: str) -> None:
        self._note(Text(f"! {one_line(sentence)}", WARNING))

    def over(self, progress: Progress) -> None:
        if progress.state == FAILED:
            self._note(Text(f"× {progress.name}: {one_line(progress.why)}", REJECTED))

    def _note(self, note: Text) -> None:
        if note not in self._notes:
            self._notes.append(note)

    def picture(self, width: int, height: int) -> RenderableType:
        """The whole screen in at most `height` lines of at most `width` characters."""
        width, height = max(width, NARROWEST), max(height, LOWEST)
        with self._lock:
            notes = [note.copy() for note in self._notes][-NOTES:] if height >= 16 else []
            head = self._head(width) if height >= 16 else None
            rest = height - (head.height if head else 0) - len(notes) - 1
            lines = [self._bar(width), *self._table(width, rest), *notes]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
            line.no_wrap = True
        return Group(*([head] if head else []), *lines)

    def _head(self, width: int) -> Panel:
        lines, line = [], Text()
        for label, value in self.facts:
            fact = Text.assemble((f"{label} ", LABEL), value)
            if line and line.cell_len + 3 + fact.cell_len > width - 4:
                lines.append(line)
                line = Text()
            line.append_text(Text("   ") if line else Text()).append_text(fact)
        lines = [*lines, line][:4]
        for each in lines:
            each.truncate(width - 4, overflow="ellipsis")
        return Panel(
            Group(*lines),
            title=f"[bold]fedcomp[/bold] {len(self.all)} alternatives",
            title_align="left",
            border_style=FRAME,
            subtitle=Text(self.out[-(width - 6) :]),
            subtitle_align="left",
            width=width,
            height=len(lines) + 2,
        )

    def _bar(self, width: int) -> Text:
        share = sum(1.0 if p.state == FAILED else p.share for p in self.all) / max(len(self.all), 1)
        before, after = f"{self.ended} of {len(self.all)} done ", f" {100 * share:.0f} %"
        if self.ended < len(self.all) and (left := self.left_s) is not None:
            after += f", {duration(left)} left"
        room = max(width - len(before) - len(after), 0)
        filled = int(room * share)
        return Text.assemble(
            (before, "bold"),
            ("━" * filled, GOOD if share == 1 else BAR),
            ("─" * (room - filled), LABEL),
            after,
        )

    def _table(self, width: int, height: int) -> list[Text]:
        """The alternatives in their order; where there is no room for all, those that run first, and a line that counts the others."""
        shown, hidden = self.all, ""
        if len(self.all) > height - 1:
            order = {RUNS: 0, FAILED: 1, DONE: 2, WAITS: 3}
            kept = sorted(
                range(len(self.all)),
                key=lambda i: (order[self.all[i].state], -i if self.all[i].state == DONE else i),
            )
            kept = sorted(kept[: max(height - 2, 1)])
            shown, hidden = [self.all[i] for i in kept], f"  and {len(self.all) - len(kept)} more"
        longest = max((cell_len(p.name) for p in self.all), default=NAME)
        rest = width - 2 - ROUND - REACHED - 2 * BYTES
        name = min(longest, max(NAME, rest - CURVE))
        curve = rest - name - 2
        bounds = self._bounds()
        head = f"  {'':<{name}}{'round':>{ROUND}}{'accuracy':>{REACHED}}{'up':>{BYTES}}{'down':>{BYTES}}"
        title = "accuracy over rounds" if curve >= 20 else "curve"
        lines = [Text(head + f"  {title}" * (curve >= CURVE), LABEL)]
        for p in shown:
            told = Text(p.name, COLOURS[p.state])
            told.truncate(name, overflow="ellipsis", pad=True)
            t = p.totals
            line = Text.assemble((f"{SIGNS[p.state]} ", COLOURS[p.state]), told)
            sent = (
                [human_bytes(t.uplink_bytes), human_bytes(t.downlink_bytes)]
                if p.round
                else [NOTHING, NOTHING]
            )
            line.append(
                f"{f'{p.round}/{p.rounds}':>{ROUND}}{p.reached:>{REACHED}}"
                + "".join(f"{text:>{BYTES}}" for text in sent)
            )
            if curve >= CURVE:
                line.append("  ").append(_curve(p, curve, bounds), BAR)
            lines.append(line)
        return [*lines, Text(hidden, LABEL)] if hidden else lines

    def _bounds(self) -> tuple[float, float]:
        """Of all curves, so that they can be compared."""
        found = [accuracy for p in self.all for _, accuracy in p.accuracies]
        return (min(found), max(found)) if found else (0.0, 1.0)


def _curve(progress: Progress, width: int, bounds: tuple[float, float]) -> str:
    """Accuracy over all rounds to come, a character for the newest accuracy of a stretch of rounds."""
    low, high = bounds
    heights: dict[int, int] = {}
    for round, accuracy in progress.accuracies:
        share = (accuracy - low) / (high - low) if high > low else 1.0
        heights[min((round - 1) * width // progress.rounds, width - 1)] = min(
            int(share * len(STEPS)), len(STEPS) - 1
        )
    last, drawn = None, []
    for column in range(max(heights, default=-1) + 1):
        last = heights.get(column, last)
        drawn.append(" " if last is None else STEPS[last])
    return "".join(drawn)
