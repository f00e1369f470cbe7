"""The parts of a reproduction: claims of a paper, and runs that test the claims. This module imports only the standard library."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcomp.runs import Run

IN_WORDS = "–"  # stands in place of the paper's number if a claim has no number
CAVEAT = (
    "Different processors round sums differently. If a claim holds or fails by a small margin, the "
    "verdict may be different on another machine."
)
Options = Mapping[str, Any]  # maps fields of RunConfig to the options of a run
# Alternative options of a method, such as learning rates; the best alternative is used.
Choices = Sequence[Options]


@dataclass(frozen=True)
class Method:
    """A method of a comparison, with fixed options and alternative choices, such as learning rates.

    The choice with the best accuracy at the first seed is also run with the other seeds.
    """

    options: Options
    choices: Choices = ({},)


@dataclass(frozen=True)
class Experiment:
    """The runs of a reproduction, in the small or the full setting."""

    common: Options  # options of all runs
    methods: Mapping[
        str, Method
    ]  # names have lower-case letters, digits and hyphens, since they are parts of folder names
    seeds: int = 3


@dataclass(frozen=True)
class MethodResult:
    """The runs of a method with its best choice, one for each seed."""

    runs: Sequence["Run"]
    choice: Options
    # maps each choice to its accuracy at the first seed
    tried: Mapping[str, float] = field(default_factory=dict)

    @property
    def accuracies(self) -> list[float]:
        """The accuracy after the last round of each run, from 0 to 1."""
        return [run.accuracy for run in self.runs]

    @property
    def accuracy(self) -> float:
        return statistics.mean(self.accuracies)

    @property
    def spread(self) -> float:
        """The standard deviation of the accuracy over seeds; 0 for one seed."""
        return statistics.stdev(self.accuracies) if len(self.runs) > 1 else 0.0

    def bytes(self, link: str) -> float:
        """Return the bytes of a run, averaged over seeds. `link` is `uplink`, `downlink`, `dense_uplink` or `dense_downlink`."""
        return statistics.mean(
            sum(getattr(record, f"{link}_bytes") for record in run.records) for run in self.runs
        )

    def __str__(self) -> str:
        spread = f" (sd {100 * self.spread:.1f})" if len(self.runs) > 1 else ""
        return f"{100 * self.accuracy:.1f} %{spread}"


Results = Mapping[str, MethodResult]  # maps the name of a method to its result


@dataclass(frozen=True)
class Verdict:
    """The result of testing a claim."""

    ours: str  # the values that our runs measured
    holds: bool


@dataclass(frozen=True)
class Claim:
    """A claim of a paper. The function `judge` compares the claim with the results of runs, or with values that need no runs."""

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
    setting: str  # description of the small runs, and how they differ from the paper
    full_setting: str  # description of the full runs, and how they differ from the paper
    small: Experiment
    full: Experiment
    claims: Sequence[Claim]
    minutes: float  # processor time of the small runs
    needs: str = ""  # folder of the data below --data; "" = the data come with fedcomp

    def experiment(self, full: bool) -> Experiment:
        return self.full if full else self.small


def lrs(*rates: float) -> tuple[Options, ...]:
    return tuple({"lr": rate} for rate in rates)


def points(difference: float) -> str:
    """Return a difference of accuracies (fractions) as text in percentage points, with its sign."""
    return f"{100 * difference:+.1f}"


def differences(a: MethodResult, b: MethodResult) -> list[float]:
    """Return the accuracy of method `a` minus that of method `b`, for each seed."""
    return [x - y for x, y in zip(a.accuracies, b.accuracies, strict=True)]


def more_accurate(a: MethodResult, b: MethodResult) -> bool:
    """Return whether method `a` is more accurate than method `b` at every seed."""
    return min(differences(a, b)) > 0


def within_margin(a: MethodResult, b: MethodResult, margin: float) -> bool:
    """Return whether the mean accuracy of method `a` is at most `margin` (a fraction) below that of method `b`."""
    return statistics.mean(differences(a, b)) >= -margin
