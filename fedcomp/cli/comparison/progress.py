"""The progress of each alternative, and the base class of the displays that show it."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Self

from ...callbacks import RoundRecord
from ...formatting import NOTHING, decimal, duration, human_bytes, one_line, percent
from ...run_display import Totals

# Fields of a RoundRecord that worker processes send.
SENT_FIELDS = (
    *("round", "accuracy", "loss", "train_loss", "cohort", "accepted", "rejected", "seconds"),
    *("uplink_bytes", "downlink_bytes", "dense_uplink_bytes", "dense_downlink_bytes"),
)
WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"


@dataclass
class AlternativeProgress:
    """The progress of one alternative. `accuracies`: measured values, by round."""

    name: str
    rounds: int  # of the whole run
    state: str = WAITING
    round: int = 0
    totals: Totals = field(default_factory=Totals)
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    last: RoundRecord | None = None  # of the last round that was evaluated
    error: str = ""  # of a failed run

    @property
    def fraction(self) -> float:
        """The finished part of the rounds, 0..1; 1 for a failed run."""
        return 1.0 if self.state in (DONE, FAILED) else self.round / self.rounds

    @property
    def quality(self) -> str:
        """The last accuracy as text, or the loss of a task without accuracy."""
        if self.last is None:
            return NOTHING
        if self.last.accuracy is not None:
            return percent(self.last.accuracy)
        return decimal(self.last.loss)

    def add(self, record: RoundRecord) -> None:
        """Add a finished round."""
        self.round = record.round
        self.totals.add(record)
        if record.accuracy is not None or record.loss is not None:
            self.last = record
        if record.accuracy is not None:
            self.accuracies.append((record.round, record.accuracy))


@dataclass
class ComparisonDisplay:
    """Base class of displays of a comparison, which shows nothing.

    It is entered before the alternatives are checked, and exited when all have ended or the command is interrupted.
    """

    clock: Callable[[], float] = monotonic
    all: list[AlternativeProgress] = field(default_factory=list)
    out: str = ""  # the folder of the alternatives, once it exists
    facts: Sequence[tuple[str, str]] = ()  # options that all have in common
    start_s: float = 0.0  # time of the clock when the first alternative started
    earlier_rounds: int = 0  # rounds of earlier commands

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    @property
    def ended(self) -> int:
        return sum(progress.state in (DONE, FAILED) for progress in self.all)

    @property
    def remaining_s(self) -> float | None:
        """The estimated time in seconds until all are done; None before the first round."""
        done = sum(p.rounds if p.state == FAILED else p.round for p in self.all)
        all = sum(p.rounds for p in self.all)
        measured = done - self.earlier_rounds
        return (self.clock() - self.start_s) * (all - done) / measured if measured > 0 else None

    def on_checked(self, checked: int, total: int) -> None:
        """Handle that `checked` of `total` alternatives have been checked."""

    def on_run_start(
        self, out: str, facts: Sequence[tuple[str, str]], all: list[AlternativeProgress]
    ) -> None:
        """Handle the start of the first alternative."""
        self.out, self.facts, self.all, self.start_s = out, facts, all, self.clock()

    def on_answer(self, index: int, answer: dict[str, Any]) -> None:
        """Handle an answer of a worker process about alternative `index`."""
        progress = self.all[index]
        if "started" in answer:
            progress.state = RUNNING
        elif "earlier" in answer:
            for values in answer["earlier"]:
                progress.add(RoundRecord(**values))
            self.earlier_rounds += progress.round
        elif "round" in answer:
            record = RoundRecord(**answer["round"])
            progress.add(record)
            self.on_round_end(progress, record)
        elif "warning" in answer:
            self.on_warning(f"{progress.name}: {answer['warning']}")
        else:
            progress.error = answer["end"].get("failed", "")
            progress.state = FAILED if progress.error else DONE
            self.on_end(progress)

    def on_round_end(self, progress: AlternativeProgress, record: RoundRecord) -> None: ...

    def on_warning(self, message: str) -> None: ...

    def on_end(self, progress: AlternativeProgress) -> None: ...


class ComparisonLines(ComparisonDisplay):
    """Prints a line for each round of each alternative, for pipes, logs and screen readers; warnings go to standard error."""

    def on_run_start(
        self, out: str, facts: Sequence[tuple[str, str]], all: list[AlternativeProgress]
    ) -> None:
        super().on_run_start(out, facts, all)
        for label, value in facts:
            print(f"{label:<14}{value}", flush=True)

    def on_round_end(self, progress: AlternativeProgress, record: RoundRecord) -> None:
        quality = f", accuracy {percent(record.accuracy)}" if record.accuracy is not None else ""
        quality += f", loss {decimal(record.loss)}" if record.loss is not None else ""
        sent = f"up {human_bytes(record.uplink_bytes)}, down {human_bytes(record.downlink_bytes)}"
        where = f"{progress.name}: round {record.round} of {progress.rounds}"
        print(f"{where}{quality}, {sent}, {duration(record.seconds)}", flush=True)

    def on_warning(self, message: str) -> None:
        print(f"warning: {one_line(message)}", file=sys.stderr, flush=True)

    def on_end(self, progress: AlternativeProgress) -> None:
        end = f"failed: {one_line(progress.error)}" if progress.state == FAILED else "done"
        print(f"{progress.name}: {end} ({self.ended} of {len(self.all)})", flush=True)
