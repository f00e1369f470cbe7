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
from .progress import DONE, FAILED, RUNNING, WAITING, AlternativeProgress, ComparisonDisplay

SYMBOLS = {WAITING: "·", RUNNING: "▸", DONE: "✓", FAILED: "×"}
COLOURS = {WAITING: LABEL, RUNNING: "bold", DONE: GOOD, FAILED: REJECTED}
CURVE_CHARACTERS = "▁▂▃▄▅▆▇█"
MIN_WIDTH, MIN_HEIGHT = 40, 8
# Widths of the columns in characters. Those of NAME and CURVE are minima.
NAME, ROUND, QUALITY, BYTES, CURVE = 12, 9, 9, 8, 12
MAX_NOTES = 3  # warnings and failures below the table


class ComparisonView(ComparisonDisplay):
    """Draws on the terminal's alternate screen while it is entered. After an error, the last picture is printed on the main screen."""

    def __init__(self, console: Console | None = None):
        super().__init__(monotonic)
        self._screen = Screen(console, self.picture, "preparing the alternatives")
        self.console = self._screen.console
        self._notes: deque[Text] = deque(maxlen=100)  # warnings and failures, each once
        self._lock = Lock()  # between the comparison and the thread that draws

    def __enter__(self) -> Self:
        self._screen.open()
        return self

    def __exit__(self, *error: object) -> None:
        self._screen.close()
        if self.all and error[0] is not None:
            height = max(self.console.height - 4, MIN_HEIGHT)
            self.console.print(self.picture(self.console.width, height))
        for note in self._notes:
            self.console.print(note)

    def on_checked(self, checked: int, total: int) -> None:
        self._screen.status.update(f"preparing the alternatives: {checked} of {total}")

    def on_run_start(
        self, out: str, facts: Sequence[tuple[str, str]], all: list[AlternativeProgress]
    ) -> None:
        super().on_run_start(out, facts, all)
        self._screen.draw()

    def on_answer(self, index: int, answer: dict[str, Any]) -> None:
        with self._lock:
            super().on_answer(index, answer)

    def on_warning(self, message: str) -> None:
        self._note(Text(f"! {one_line(message)}", WARNING))

    def on_end(self, progress: AlternativeProgress) -> None:
        if progress.state == FAILED:
            self._note(Text(f"× {progress.name}: {one_line(progress.error)}", REJECTED))

    def _note(self, note: Text) -> None:
        if note not in self._notes:
            self._notes.append(note)

    def picture(self, width: int, height: int) -> RenderableType:
        """Return the screen in at most `height` lines of at most `width` characters."""
        width, height = max(width, MIN_WIDTH), max(height, MIN_HEIGHT)
        head, notes = [], []
        with self._lock:
            if height >= 16:
                title = f"[bold]fedcomp[/bold] {len(self.all)} alternatives"
                head = [facts_panel(self.facts, width, 4, title=title, path=self.out)]
                notes = [note.copy() for note in self._notes][-MAX_NOTES:]
            rest = height - sum(panel.height or 0 for panel in head) - len(notes) - 1
            lines = [self._bar(width), *self._table(width, rest), *notes]
        return Group(*head, *fitted(lines, width))

    def _bar(self, width: int) -> Text:
        fraction = sum(p.fraction for p in self.all) / max(len(self.all), 1)
        before, after = f"{self.ended} of {len(self.all)} done ", f" {100 * fraction:.0f} %"
        if self.ended < len(self.all) and (remaining_s := self.remaining_s) is not None:
            after += f", {duration(remaining_s)} left"
        return progress_bar(before, fraction, after, width)

    def _table(self, width: int, height: int) -> list[Text]:
        """Return a line for each alternative. Where room is short, running ones come first, and the last line counts the others."""
        shown, hidden = self.all, ""
        if len(self.all) > height - 1:
            order = [RUNNING, FAILED, DONE, WAITING]
            first = sorted(range(len(self.all)), key=lambda i: order.index(self.all[i].state))
            visible = sorted(first[: max(height - 2, 1)])
            shown = [self.all[i] for i in visible]
            hidden = f"  and {len(self.all) - len(visible)} more"
        longest = max((cell_len(p.name) for p in self.all), default=NAME)
        rest = width - 2 - ROUND - QUALITY - 2 * BYTES
        name = min(longest, max(NAME, rest - CURVE))
        curve = rest - name - 2
        # The same for all curves, so that they can be compared.
        values = [accuracy for p in self.all for _, accuracy in p.accuracies] or [0.0, 1.0]
        bounds = min(values), max(values)
        head = f"  {'':<{name}}{'round':>{ROUND}}{'accuracy':>{QUALITY}}{'up':>{BYTES}}{'down':>{BYTES}}"
        title = "accuracy over rounds" if curve >= 20 else "curve"
        lines = [Text(head + f"  {title}" * (curve >= CURVE), LABEL)]
        for p in shown:
            label = Text(f"{SYMBOLS[p.state]} {p.name}", COLOURS[p.state])
            label.truncate(2 + name, overflow="ellipsis", pad=True)
            sent = (p.totals.uplink_bytes, p.totals.downlink_bytes) if p.round else ()
            up, down = map(human_bytes, sent) if sent else (NOTHING, NOTHING)
            rounds = f"{p.round}/{p.rounds}"
            figures = f"{rounds:>{ROUND}}{p.quality:>{QUALITY}}{up:>{BYTES}}{down:>{BYTES}}"
            line = Text.assemble(label, figures)
            if curve >= CURVE:
                line.append("  ").append(_curve(p, curve, bounds), BAR)
            lines.append(line)
        return [*lines, Text(hidden, LABEL)] if hidden else lines


def _curve(progress: AlternativeProgress, width: int, bounds: tuple[float, float]) -> str:
    """Return the accuracy over all rounds of the run as text. Each character shows the last value of some consecutive rounds."""
    low, high = bounds
    heights: dict[int, int] = {}
    for round, accuracy in progress.accuracies:
        height = (accuracy - low) / (high - low) if high > low else 1.0
        heights[min((round - 1) * width // progress.rounds, width - 1)] = min(
            int(height * len(CURVE_CHARACTERS)), len(CURVE_CHARACTERS) - 1
        )
    last, drawn = None, []
    for column in range(max(heights, default=-1) + 1):
        last = heights.get(column, last)
        drawn.append(" " if last is None else CURVE_CHARACTERS[last])
    return "".join(drawn)
