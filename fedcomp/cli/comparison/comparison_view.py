"""The dashboard of a comparison: the progress, accuracy, bytes and curve of each alternative."""

from collections import deque
from collections.abc import Sequence
from threading import Lock
from time import monotonic
from typing import Any, Self

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.text import Text

from ...formatting import NOTHING, duration, human_bytes, one_line
from ..screen import BAR, LABEL, REJECTED, WARNING, Screen, facts_panel, fitted, progress_bar
from ..screen import DONE as GOOD
from .progress import DONE, FAILED, RUNS, WAITS, AlternativeProgress, ComparisonDisplay

SIGNS = {WAITS: "·", RUNS: "▸", DONE: "✓", FAILED: "×"}
COLOURS = {WAITS: LABEL, RUNS: "bold", DONE: GOOD, FAILED: REJECTED}
STEPS = "▁▂▃▄▅▆▇█"
NARROWEST, LOWEST = 40, 8
# Widths of the columns in characters; those of NAME and CURVE are minima.
NAME, ROUND, REACHED, BYTES, CURVE = 12, 9, 9, 8, 12
NOTES = 3


class ComparisonView(ComparisonDisplay):
    """Draws on the terminal's second screen while it is entered. After an error it leaves the last picture on the first one."""

    def __init__(self, console: Console | None = None):
        super().__init__(monotonic)
        self._screen = Screen(console, self.picture, "preparing the alternatives")
        self.console = self._screen.console
        self._notes: deque[Text] = deque(maxlen=100)  # warnings and failures, each once
        self._lock = Lock()  # between the comparison and the thread that draws

    def __enter__(self) -> Self:
        self._screen.open()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._screen.close()
        if self.all and error is not None:
            height = max(self.console.height - 4, LOWEST)
            self.console.print(self.picture(self.console.width, height))
        for note in self._notes:
            self.console.print(note)

    def checked(self, done: int, of: int) -> None:
        self._screen.status.update(f"preparing the alternatives: {done} of {of}")

    def on_run_start(
        self, out: str, facts: Sequence[tuple[str, str]], all: list[AlternativeProgress]
    ) -> None:
        super().on_run_start(out, facts, all)
        self._screen.draw()

    def hear(self, number: int, answer: dict[str, Any]) -> None:
        with self._lock:
            super().hear(number, answer)

    def on_warning(self, sentence: str) -> None:
        self._note(Text(f"! {one_line(sentence)}", WARNING))

    def over(self, progress: AlternativeProgress) -> None:
        if progress.state == FAILED:
            self._note(Text(f"× {progress.name}: {one_line(progress.why)}", REJECTED))

    def _note(self, note: Text) -> None:
        if note not in self._notes:
            self._notes.append(note)

    def picture(self, width: int, height: int) -> RenderableType:
        """Return the screen in at most `height` lines of at most `width` characters."""
        width, height = max(width, NARROWEST), max(height, LOWEST)
        head, notes = [], []
        with self._lock:
            if height >= 16:
                title = f"[bold]fedcomp[/bold] {len(self.all)} alternatives"
                head = [facts_panel(self.facts, width, 4, title=title, path=self.out)]
                notes = [note.copy() for note in self._notes][-NOTES:]
            rest = height - sum(panel.height for panel in head) - len(notes) - 1
            lines = [self._bar(width), *self._table(width, rest), *notes]
        return Group(*head, *fitted(lines, width))

    def _bar(self, width: int) -> Text:
        share = sum(p.share for p in self.all) / max(len(self.all), 1)
        before, after = f"{self.ended} of {len(self.all)} done ", f" {100 * share:.0f} %"
        if self.ended < len(self.all) and (left := self.left_s) is not None:
            after += f", {duration(left)} left"
        return progress_bar(before, share, after, width)

    def _table(self, width: int, height: int) -> list[Text]:
        """Return a line for each alternative. If there is no room for all, those that run come first, and a line counts the others."""
        shown, hidden = self.all, ""
        if len(self.all) > height - 1:
            order = [RUNS, FAILED, DONE, WAITS]
            first = sorted(range(len(self.all)), key=lambda i: order.index(self.all[i].state))
            kept = sorted(first[: max(height - 2, 1)])
            shown = [self.all[i] for i in kept]
            hidden = f"  and {len(self.all) - len(kept)} more"
        longest = max((cell_len(p.name) for p in self.all), default=NAME)
        rest = width - 2 - ROUND - REACHED - 2 * BYTES
        name = min(longest, max(NAME, rest - CURVE))
        curve = rest - name - 2
        # The same for all curves, so that they can be compared.
        values = [accuracy for p in self.all for _, accuracy in p.accuracies] or [0.0, 1.0]
        bounds = min(values), max(values)
        head = f"  {'':<{name}}{'round':>{ROUND}}{'accuracy':>{REACHED}}{'up':>{BYTES}}{'down':>{BYTES}}"
        title = "accuracy over rounds" if curve >= 20 else "curve"
        lines = [Text(head + f"  {title}" * (curve >= CURVE), LABEL)]
        for p in shown:
            label = Text(f"{SIGNS[p.state]} {p.name}", COLOURS[p.state])
            label.truncate(2 + name, overflow="ellipsis", pad=True)
            sent = (p.totals.uplink_bytes, p.totals.downlink_bytes) if p.round else ()
            up, down = map(human_bytes, sent) if sent else (NOTHING, NOTHING)
            rounds = f"{p.round}/{p.rounds}"
            figures = f"{rounds:>{ROUND}}{p.reached:>{REACHED}}{up:>{BYTES}}{down:>{BYTES}}"
            line = Text.assemble(label, figures)
            if curve >= CURVE:
                line.append("  ").append(_curve(p, curve, bounds), BAR)
            lines.append(line)
        return [*lines, Text(hidden, LABEL)] if hidden else lines


def _curve(progress: AlternativeProgress, width: int, bounds: tuple[float, float]) -> str:
    """Return the accuracy over all rounds of the run: a character shows the last value of several rounds."""
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
