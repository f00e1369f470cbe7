"""The progress of the alternatives of a comparison, and the displays of a comparison: a dashboard, or lines of text."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Self

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ...callbacks import RoundRecord
from ...formatting import NOTHING, decimal, duration, human_bytes, one_line, percent
from ...run_display import Totals
from ..screen import BAR, LABEL, REFRESHES_PER_SECOND, REJECTED, WARNING, progress_bar, truncated
from ..screen import DONE as GOOD

Facts = Sequence[tuple[str, str]]  # labels and values
WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"
SYMBOLS = {WAITING: "·", RUNNING: "▸", DONE: "✓", FAILED: "×"}
COLOURS = {WAITING: LABEL, RUNNING: "bold", DONE: GOOD, FAILED: REJECTED}
CURVE_CHARACTERS = "▁▂▃▄▅▆▇█"
# Widths in characters: minimum width of the column of names, minimum width of a curve, and width of all other columns together.
MIN_NAME, MIN_CURVE, OTHER_COLUMNS = 12, 20, 38


@dataclass
class AlternativeProgress:
    """The progress of one alternative. `accuracies` contains (round, accuracy) for each evaluated round."""

    name: str
    rounds: int  # number of rounds of the whole run
    state: str = WAITING
    round: int = 0  # number of the last finished round
    totals: Totals = field(default_factory=Totals)
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    last: RoundRecord | None = None  # record of the last evaluated round
    error: str = ""  # error message of a failed run

    @property
    def has_ended(self) -> bool:
        return self.state in (DONE, FAILED)

    @property
    def quality(self) -> str:
        """The last accuracy as text, or the last loss if the task has no accuracy."""
        if self.last is None:
            return NOTHING
        accuracy = self.last.measured_accuracy
        return decimal(self.last.measured_loss) if accuracy is None else percent(accuracy)

    def add(self, record: RoundRecord) -> None:
        self.round = record.round
        self.totals.add(record)
        accuracy = record.measured_accuracy
        if accuracy is not None or record.measured_loss is not None:
            self.last = record
        if accuracy is not None:
            self.accuracies.append((record.round, accuracy))


@dataclass
class ComparisonLines:
    """A display of a comparison that prints a line for each round of each alternative. Warnings go to standard error.

    A display is a context manager around the whole comparison.
    """

    clock: Callable[[], float] = monotonic
    all: list[AlternativeProgress] = field(default_factory=list)
    out: str = ""  # folder of the comparison, or "" until it exists
    start_s: float = 0.0  # value of `clock()` when the first run started
    earlier_rounds: int = 0  # rounds that were finished before the comparison was resumed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    @property
    def ended(self) -> int:
        return sum(progress.has_ended for progress in self.all)

    @property
    def remaining_s(self) -> float | None:
        """The estimated time in seconds until all alternatives are done, or None if this command has not finished a round yet."""
        done = sum(p.rounds if p.state == FAILED else p.round for p in self.all)
        all = sum(p.rounds for p in self.all)
        measured = done - self.earlier_rounds
        return (self.clock() - self.start_s) * (all - done) / measured if measured > 0 else None

    def on_checked(self, checked: int, total: int) -> None:
        """Handle progress before the first run: `checked` of `total` alternatives have been found valid."""

    def on_run_start(self, out: str, facts: Facts, all: list[AlternativeProgress]) -> None:
        """Handle the start of the first run in the comparison folder `out`.

        `facts`: pairs (label, value) that describe all alternatives. `all`: the progress of each alternative, which `on_message` updates.
        """
        self.out, self.all, self.start_s = out, all, self.clock()
        self.earlier_rounds = sum(progress.round for progress in all)
        for label, value in (*facts, ("folder", out)):
            print(f"{label:<14}{value}", flush=True)

    def on_message(self, index: int, message: dict[str, Any]) -> None:
        """Handle a message from a worker process about the alternative `self.all[index]`."""
        progress = self.all[index]
        if "started" in message:
            progress.state = RUNNING
        elif "earlier" in message:
            for record in message["earlier"]:
                progress.add(record)
            self.earlier_rounds += progress.round
        elif "round" in message:
            progress.add(message["round"])
            self.on_round_end(progress, message["round"])
        elif "warning" in message:
            self.on_warning(f"{progress.name}: {message['warning']}")
        else:
            progress.error = message["end"].get("failed", "")
            progress.state = FAILED if progress.error else DONE
            self.on_end(progress)

    def on_round_end(self, progress: AlternativeProgress, record: RoundRecord) -> None:
        accuracy, loss = record.measured_accuracy, record.measured_loss
        quality = f", accuracy {percent(accuracy)}" if accuracy is not None else ""
        quality += f", loss {decimal(loss)}" if loss is not None else ""
        sent = f"up {human_bytes(record.uplink_bytes)}, down {human_bytes(record.downlink_bytes)}"
        where = f"{progress.name}: round {record.round} of {progress.rounds}"
        print(f"{where}{quality}, {sent}, {duration(record.seconds)}", flush=True)

    def on_warning(self, message: str) -> None:
        print(f"warning: {one_line(message)}", file=sys.stderr, flush=True)

    def on_end(self, progress: AlternativeProgress) -> None:
        end = f"failed: {one_line(progress.error)}" if progress.error else "done"
        print(f"{progress.name}: {end} ({self.ended} of {len(self.all)})", flush=True)


class ComparisonView(ComparisonLines):
    """A live table of the alternatives on a terminal. The options that all share, warnings and failures are printed above the table.

    If the context ends with an error, the table is printed, so that it stays visible.
    """

    def __init__(self, console: Console | None = None):
        super().__init__()
        self.console = console or Console(file=sys.stdout, highlight=False)
        self._preparing = "preparing the alternatives"
        self._live = Live(
            console=self.console,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            get_renderable=lambda: self.picture(self.console.width, self.console.height - 1),
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()
        if self.all and error[0] is not None:
            self.console.print(self.picture(self.console.width, self.console.height - 4))

    def on_checked(self, checked: int, total: int) -> None:
        self._preparing = f"preparing the alternatives: {checked} of {total}"

    def on_round_end(self, progress: AlternativeProgress, record: RoundRecord) -> None: ...

    def on_warning(self, message: str) -> None:
        self.console.print(Text(f"! {one_line(message)}", WARNING))

    def on_end(self, progress: AlternativeProgress) -> None:
        if progress.error:
            self.console.print(Text(f"× {progress.name}: {one_line(progress.error)}", REJECTED))

    def picture(self, width: int, height: int) -> RenderableType:
        """Return the table as at most `height` lines of at most `width` characters."""
        if not self.all:
            return Text(self._preparing, LABEL)
        return Group(*truncated([self._bar(width), *self._table(width, height - 1)], width))

    def _bar(self, width: int) -> Text:
        fractions = [1.0 if p.has_ended else p.round / p.rounds for p in self.all]
        fraction = sum(fractions) / len(fractions)
        before, after = f"{self.ended} of {len(self.all)} done ", f" {100 * fraction:.0f} %"
        if self.ended < len(self.all) and (remaining_s := self.remaining_s) is not None:
            after += f", {duration(remaining_s)} left"
        return progress_bar(before, fraction, after, width)

    def _table(self, width: int, height: int) -> list[Text]:
        """Return the titles and a line for each alternative. If there are too many, running alternatives have priority.

        In this case, the last line counts the alternatives without a line.
        """
        shown, hidden = self.all, ""
        if len(self.all) > height - 1:
            order = [RUNNING, FAILED, DONE, WAITING]
            first = sorted(self.all, key=lambda p: order.index(p.state))[: max(height - 2, 1)]
            shown = [p for p in self.all if p in first]
            hidden = f"  and {len(self.all) - len(shown)} more"
        # All curves have the same scale.
        values = [accuracy for p in self.all for _, accuracy in p.accuracies] or [0.0, 1.0]
        bounds = min(values), max(values)
        longest = max(cell_len(p.name) for p in self.all)
        name = max(MIN_NAME, min(longest, width - OTHER_COLUMNS - MIN_CURVE))
        curve = width - OTHER_COLUMNS - name
        titles = f"  {'':<{name}}    round accuracy      up    down"
        lines = [Text(titles + "  accuracy over rounds" * (curve >= MIN_CURVE), LABEL)]
        for p in shown:
            line = Text(f"{SYMBOLS[p.state]} {p.name}", COLOURS[p.state])
            line.truncate(2 + name, overflow="ellipsis", pad=True)
            sent = (p.totals.uplink_bytes, p.totals.downlink_bytes)
            up, down = map(human_bytes, sent) if p.round else (NOTHING, NOTHING)
            rounds = f"{p.round}/{p.rounds}"
            line = Text.assemble(line, f"{rounds:>9}{p.quality:>9}{up:>8}{down:>8}")
            if curve >= MIN_CURVE:
                line.append("  ").append(_curve(p, curve, bounds), BAR)
            lines.append(line)
        return [*lines, Text(hidden, LABEL)] if hidden else lines


def _curve(progress: AlternativeProgress, width: int, bounds: tuple[float, float]) -> str:
    """Return the curve of accuracy as text. Each character shows the last accuracy in a range of rounds."""
    low, high = bounds
    drawn = ""
    for round, accuracy in progress.accuracies:
        height = (accuracy - low) / (high - low) if high > low else 1.0
        step = min(int(height * len(CURVE_CHARACTERS)), len(CURVE_CHARACTERS) - 1)
        columns = min((round - 1) * width // progress.rounds, width - 1)
        drawn = drawn[:columns].ljust(columns, drawn[-1:] or " ") + CURVE_CHARACTERS[step]
    return drawn
