"""The alternatives that options given several times span, each with a name that can be read and be a folder's."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...config import RunConfig, flag
from ...errors import ConfigError, FedcompError

BARE = {"uplink", "strategy", "memory", "partition", "attack"}  # whose values say what they are
MOST = 1000  # alternatives of one command
LONGEST = 80  # characters of a name


@dataclass(frozen=True)
class Alternative:
    """One choice of the options that span. `values`: the options that are not left to their defaults."""

    name: str
    values: Mapping[str, Any]

    @property
    def config(self) -> RunConfig:
        return RunConfig(**self.values)


def is_span(values: Mapping[str, Any]) -> bool:
    """Whether an option has several values."""
    return any(isinstance(value, list) for value in values.values())


def alternatives(values: Mapping[str, Any]) -> list[Alternative]:
    """The product of all lists among `values`, the last option's values changing first, seeds last of all. Raises ConfigError."""
    spanning = sorted(
        (name for name, value in values.items() if isinstance(value, list)),
        key=lambda name: name == "seed",
    )
    choices = [
        dict(zip(spanning, choice, strict=True))
        for choice in itertools.product(*(values[name] for name in spanning))
    ]
    if len(choices) > MOST:
        counts = " × ".join(str(len(values[name])) for name in spanning)
        raise ConfigError(
            f"{counts} values are {len(choices):,} alternatives; give options that span at most {MOST:,}"
        )
    found = [
        Alternative(name, {**values, **choice})
        for name, choice in zip(_names(choices), choices, strict=True)
    ]
    for each in found:
        each.config  # noqa: B018 — a choice that cannot be is refused
    return found


def refused(name: str, sentence: str, exit_status: int) -> FedcompError:
    """What ends a command of several alternatives before the first one trains."""
    error = FedcompError(f"alternative {name}: {sentence}" if name else sentence)
    error.exit_status = exit_status
    return error


def _names(choices: Sequence[Mapping[str, Any]]) -> list[str]:
    names: list[str] = []
    for choice in choices:
        name = plain = "_".join(_word(option, value) for option, value in choice.items())[
            :LONGEST
        ].rstrip("-_.")
        for number in itertools.count(2):
            if name.lower() not in (taken.lower() for taken in names):
                break
            name = f"{plain}-{number}"
        names.append(name)
    return names


def _word(option: str, value: Any) -> str:
    """`stc:density=1/400` as `stc-1-400`, a seed of 3 as `seed-3`."""
    text = re.sub(r"\w+=", "", str(value)).replace("%", "pct")
    text = re.sub(r"[^\w.]+", "-", text, flags=re.ASCII).strip("-.") or "none"
    return text if option in BARE else f"{flag(option)[2:]}-{text}"
