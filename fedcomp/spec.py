"""Spec strings. A spec string names a codec, memory, strategy, partition, attack or other plugin, and sets its options.

    spec    = product [ "@" scope ]
    product = part { "+" part }
    part    = name [ ":" option { "," option } ]
    option  = key "=" value | value          a value without a key belongs to the first option
    scope   = "model" | "layer" | "chunk=" number     which coordinates a codec encodes together

For example, `stc`, `stc:density=1/400`, `topk:density=1%,values=fp16@layer`, `dirichlet:0.1`, `topk:density=1%+qsgd:levels=4`.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

from .errors import SpecError, nearest

SIZES = {"": 1, "B": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9}
SIZES |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
BOOLEANS = {
    "true": True,
    "yes": True,
    "1": True,
    "false": False,
    "no": False,
    "0": False,
}  # accepted spellings
COUNTS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}
RENAMED = {"liars": "f"}  # name of an option in version 0.1 of fedcomp → new name
# An upper limit of this size or more is not mentioned in error messages about values that are too small.
UNBOUNDED = 1e30
TIMES = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
# Errors that the parse_* functions raise for malformed text.
MALFORMED = (ValueError, KeyError, ZeroDivisionError, OverflowError)
T = TypeVar("T")


@dataclass(frozen=True)
class SpecPart:
    """A part of a spec string, such as `topk:density=1%`."""

    name: str
    options: tuple[tuple[str, str], ...] = ()  # (key, value); a value without a key has the key ""


@dataclass(frozen=True)
class Spec:
    """A parsed spec string such as `topk:density=1%+qsgd@layer`."""

    parts: tuple[SpecPart, ...]
    scope: str = ""


@contextmanager
def error_context(text: str = "", flag: str = "") -> Iterator[None]:
    """Add the spec string `text` and the command-line flag `flag` to a SpecError that is raised in the `with` block."""
    try:
        yield
    except SpecError as error:
        error.spec, error.flag = error.spec or text, error.flag or flag
        raise


def parse(text: str) -> Spec:
    """Split a spec string into names, unconverted options and scope. Raises SpecError for an empty name or option."""
    body, at, scope = text.strip().partition("@")
    if at and not scope:
        raise SpecError(
            f"'{text}' ends in '@' without a scope; write @model, @layer or @chunk=4096"
        )
    return Spec(tuple(_part(text, piece) for piece in body.split("+")), scope)


def parse_part(text: str, kind: str) -> SpecPart:
    """Parse a spec string with one part and no scope. Raises SpecError for any other string.

    `kind` is what the spec string specifies, such as "optimizer", for error messages.
    """
    parsed = parse(text)
    if parsed.scope or len(parsed.parts) > 1:
        article = "an" if kind[0] in "aeiou" else "a"
        raise SpecError(
            f"{article} {kind} has no scope (@…) and no second part (+…); leave out '@' and '+', and name one {kind}"
        )
    return parsed.parts[0]


def _part(text: str, piece: str) -> SpecPart:
    name, colon, tail = piece.strip().partition(":")
    if not name or (colon and not tail):
        raise SpecError(f"'{text}' is incomplete; write name or name:option=value")
    options = []
    for item in tail.split(",") if tail else ():
        key, equals, value = item.rpartition("=")
        if not value or (equals and not key.strip()):
            raise SpecError(f"'{item}' in '{text}' is incomplete; write option=value")
        options.append((key.strip(), value.strip()))
    return SpecPart(name.strip(), tuple(options))


def build(part: SpecPart, classes: Mapping[str, type], kind: str) -> Any:
    """Return an instance of the dataclass in `classes` that `part` names. Options are converted to the types of the dataclass fields.

    `kind` is what the dataclasses describe, such as "schedule", for error messages. Raises SpecError for an unknown name or option, and for
    a missing required option. The message about a missing option shows the value `example` in the metadata of the field.
    """
    return _construct(part, _lookup(part, classes, kind), kind)


def choose(part: SpecPart, classes: Mapping[str, T], kind: str) -> tuple[T, Any]:
    """Return the class that `part` names, and an instance of this class's dataclass `Options` with the options of `part`.

    Raises SpecError for an unknown name or option.
    """
    cls: Any = _lookup(part, classes, kind)
    return cls, _construct(part, cls.Options, kind)


def _lookup(part: SpecPart, classes: Mapping[str, T], kind: str) -> T:
    if part.name not in classes:
        name, equals, value = part.name.partition("=")
        if equals and name in classes:
            raise SpecError(f"options follow a colon; write {name}:{value}")
        raise SpecError(f"unknown {kind} '{part.name}'; {nearest(part.name, classes)}")
    return classes[part.name]


def _construct(part: SpecPart, cls: type, kind: str) -> Any:
    hints = typing.get_type_hints(cls)
    types_ = {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}
    values: dict[str, Any] = {}
    for key, raw in part.options:
        key = key.replace("-", "_") or next(iter(types_), "")
        key = RENAMED.get(key, key)
        if key not in types_:
            options = nearest(key, types_) if types_ else "it takes no options"
            raise SpecError(f"{kind} '{part.name}' has no option '{key or raw}'; {options}")
        if key in values:
            raise SpecError(f"the option {key} is given twice; keep one")
        values[key] = convert(raw, types_[key], key)
    for f in dataclasses.fields(cls):
        required = f.init and f.default is f.default_factory is dataclasses.MISSING
        if required and f.name not in values:
            example = f.metadata.get("example", "VALUE")
            raise SpecError(
                f"{kind} '{part.name}' needs {f.name}; write {part.name}:{f.name}={example}"
            )
    return cls(**values)


def convert(raw: str, to: Any, what: str) -> Any:
    """Convert the text `raw` to the type `to`: int, float (also 1% or 1/400), bool, str, Literal, or a union of one of these with None.

    Raises SpecError for other text. `what` is the name of the value in the message.
    """
    if typing.get_origin(to) in (types.UnionType, typing.Union):
        (to,) = (t for t in typing.get_args(to) if t is not type(None))
    try:
        if typing.get_origin(to) is typing.Literal:
            choices = {str(choice): choice for choice in typing.get_args(to)}
            if raw not in choices:
                raise SpecError(f"{what} cannot be '{raw}'; {nearest(raw, choices)}")
            return choices[raw]
        if to is bool:
            return BOOLEANS[raw.lower()]
        return parse_number(raw) if to is float else int(_digits(raw)) if to is int else to(raw)
    except MALFORMED:
        raise SpecError(f"{what} cannot be '{raw}'; give {_describe(to)}") from None


def check_ranges(options: Any, **ranges: tuple[float, float]) -> None:
    """Raise SpecError if a field of the dataclass instance `options` is outside its closed interval `(low, high)` in `ranges`.

    The value None is allowed.
    """
    for name, (low, high) in ranges.items():
        value = getattr(options, name)
        if value is not None and (problem := out_of_range(value, low, high)):
            raise SpecError(f"{name} {problem}")


def out_of_range(value: float, low: float, high: float) -> str:
    """Return the end of an error message for a value outside [low, high], or "" for a value inside."""
    if low <= value <= high:
        return ""
    at_least = high == math.inf or (value < low and high >= UNBOUNDED)
    return f"is {value:g}; give " + (f"at least {low:g}" if at_least else f"{low:g} to {high:g}")


def check_decays(options: Any, *names: str) -> None:
    """Raise SpecError if one of the options `names` of a dataclass instance, such as a momentum, is not in [0, 1)."""
    for name in names:
        if not 0 <= (value := getattr(options, name)) < 1:
            raise SpecError(f"{name} is {value:g}; give at least 0 and less than 1, such as 0.9")


def parse_number(raw: str) -> float:
    """Parse a finite number, such as 0.01, 1e-2, 1% or 1/100. Raises one of the errors in MALFORMED for other text."""
    text = _digits(raw).strip()
    if "/" in text:
        value = float(Fraction(text))
    else:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not math.isfinite(value):
        raise ValueError(raw)
    return value


def _quantity(raw: str, units: Mapping[str, float]) -> float:
    """Parse a nonnegative number with a unit."""
    text = raw.strip()
    unit = max((unit for unit in units if text.endswith(unit)), key=len)
    value = parse_number(text.removesuffix(unit)) * units[unit]
    if value < 0 or not math.isfinite(value):
        raise ValueError(raw)
    return value


def parse_bytes(raw: str) -> int:
    """Parse a number of bytes ≥ 1, such as `200kB`, `1.5MB`, `64KiB` or `4096`. Raises one of the errors in MALFORMED for other text."""
    if not (value := math.floor(_quantity(raw, SIZES))):
        raise ValueError(raw)
    return value


def parse_count(raw: str) -> int:
    """Parse a count ≥ 1, such as `1000000`, `25M`, `1.5k` or `1G`. Raises one of the errors in MALFORMED for other text."""
    value = _quantity(raw, COUNTS)
    if value < 1 or abs(value - round(value)) > 1e-6:
        raise ValueError(raw)
    return round(value)


def parse_duration(raw: str) -> float:
    """Parse a duration, such as `50ms`, `20s`, `1.5 min`, `2h`, `1d` or `0.5` (seconds), and return seconds.

    Raises one of the errors in MALFORMED for other text and for negative numbers.
    """
    return _quantity(raw, TIMES)


def parse_budget(raw: str) -> tuple[int, float]:
    """Parse a number of bytes or a duration above 0, and return (bytes, seconds): (200000, 0.0) for `200kB`, and (0, 30.0) for `30s`.

    Raises one of the errors in MALFORMED for other text.
    """
    if not raw.strip().endswith(tuple(unit for unit in TIMES if unit)):
        return parse_bytes(raw), 0.0
    if not (seconds := parse_duration(raw)):
        raise ValueError(raw)
    return 0, seconds


def parse_byte_list(raw: str) -> list[int]:
    """Parse numbers of bytes separated by commas, such as `10kB,1MB`. Raises one of the errors in MALFORMED for other text."""
    return [parse_bytes(part) for part in raw.split(",")]


def _digits(raw: str) -> str:
    """Return `raw`. Raises ValueError for underscores (1_0) and non-ASCII digits, which Python would accept in numbers."""
    if "_" in raw or not raw.isascii():
        raise ValueError(raw)
    return raw


def format_spec(name: str, options: Any) -> str:
    """Return the spec string of a dataclass instance, with all options. `parse` and `build` invert this function."""
    pairs = [(f.name, getattr(options, f.name)) for f in dataclasses.fields(options) if f.init]
    text = ",".join(f"{key}={_format_value(value)}" for key, value in pairs if value is not None)
    return f"{name}:{text}" if text else name


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, float):
        return str(value)
    if 1e-6 < value < 1 and float(f"{value:g}") != value == 1 / round(1 / value):
        return f"1/{round(1 / value)}"
    text = f"{value:g}" if float(f"{value:g}") == value else repr(value)
    # Write 1e20 for 1e+20, since a plus separates the parts of a spec string.
    return text.replace("+", "")


def _describe(to: Any) -> str:
    """Return a description of the values of a type, for error messages. A class may have an attribute `wanted` with this description."""
    usual = {int: "a whole number", float: "a number such as 0.01, 1% or 1/100"}
    usual[bool] = "true or false"
    return usual.get(to) or str(getattr(to, "wanted", "a text"))
