"""The progress of each alternative, for the screens that show it."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Self

from ...callbacks import RoundRecord
from ...formatting import NOTHING, decimal, duration, human_bytes, one_line, percent
from ...run_display import Totals

# Fields of a round's record that are passed on.
FIGURES = (
    *("round", "accuracy", "loss", "train_loss", "cohort", "accepted", "rejected", "seconds"),
    *("uplink_bytes", "downlink_bytes", "dense_uplink_bytes", "dense_downlink_bytes"),
)
WAITS, RUNS, DONE, FAILED = "waits", "runs", "done", "failed"


@dataclass
class AlternativeProgress:
    """The progress of one alternative. `accuracies`: measured values, by round."""

    name: str
    rounds: int  # of the whole run
    state: str = WAITS
    round: int = 0
    totals: Totals = field(default_factory=Totals)
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    last: RoundRecord | None = None  # the last one that was evaluated
    why: str = ""  # the error of a failed run

    @property
    def share(self) -> float:
        return 1.0 if self.state in (DONE, FAILED) else self.round / self.rounds

    @property
    def reached(self) -> str:
        """The accuracy, or the loss of a task that has none."""
        if self.last is None:
            return NOTHING
        if self.last.accuracy is not None:
            return percent(self.last.accuracy)
        return decimal(self.last.loss)

    def add(self, record: RoundRecord) -> None:
        self.round = record.round
        self.totals.add(record)
        if record.accuracy is not None or record.loss is not None:
            self.last = record
        if record.accuracy is not None:
            self.accuracies.append((record.round, record.accuracy))


@dataclass
class ComparisonDisplay:
    """Follows alternatives. Entered before they are prepared, left when all have ended or the command is interrupted."""

    clock: Callable[[], float] = monotonic
    all: list[AlternativeProgress] = field(default_factory=list)
    out: str = ""  # their folder, once it exists
    facts: Sequence[tuple[str, str]] = ()  # options that all have in common
    began: float = 0.0
    before: int = 0  # rounds that were done when this command began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    @property
    def ended(self) -> int:
        return sum(progress.state in (DONE, FAILED) for progress in self.all)

    @property
    def left_s(self) -> float | None:
        """The estimated time in seconds until all are done; None before the first round."""
        done = sum(p.rounds if p.state == FAILED else p.round for p in self.all)
        all = sum(p.rounds for p in self.all)
        took = done - self.before
        return (self.clock() - self.began) * (all - done) / took if took > 0 else None

    def checked(self, done: int, of: int) -> None:
        """Note that `done` alternatives can be run."""

    def on_run_start(
        self, out: str, facts: Sequence[tuple[str, str]], all: list[AlternativeProgress]
    ) -> None:
        self.out, self.facts, self.all, self.began = out, facts, all, self.clock()

    def hear(self, number: int, answer: dict[str, Any]) -> None:
        """Note an answer about an alternative."""
        progress = self.all[number]
        if "begun" in answer:
            progress.state = RUNS
        elif "earlier" in answer:
            for values in answer["earlier"]:
                progress.add(RoundRecord(**values))
            self.before += progress.round
        elif "round" in answer:
            record = RoundRecord(**answer["round"])
            progress.add(record)
            self.on_round_end(progress, record)
        elif "warning" in answer:
            self.on_warning(f"{progress.name}: {answer['warning']}")
        else:
            progress.why = answer["end"].get("failed", "")
            progress.state = FAILED if progress.why else DONE
            self.over(progress)

    def on_round_end(self, progress: AlternativeProgress, record: RoundRecord) -> None: ...

    def on_warning(self, sentence: str) -> None: ...

    def over(self, progress: AlternativeProgress) -> None: ...


class ComparisonLines(ComparisonDisplay):
    """Prints a line for each round of each alternative, for pipes, logs and screen readers; warnings go to standard error."""

    def on_run_start(
        self, out: str, facts: Sequence[tuple[str, str]], all: list[AlternativeProgress]
    ) -> None:
        super().on_run_start(out, facts, all)
        for label, value in facts:
            print(f"{label:<14}{value}", flush=True)

    def on_round_end(self, progress: AlternativeProgress, record: RoundRecord) -> None:
        reached = f", accuracy {percent(record.accuracy)}" if record.accuracy is not None else ""
        reached += f", loss {decimal(record.loss)}" if record.loss is not None else ""
        sent = f"up {human_bytes(record.uplink_bytes)}, down {human_bytes(record.downlink_bytes)}"
        where = f"{progress.name}: round {record.round} of {progress.rounds}"
        print(f"{where}{reached}, {sent}, {duration(record.seconds)}", flush=True)

    def on_warning(self, sentence: str) -> None:
        print(f"warning: {one_line(sentence)}", file=sys.stderr, flush=True)

    def over(self, progress: AlternativeProgress) -> None:
        end = f"failed: {one_line(progress.why)}" if progress.state == FAILED else "done"
        print(f"{progress.name}: {end} ({self.ended} of {len(self.all)})", flush=True)
