"""How far each alternative is, for those who watch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from types import TracebackType
from typing import Any, Self

from ...callbacks import RoundRecord
from ...formatting import NOTHING, decimal, percent
from ...watch import Totals

FIGURES = (
    "round",
    "accuracy",
    "loss",
    "train_loss",
    "cohort",
    "accepted",
    "rejected",
    "uplink_bytes",
    "downlink_bytes",
    "dense_uplink_bytes",
    "dense_downlink_bytes",
    "seconds",
)  # of a record, that are told
WAITS, RUNS, DONE, FAILED = "waits", "runs", "done", "failed"


@dataclass
class Progress:
    """One alternative. `accuracies`: those that were measured, by round."""

    name: str
    rounds: int  # when it is over
    state: str = WAITS
    round: int = 0
    totals: Totals = field(default_factory=Totals)
    seconds: float = 0.0  # that its rounds took
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    last: RoundRecord | None = None  # that was evaluated
    why: str = ""  # it failed

    @property
    def share(self) -> float:
        return 1.0 if self.state == DONE else self.round / self.rounds

    @property
    def reached(self) -> str:
        """The accuracy, or where the task has none the loss."""
        if self.last is None:
            return NOTHING
        return (
            percent(self.last.accuracy)
            if self.last.accuracy is not None
            else decimal(self.last.loss)
        )

    def add(self, record: RoundRecord) -> None:
        self.round, self.seconds = record.round, self.seconds + record.seconds
        self.totals.add(record)
        if record.accuracy is not None or record.loss is not None:
            self.last = record
        if record.accuracy is not None:
            self.accuracies.append((record.round, record.accuracy))


@dataclass
class Watch:
    """Follows alternatives. Entered before they are prepared, left when all have ended or it is interrupted."""

    clock: Callable[[], float] = monotonic
    all: list[Progress] = field(default_factory=list)
    out: str = ""  # their folder, once it is there
    facts: Sequence[tuple[str, str]] = ()  # what they have in common
    began: float = 0.0
    before: int = 0  # rounds that were done when this command began

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    @property
    def ended(self) -> int:
        return sum(progress.state in (DONE, FAILED) for progress in self.all)

    @property
    def left_s(self) -> float | None:
        """Seconds until all are over, as it goes; None where nothing can be told."""
        done = sum(p.rounds if p.state == FAILED else p.round for p in self.all)
        all = sum(p.rounds for p in self.all)
        took = done - self.before
        return (self.clock() - self.began) * (all - done) / took if took > 0 else None

    def checked(self, done: int, of: int) -> None:
        """So many of the alternatives were found to be possible."""

    def started(self, out: str, facts: Sequence[tuple[str, str]], all: list[Progress]) -> None:
        self.out, self.facts, self.all, self.began = out, facts, all, self.clock()

    def hear(self, number: int, answer: dict[str, Any]) -> None:
        """What is said of an alternative."""
        progress = self.all[number]
        if "begun" in answer:
            progress.state = RUNS
        elif "started" in answer:
            for values in answer["earlier"]:
                progress.add(_record(values))
            self.before += progress.round
        elif "round" in answer:
            record = _record(answer["round"])
            progress.add(record)
            self.round_done(progress, record)
        elif "warning" in answer:
            self.warning(f"{progress.name}: {answer['warning']}")
        elif "failed" in answer["end"]:
            progress.state, progress.why = FAILED, answer["end"]["failed"]
            self.over(progress)
        else:
            progress.state = DONE
            self.over(progress)

    def round_done(self, progress: Progress, record: RoundRecord) -> None: ...

    def warning(self, sentence: str) -> None: ...

    def over(self, progress: Progress) -> None: ...


def _record(values: dict[str, Any]) -> RoundRecord:
    return RoundRecord(**values)
