"""The parts of a reproduction: claims of a paper, the runs that test them, and their results. Imports only the standard library."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcomp.runs import Run

IN_WORDS = "in words"  # in place of the number, for a claim without a number
CAVEAT = "Processors round sums differently, so a close verdict can differ between machines."
Options = Mapping[str, Any]  # options of a run, by field of RunConfig
Choices = Sequence[Options]  # alternative options of a method; the best alternative is used


@dataclass(frozen=True)
class Method:
    """A method of a comparison. The choice with the best accuracy at the first seed is also run with the other seeds."""

    options: Options
    choices: Choices = ({},)


@dataclass(frozen=True)
class Experiment:
    """The runs of a reproduction, at the small or the full scale."""

    common: Options  # options of all runs
    methods: Mapping[
        str, Method
    ]  # by name: lower case, digits and hyphens, since names are parts of folder names
    seeds: int = 3


@dataclass(frozen=True)
class MethodResult:
    """The runs of a method with its best choice, one for each seed."""

    runs: Sequence["Run"]
    choice: Options
    # Accuracy at the first seed, by choice.
    tried: Mapping[str, float] = field(default_factory=dict)

    @property
    def accuracies(self) -> list[float]:
        """The accuracies of the last round, 0..1."""
        return [run.accuracy for run in self.runs]

    @property
    def accuracy(self) -> float:
        return statistics.mean(self.accuracies)

    @property
    def spread(self) -> float:
        """The standard deviation of the accuracy over seeds; 0 for one seed."""
        return statistics.stdev(self.accuracies) if len(self.runs) > 1 else 0.0

    def bytes(self, link: str) -> float:
        """Return the bytes of a run, the mean over seeds. `link`: `uplink`, `downlink`, `dense_uplink` or `dense_downlink`."""
        return statistics.mean(
            sum(getattr(record, f"{link}_bytes") for record in run.records) for run in self.runs
        )

    def __str__(self) -> str:
        spread = f" (sd {100 * self.spread:.1f})" if len(self.runs) > 1 else ""
        return f"{100 * self.accuracy:.1f} %{spread}"


Results = Mapping[str, MethodResult]  # by method


@dataclass(frozen=True)
class Verdict:
    """The result of a claim."""

    ours: str  # the measured values
    holds: bool


@dataclass(frozen=True)
class Claim:
    """A claim of a paper. `judge` compares the claim with the results of runs, or with values that need no runs."""

    text: str
    source: str  # table, figure or section of the paper
    paper: str  # the number in the paper, or IN_WORDS
    judge: Callable[[Results], Verdict]


@dataclass(frozen=True)
class Reproduction:
    """The claims of a paper, and the runs that test them."""

    name: str
    title: str
    paper: str  # authors, title, venue and year
    setting: str  # options of the small runs, and differences from the paper
    full_setting: str  # options of the full runs, and differences from the paper
    small: Experiment
    full: Experiment
    claims: Sequence[Claim]
    minutes: float  # minutes of one core, for the small runs
    needs: str = ""  # folder of the data below --data; "" = data that comes with fedcomp

    def experiment(self, full: bool) -> Experiment:
        """Return the full or the small runs."""
        return self.full if full else self.small


def lrs(*rates: float) -> tuple[Options, ...]:
    """Return one choice of options for each learning rate."""
    return tuple({"lr": rate} for rate in rates)


def points(difference: float) -> str:
    """Return a difference of accuracies (0..1) as text in percentage points, with its sign."""
    return f"{100 * difference:+.1f}"


def differences(a: MethodResult, b: MethodResult) -> list[float]:
    """Return the accuracy of a minus that of b, for each seed."""
    return [x - y for x, y in zip(a.accuracies, b.accuracies, strict=True)]


def more_accurate(a: MethodResult, b: MethodResult) -> bool:
    """Return whether a is more accurate than b at every seed."""
    return min(differences(a, b)) > 0


def within_margin(a: MethodResult, b: MethodResult, margin: float) -> bool:
    """Return whether the mean accuracy of a is at most `margin` (0..1) below that of b."""
    return statistics.mean(differences(a, b)) >= -margin
