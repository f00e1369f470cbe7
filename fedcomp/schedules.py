"""A value that changes by round: one grammar for the learning rate, local steps, batch size and density.

    schedule = piece { "," piece } | curve [ ":" option { "," option } ]
    piece    = value [ "@" round ]          this value from that round on; the first piece may leave the round out, which is then 1

`1,8@21` is 1 in rounds 1 to 20 and 8 from round 21 on; `8@21` is the run's own value until then. A curve starts from the own value v,
in the first round after a warm-up, if there is one. With p = (r − 1)/R for the r-th of the R rounds until the horizon, and 1 after it:

    cosine      e + (v − e)(1 + cos πp)/2       Loshchilov, Hutter: SGDR. ICLR 2017, without restarts
    linear      e + (v − e)(1 − p)
    poly        e + (v − e)(1 − p)^power
    geometric   v (e/v)^p
    step        v · factor^⌊(r − 1)/every⌋      which knows no horizon

e, the option `to`, is in the unit of the value, and holds from the round after the horizon on. Whole numbers are rounded, halves up.
"""

import bisect
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from . import spec
from .errors import ConfigError, SpecError

MAX_COUNT = 1_000_000  # steps, or examples in a batch
MAX_ROUND = 2**63 - 1  # round
MAX_FLOAT = 3e38  # rate, norm or other factor that a float32 holds


class Curve(ABC):
    """The course of a value from `own` in round 1."""

    name: ClassVar[str]
    ends: ClassVar[bool] = True  # with the horizon
    fix: ClassVar[str] = "another 'to'"  # for a curve that leaves the allowed values

    @abstractmethod
    def at(self, own: float, round: int, rounds: int) -> float:
        """Return the value in a round, with the horizon `rounds`."""


@dataclass(frozen=True)
class Linear(Curve):
    name: ClassVar[str] = "linear"

    to: float = 0.0

    def __post_init__(self) -> None:
        _check_range(self, "to", low=0.0)

    def at(self, own: float, round: int, rounds: int) -> float:
        return self.to + (own - self.to) * self.remaining(_passed(round, rounds))

    def remaining(self, passed: float) -> float:
        """Return the share of the way to `to` that is left after a share of the rounds."""
        return 1.0 - passed


@dataclass(frozen=True)
class Poly(Linear):
    name: ClassVar[str] = "poly"

    power: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self, "power", low=0.0)

    def remaining(self, passed: float) -> float:
        return (1.0 - passed) ** self.power


@dataclass(frozen=True)
class Cosine(Linear):
    name: ClassVar[str] = "cosine"

    def remaining(self, passed: float) -> float:
        return (1.0 + math.cos(math.pi * passed)) / 2


@dataclass(frozen=True)
class Geometric(Curve):
    name: ClassVar[str] = "geometric"

    to: float

    def __post_init__(self) -> None:
        _check_range(self, "to", above=0.0)

    def at(self, own: float, round: int, rounds: int) -> float:
        return own * (self.to / own) ** _passed(round, rounds)


