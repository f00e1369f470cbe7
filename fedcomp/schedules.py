"""Schedules, which change the learning rate, local steps, batch size and density over the rounds.

    schedule = piece { "," piece } | curve [ ":" option { "," option } ]
    piece    = value [ "@" round ]     # `value` from `round` on; the first piece may omit the round: 5 means 5@1

`1,8@21` is 1 in rounds 1 to 20, and 8 from round 21 on. `8@21` alone is the value of the option (such as --local-steps) in rounds 1
to 20, and 8 from round 21 on.

A curve starts in the first round after the warm-up (such as --lr-warmup) and ends in a round called the horizon. Let v be the value of the
option, and R the number of rounds from the end of the warm-up to the horizon. In the r-th round after the warm-up, the progress p is
min(1, (r − 1)/R), and the value of the curve is:

    cosine:      e + (v − e)(1 + cos πp)/2      (Loshchilov, Hutter, "SGDR", ICLR 2017, without restarts)
    linear:      e + (v − e)(1 − p)
    poly:        e + (v − e)(1 − p)^power
    geometric:   v (e/v)^p
    step:        v · factor^⌊(r − 1)/every⌋     (needs no horizon)

The end value e is the option `to` of the curve. In schedules of whole numbers, values are rounded to the nearest integer, halves up.
"""

import bisect
import itertools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from . import spec
from .errors import ConfigError, SpecError

MAX_COUNT = 1_000_000  # maximum number of local steps, and maximum number of examples in a batch
MAX_ROUND = 2**63 - 1
MAX_FLOAT = 3e38  # upper limit of values that are stored as float32


class Curve(ABC):
    """A formula for a value that changes over the rounds."""

    name: ClassVar[str]
    needs_horizon: ClassVar[bool] = True
    fix: ClassVar[str] = (
        "another 'to'"  # option to change, for error messages about values out of range
    )

    @abstractmethod
    def at(self, default: float, round: int, rounds: int) -> float:
        """Return the value in round `round`, counted from the end of the warm-up.

        `default`: value of the option, with which the curve starts. `rounds`: number of rounds from the end of the warm-up to the horizon.
        """


@dataclass(frozen=True)
class Linear(Curve):
    name: ClassVar[str] = "linear"

    to: float = 0.0

    def __post_init__(self) -> None:
        spec.check_ranges(self, to=(0, math.inf))

    def at(self, default: float, round: int, rounds: int) -> float:
        return self.to + (default - self.to) * self.remaining(_progress(round, rounds))

    def remaining(self, progress: float) -> float:
        """Return the distance to the end value `to`, as a fraction of the distance at the start."""
        return 1.0 - progress


@dataclass(frozen=True)
class Poly(Linear):
    name: ClassVar[str] = "poly"

    power: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        spec.check_ranges(self, power=(0, math.inf))

    def remaining(self, progress: float) -> float:
        return (1.0 - progress) ** self.power


