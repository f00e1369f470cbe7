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

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from . import spec
from .errors import ConfigError, SpecError

MOST = 1_000_000  # steps, or examples in a batch: as many as the options allow
LAST = 2**63 - 1  # round
LARGEST = 3e38  # rate, norm or other factor: as much as a float32 holds


class Curve(ABC):
    """How a value goes on from `own` in round 1 of `rounds`."""

    name: ClassVar[str]
    ends: ClassVar[bool] = True  # with the horizon
    mend: ClassVar[str] = "another 'to'"  # where it comes to what a value cannot be

    @abstractmethod
    def at(self, own: float, round: int, rounds: int) -> float: ...


@dataclass(frozen=True)
class Poly(Curve):
    name: ClassVar[str] = "poly"

    to: float = 0.0
    power: float = 2.0

    def __post_init__(self) -> None:
        _at_least(self, "to", 0.0)
        _at_least(self, "power", 0.0)

    def at(self, own: float, round: int, rounds: int) -> float:
        return self.to + (own - self.to) * (1.0 - _passed(round, rounds)) ** self.power


@dataclass(frozen=True)
class Linear(Curve):
    name: ClassVar[str] = "linear"

    to: float = 0.0

    def __post_init__(self) -> None:
        _at_least(self, "to", 0.0)

    def at(self, own: float, round: int, rounds: int) -> float:
        return self.to + (own - self.to) * (1.0 - _passed(round, rounds))


@dataclass(frozen=True)
class Cosine(Curve):
    name: ClassVar[str] = "cosine"

    to: float = 0.0

    def __post_init__(self) -> None:
        _at_least(self, "to", 0.0)

    def at(self, own: float, round: int, rounds: int) -> float:
        return self.to + (own - self.to) * (1.0 + math.cos(math.pi * _passed(round, rounds))) / 2


@dataclass(frozen=True)
class Geometric(Curve):
    name: ClassVar[str] = "geometric"

    to: float

    def __post_init__(self) -> None:
        if self.to <= 0:
            raise SpecError(f"to is {self.to:g}; give more than 0")

    def at(self, own: float, round: int, rounds: int) -> float:
        return own * (self.to / own) ** _passed(round, rounds)


@dataclass(frozen=True)
class Step(Curve):
    name: ClassVar[str] = "step"
    ends: ClassVar[bool] = False
    mend: ClassVar[str] = "another 'factor' or a larger 'every'"

    every: int  # rounds
    factor: float = 0.1

    def __post_init__(self) -> None:
        _at_least(self, "every", 1)
        if self.factor <= 0:
            raise SpecError(f"factor is {self.factor:g}; give more than 0")

    def at(self, own: float, round: int, rounds: int) -> float:
        try:
            return own * self.factor ** ((round - 1) // self.every)
        except OverflowError:
            return math.inf


CURVES: dict[str, type[Curve]] = {cls.name: cls for cls in (Cosine, Geometric, Linear, Poly, Step)}


@dataclass(frozen=True)
class Pieces:
    """Values from rounds on, in their order."""

    values: tuple[float, ...]
    rounds: tuple[int, ...]

    def at(self, own: float, round: int) -> float:
        begun = [
            value for value, first in zip(self.values, self.rounds, strict=True) if first <= round
        ]
        return begun[-1] if begun else own


@dataclass(frozen=True)
class Kind:
    """What a schedule's values are: numbers above 0, or whole ones from 1 on."""

    whole: bool = False
    high: float = math.inf

    def read(self, text: str) -> Curve | Pieces:
        """Raises SpecError."""
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
        if not 1 <= round <= LAST:
            raise SpecError(f"the round in '{item}' is {round}; give at least 1")
        if fault := self.fault(value):
            raise SpecError(f"the value in '{item}' is {value:g}; give {fault}")
        return value, round

    def fault(self, value: float) -> str:
        """What to give in place of a value; "" for one that can be."""
        if value < 1 and self.whole:
            return "at least 1"
        if not value > 0:
            return "more than 0"
        return f"at most {self.high:g}" if value > self.high else ""


RATE, WHOLE, SHARE = Kind(high=LARGEST), Kind(whole=True, high=MOST), Kind(high=1.0)


@dataclass(frozen=True)
class OptionSchedule:
    """A value by round, from 1 on: the run's `own` where there is no schedule.

    A curve begins after `warmup` rounds and ends with round `horizon`; 0 = where it ends is not known. Raises SpecError for a text that
    is no schedule of this kind, ConfigError for a curve that needs a horizon and has none. `flag` names it in errors.
    """

    flag: str
    text: str | None
    kind: Kind
    own: float
    warmup: int = 0
    horizon: int = 0

    def __post_init__(self) -> None:
        with spec.reading(self.text or "", self.flag):
            form = self.kind.read(self.text) if self.text else Pieces((), ())
        if isinstance(form, Curve) and form.ends and not self.horizon:
            raise ConfigError(
                f"{self.flag} '{self.text}' ends with the last round, which is not known; give --horizon"
            )
        object.__setattr__(self, "form", form)

    def at(self, round: int) -> float:
        """The value in a round; an int where values are whole."""
        if isinstance(self.form, Pieces):
            return self.form.at(self.own, round)
        value = self.form.at(
            self.own, max(1, round - self.warmup), max(1, self.horizon - self.warmup)
        )
        return math.floor(value + 0.5) if self.kind.whole and math.isfinite(value) else value

    def values(self, rounds: int) -> set[float]:
        """Those of the first and the last of so many rounds, and where pieces begin between them."""
        begun = self.form.rounds if isinstance(self.form, Pieces) else ()
        return {
            self.at(round)
            for round in (self.warmup + 1, *begun, rounds)
            if round <= max(rounds, self.warmup + 1)
        }

    def check(self, rounds: int) -> None:
        """Raise ConfigError where a curve leaves in one of so many rounds what a value can be. Curves rise, or fall, all the way."""
        value = self.at(rounds)
        if isinstance(self.form, Curve) and (fault := self.kind.fault(value)):
            longer = f"--horizon {rounds}, or " if self.form.ends and rounds > self.horizon else ""
            raise ConfigError(
                f"{self.flag} '{self.text}' comes to {value:g} in round {rounds}; give {fault}, by {longer}{self.form.mend}"
            )


LOCAL = {
    "lr": RATE,
    "local_steps": WHOLE,
    "batch_size": WHOLE,
}  # what clients do, by the names of the options


def of_options(options: Any, horizon: int) -> dict[str, OptionSchedule]:
    """The schedules of LOCAL. `options` has the fields of `fedcomp.config.RunConfig` that they are made of."""
    return {
        name: OptionSchedule(
            f"--{name.replace('_', '-')}-schedule",
            getattr(options, f"{name}_schedule"),
            kind,
            getattr(options, name),
            options.lr_warmup if name == "lr" else 0,
            horizon,
        )
        for name, kind in LOCAL.items()
    }


def ends(text: str | None) -> bool:
    """Whether a schedule is a curve that ends with the horizon."""
    return bool(text) and text[:1].isalpha() and CURVES[spec.parse(text).parts[0].name].ends


def _passed(round: int, rounds: int) -> float:
    return min(1.0, (round - 1) / rounds)


def _at_least(curve: Curve, name: str, low: float) -> None:
    if (value := getattr(curve, name)) < low:
        raise SpecError(f"{name} is {value:g}; give at least {low:g}")
