"""What a reproduction is made of: claims of a paper, the runs that test them, and what the runs showed. Imports nothing heavy."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcomp.runs import Run

IN_WORDS = "in words"  # of a claim without a number that is known here
CAVEAT = "Verdicts can differ between processors, because they round sums differently, which can decide a close result."
Options = Mapping[str, Any]  # of a run, by the names of RunConfig's fields
Choices = Sequence[Options]  # of which a method takes its best


@dataclass(frozen=True)
class Method:
    """What is compared. Of several `choices` the one with the best accuracy at the first seed is run with the other seeds."""

    options: Options
    choices: Choices = ({},)


@dataclass(frozen=True)
class Form:
    """The runs of a reproduction, small or full."""

    common: Options  # of all its runs
    methods: Mapping[str, Method]  # by names that make folders: lower case, digits and hyphens
    seeds: int = 3


@dataclass(frozen=True)
class Measured:
    """The runs of a method at the choice that was taken, a seed each."""

    runs: Sequence["Run"]
    choice: Options
    tried: Mapping[str, float] = field(
        default_factory=dict
    )  # accuracy at the first seed, by choice

    @property
    def accuracies(self) -> list[float]:
        """Of the last round, shares, 0..1."""
        return [run.accuracy for run in self.runs]

    @property
    def accuracy(self) -> float:
        return statistics.mean(self.accuracies)

    @property
    def spread(self) -> float:
        """Standard deviation over seeds; 0 for one."""
        return statistics.stdev(self.accuracies) if len(self.runs) > 1 else 0.0

    def bytes(self, way: str) -> float:
        """Of `uplink`, `downlink`, `dense_uplink` or `dense_downlink`: what a run counted, mean over seeds."""
        return statistics.mean(
            sum(getattr(record, f"{way}_bytes") for record in run.records) for run in self.runs
        )

    def __str__(self) -> str:
        spread = f" (sd {100 * self.spread:.1f})" if len(self.runs) > 1 else ""
        return f"{100 * self.accuracy:.1f} %{spread}"


Results = Mapping[str, Measured]  # by method


@dataclass(frozen=True)
class Judgement:
    """What was found about a claim."""

    ours: str
    holds: bool


@dataclass(frozen=True)
class Claim:
    """One thing that a paper says. `judge` looks at nothing but the results, or computes what needs no runs."""

    text: str
    source: str  # paper, and the table, figure or algorithm where it is known
    paper: str  # its number, or IN_WORDS
    judge: Callable[[Results], Judgement]


@dataclass(frozen=True)
class Reproduction:
    """A paper's claims and how they are tested here."""

    name: str
    title: str  # what is compared with what
    paper: str  # authors, title, where and when
    setting: str  # how the small form differs from the paper's setting, and what is held equal
    full_setting: str  # the same of the full form
    small: Form
    full: Form
    claims: Sequence[Claim]
    minutes: float  # of one core, that the small form takes
    needs: str = ""  # data besides what is bundled: a folder below --data

    def form(self, full: bool) -> Form:
        return self.full if full else self.small


def lrs(*rates: float) -> tuple[Options, ...]:
    """Choices of the learning rate."""
    return tuple({"lr": rate} for rate in rates)


def points(share: float) -> str:
    """A difference of accuracies, in points, with its sign."""
    return f"{100 * share:+.1f}"


def differences(a: Measured, b: Measured) -> list[float]:
    """a − b, seed by seed."""
    return [mine - other for mine, other in zip(a.accuracies, b.accuracies, strict=True)]


def ahead(a: Measured, b: Measured) -> bool:
    """Whether a is the more accurate at every seed."""
    return min(differences(a, b)) > 0


def within(a: Measured, b: Measured, margin: float) -> bool:
    """Whether a, in the mean over seeds, loses at most `margin` (a share) against b."""
    return statistics.mean(differences(a, b)) >= -margin