@dataclass(frozen=True)
class Cosine(Linear):
    name: ClassVar[str] = "cosine"

    def remaining(self, progress: float) -> float:
        return (1.0 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class Geometric(Curve):
    name: ClassVar[str] = "geometric"

    to: float = field(metadata={"example": 0.001})

    def __post_init__(self) -> None:
        _check_positive(self, "to")

    def at(self, default: float, round: int, rounds: int) -> float:
        return default * (self.to / default) ** _progress(round, rounds)


@dataclass(frozen=True)
class Step(Curve):
    name: ClassVar[str] = "step"
    needs_horizon: ClassVar[bool] = False
    fix: ClassVar[str] = "another 'factor' or a larger 'every'"

    every: int = field(metadata={"example": 20})  # number of rounds between two steps
    factor: float = 0.1

    def __post_init__(self) -> None:
        spec.check_ranges(self, every=(1, math.inf))
        _check_positive(self, "factor")

    def at(self, default: float, round: int, rounds: int) -> float:
        try:
            return default * self.factor ** ((round - 1) // self.every)
        except OverflowError:
            return math.inf


CURVES: dict[str, type[Curve]] = {cls.name: cls for cls in (Cosine, Geometric, Linear, Poly, Step)}


@dataclass(frozen=True)
class PiecewiseConstant:
    """A schedule of constant values: values[i] from round rounds[i] on."""

    values: tuple[float, ...]
    rounds: tuple[int, ...]  # ascending

    def at(self, default: float, round: int) -> float:
        started = bisect.bisect_right(self.rounds, round)
        return self.values[started - 1] if started else default


@dataclass(frozen=True)
class ValueRange:
    """The values that a schedule allows: numbers above 0 and up to `high`, or whole numbers from 1 to `high` if `whole` is True."""

    whole: bool = False
    high: float = math.inf

    def read(self, text: str) -> Curve | PiecewiseConstant:
        """Parse a schedule, such as `1,8@21` or `cosine`. Raises SpecError for a malformed schedule and for values that are not allowed."""
        if text[:1].isalpha():
            parsed = spec.parse(text)
            if parsed.scope or len(parsed.parts) > 1:
                raise SpecError(
                    "a schedule is a single curve, such as cosine, or values with rounds, such as 1,8@21 (8 from round 21 on); give one of "
                    "them"
                )
            return spec.build(parsed.parts[0], CURVES, "schedule")
        pieces = [self._piece(text, item, first=i == 0) for i, item in enumerate(text.split(","))]
        values, rounds = zip(*pieces, strict=True)
        for before, after in itertools.pairwise(rounds):
            if after <= before:
                found = f"round {after} follows round {before} in '{text}'"
                raise SpecError(f"{found}; give rounds in ascending order")
        return PiecewiseConstant(values, rounds)

    def _piece(self, text: str, item: str, first: bool) -> tuple[float, int]:
        raw, at, when = item.partition("@")
        if not at and not first:
            example = f"{item or 'VALUE'}@ROUND"
            raise SpecError(
                f"'{item}' in '{text}' does not say from which round on it applies; write {example}"
            )
        value = spec.convert(raw.strip(), int if self.whole else float, f"the value in '{item}'")
        round = spec.convert(when.strip(), int, f"the round in '{item}'") if at else 1
        if not 1 <= round <= MAX_ROUND:
            raise SpecError(f"the round in '{item}' is {round}; give at least 1")
        if correction := self.correction(value):
            shown = min(value, 1e300)  # larger integers may overflow a float
            raise SpecError(f"the value in '{item}' is {shown:g}; give {correction}")
        return value, round

    def correction(self, value: float) -> str:
        """Return a description of the allowed values, such as "at least 1", if `value` is not allowed, else ""."""
        if value < 1 and self.whole:
            return "at least 1"
        if not value > 0:
            return "more than 0"
        return f"at most {self.high:g}" if value > self.high else ""


RATE = ValueRange(high=MAX_FLOAT)
COUNT = ValueRange(whole=True, high=MAX_COUNT)
FRACTION = ValueRange(high=1.0)


@dataclass(frozen=True)
class OptionSchedule:
    """The value of an option in each round. `flag`: flag of the schedule. `text`: the schedule, or None if the value is always `default`.

    A curve starts after `warmup` rounds and ends in round `horizon`, which is 0 if unknown. Raises SpecError if `text` is not a schedule of
    values in the range `kind`, and ConfigError if the curve needs a horizon but `horizon` is 0.
    """

    flag: str
    text: str | None
    kind: ValueRange
    default: float
    warmup: int = 0
    horizon: int = 0
    curve: Curve | PiecewiseConstant = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        curve: Curve | PiecewiseConstant = PiecewiseConstant((), ())
        if self.text:
            with spec.error_context(self.text, self.flag):
                curve = self.kind.read(self.text)
        if isinstance(curve, Curve) and curve.needs_horizon and not self.horizon:
            raise ConfigError(
                f"{self.flag} '{self.text}' ends at the last round, which is unknown; give --horizon"
            )
        object.__setattr__(self, "curve", curve)

    def at(self, round: int) -> float:
        """Return the value of the option in a round, as an int if the values are whole numbers."""
        if isinstance(self.curve, PiecewiseConstant):
            return self.curve.at(self.default, round)
        rounds = max(1, self.horizon - self.warmup)
        value = self.curve.at(self.default, max(1, round - self.warmup), rounds)
        return math.floor(value + 0.5) if self.kind.whole and math.isfinite(value) else value

    def values(self, rounds: int) -> set[float]:
        """Return a set with the smallest and the largest value (and perhaps other values) from the end of the warm-up to round `rounds`."""
        starts = self.curve.rounds if isinstance(self.curve, PiecewiseConstant) else ()
        first = self.warmup + 1
        return {self.at(r) for r in (first, *starts, rounds) if r <= max(rounds, first)}

    def check(self, rounds: int) -> None:
        """Raise ConfigError if a value of the curve in rounds 1 to `rounds` is not allowed."""
        value = self.at(rounds)  # the extreme value, because curves are monotonic
        if isinstance(self.curve, Curve) and (correction := self.kind.correction(value)):
            is_short = self.curve.needs_horizon and rounds > self.horizon
            longer = f"--horizon {rounds}, or " if is_short else ""
            raise ConfigError(
                f"{self.flag} '{self.text}' reaches {value:g} in round {rounds}, but values must be {correction}; "
                f"give {longer}{self.curve.fix}"
            )


# Options of clients that may have a schedule.
CLIENT_OPTIONS = {"lr": RATE, "local_steps": COUNT, "batch_size": COUNT}


def of_options(options: Any, horizon: int) -> dict[str, OptionSchedule]:
    """Return the schedules of the CLIENT_OPTIONS by name. `options`: a RunConfig, or an object with the same fields."""
    return {
        name: OptionSchedule(
            f"--{name.replace('_', '-')}-schedule",
            getattr(options, f"{name}_schedule"),
            kind,
            options.learning_rate if (value := getattr(options, name)) is None else value,
            options.lr_warmup if name == "lr" else 0,
            horizon,
        )
        for name, kind in CLIENT_OPTIONS.items()
    }


def needs_horizon(text: str | None) -> bool:
    """Return whether a schedule is a curve that needs the horizon."""
    if text is None or not text[:1].isalpha():
        return False
    return CURVES[spec.parse(text).parts[0].name].needs_horizon


def _progress(round: int, rounds: int) -> float:
    return min(1.0, (round - 1) / rounds)


def _check_positive(curve: Curve, name: str) -> None:
    if (value := getattr(curve, name)) <= 0:
        raise SpecError(f"{name} is {value:g}; give more than 0")