@dataclass(frozen=True)
class Step(Curve):
    name: ClassVar[str] = "step"
    ends: ClassVar[bool] = False
    fix: ClassVar[str] = "another 'factor' or a larger 'every'"

    every: int  # rounds
    factor: float = 0.1

    def __post_init__(self) -> None:
        _check_range(self, "every", low=1)
        _check_range(self, "factor", above=0.0)

    def at(self, own: float, round: int, rounds: int) -> float:
        try:
            return own * self.factor ** ((round - 1) // self.every)
        except OverflowError:
            return math.inf


CURVES: dict[str, type[Curve]] = {cls.name: cls for cls in (Cosine, Geometric, Linear, Poly, Step)}


@dataclass(frozen=True)
class Pieces:
    """Values with their first rounds, in order."""

    values: tuple[float, ...]
    rounds: tuple[int, ...]

    def at(self, own: float, round: int) -> float:
        started = bisect.bisect_right(self.rounds, round)
        return self.values[started - 1] if started else own


@dataclass(frozen=True)
class ValueRange:
    """The allowed values of a schedule: numbers above 0, or whole numbers from 1 on."""

    whole: bool = False
    high: float = math.inf

    def read(self, text: str) -> Curve | Pieces:
        """Parse a schedule. Raises SpecError."""
        if text[:1].isalpha():
            parsed = spec.parse(text)
            if parsed.scope or len(parsed.parts) > 1:
                raise SpecError(
                    "a schedule is one curve, such as cosine, or values with their rounds; write 1,8@21 for 8 from round 21"
                )
            return spec.build(parsed.parts[0], CURVES, "schedule")
        pieces = [self._piece(text, item, first=i == 0) for i, item in enumerate(text.split(","))]
        values, rounds = zip(*pieces, strict=True)
        for before, after in zip(rounds, rounds[1:], strict=False):
            if after <= before:
                raise SpecError(
                    f"round {after} comes after round {before} in '{text}'; give them in their order"
                )
        return Pieces(values, rounds)

    def _piece(self, text: str, item: str, first: bool) -> tuple[float, int]:
        raw, at, when = item.partition("@")
        if not at and not first:
            raise SpecError(
                f"'{item}' in '{text}' does not say from which round on; write {item or 'VALUE'}@ROUND"
            )
        value = spec.convert(raw.strip(), int if self.whole else float, f"the value in '{item}'")
        round = spec.convert(when.strip(), int, f"the round in '{item}'") if at else 1
        if not 1 <= round <= MAX_ROUND:
            raise SpecError(f"the round in '{item}' is {round}; give at least 1")
        if correction := self.correction(value):
            raise SpecError(f"the value in '{item}' is {value:g}; give {correction}")
        return value, round

    def correction(self, value: float) -> str:
        """Return what to give instead of a value that is not allowed, "" for one that is."""
        if value < 1 and self.whole:
            return "at least 1"
        if not value > 0:
            return "more than 0"
        return f"at most {self.high:g}" if value > self.high else ""


RATE, WHOLE, FRACTION = (
    ValueRange(high=MAX_FLOAT),
    ValueRange(whole=True, high=MAX_COUNT),
    ValueRange(high=1.0),
)


@dataclass(frozen=True)
class OptionSchedule:
    """The value of an option by round, from 1 on: the run's `own` without a schedule.

    A curve begins after `warmup` rounds and ends with round `horizon`; 0 = not known. Raises SpecError for a text that is not a schedule of
    this kind, and ConfigError for a curve that needs a horizon and has none. Errors begin with `flag`.
    """

    flag: str
    text: str | None
    kind: ValueRange
    own: float
    warmup: int = 0
    horizon: int = 0
    form: Curve | Pieces = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        with spec.error_context(self.text or "", self.flag):
            form: Curve | Pieces = self.kind.read(self.text) if self.text else Pieces((), ())
        if isinstance(form, Curve) and form.ends and not self.horizon:
            raise ConfigError(
                f"{self.flag} '{self.text}' ends with the last round, which is not known; give --horizon"
            )
        object.__setattr__(self, "form", form)

    def at(self, round: int) -> float:
        """Return the value in a round, an int for a kind of whole numbers."""
        if isinstance(self.form, Pieces):
            return self.form.at(self.own, round)
        value = self.form.at(
            self.own, max(1, round - self.warmup), max(1, self.horizon - self.warmup)
        )
        return math.floor(value + 0.5) if self.kind.whole and math.isfinite(value) else value

    def values(self, rounds: int) -> set[float]:
        """Return the values in the first and the last of `rounds` rounds, and those of pieces that begin between them."""
        begun = self.form.rounds if isinstance(self.form, Pieces) else ()
        return {
            self.at(round)
            for round in (self.warmup + 1, *begun, rounds)
            if round <= max(rounds, self.warmup + 1)
        }

    def check(self, rounds: int) -> None:
        """Raise ConfigError if a curve leaves the allowed values within `rounds` rounds. Curves rise, or fall, all the way."""
        value = self.at(rounds)
        if isinstance(self.form, Curve) and (correction := self.kind.correction(value)):
            longer = f"--horizon {rounds}, or " if self.form.ends and rounds > self.horizon else ""
            raise ConfigError(
                f"{self.flag} '{self.text}' comes to {value:g} in round {rounds}; give {correction}, by {longer}{self.form.fix}"
            )


LOCAL = {"lr": RATE, "local_steps": WHOLE, "batch_size": WHOLE}  # options of clients


def of_options(options: Any, horizon: int) -> dict[str, OptionSchedule]:
    """Return the schedules of LOCAL from options, a `fedcomp.config.RunConfig` or an object with the same fields."""
    return {
        name: OptionSchedule(
            f"--{name.replace('_', '-')}-schedule",
            getattr(options, f"{name}_schedule"),
            kind,
            options.learning_rate if (own := getattr(options, name)) is None else own,
            options.lr_warmup if name == "lr" else 0,
            horizon,
        )
        for name, kind in LOCAL.items()
    }


def ends(text: str | None) -> bool:
    """Return whether a schedule is a curve that ends with the horizon."""
    if text is None or not text[:1].isalpha():
        return False
    return CURVES[spec.parse(text).parts[0].name].ends


def _passed(round: int, rounds: int) -> float:
    return min(1.0, (round - 1) / rounds)


def _check_range(curve: Curve, name: str, low: float = -math.inf, above: float = -math.inf) -> None:
    value = getattr(curve, name)
    if value < low:
        raise SpecError(f"{name} is {value:g}; give at least {low:g}")
    if value <= above:
        raise SpecError(f"{name} is {value:g}; give more than {above:g}")
