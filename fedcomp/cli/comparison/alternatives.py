"""The alternatives of a command: one run for each combination of option values. A run folder has the name of its alternative."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...baseline import (
    COMPRESSING_STRATEGIES,
    COMPRESSION_OPTIONS,
    NAME,
    dense,
    is_dense,
    strategy_name,
)
from ...config import RunConfig, flag
from ...errors import ConfigError, FedcompError

# Options whose names are left out of the names of run folders: `stc-1-400` instead of `uplink-stc-1-400`.
NAMED_BY_VALUE = {"uplink", "strategy", "memory", "partition", "attack"}
MAX_ALTERNATIVES = 1000
MAX_NAME_LENGTH = 80  # characters


@dataclass(frozen=True)
class Alternative:
    """One combination of option values. `options` contains the given options, each with one value."""

    name: str
    options: Mapping[str, Any]

    @property
    def config(self) -> RunConfig:
        return RunConfig(**self.options)


def has_alternatives(values: Mapping[str, Any]) -> bool:
    """Return whether any option has several values."""
    return any(isinstance(value, list) for value in values.values())


def compares_compression(values: Mapping[str, Any]) -> bool:
    """Return whether a compression option has several values, or whether several strategies are given and one of them always compresses."""
    strategies = values.get("strategy")
    names = map(strategy_name, strategies) if isinstance(strategies, list) else ()
    differ = any(isinstance(values.get(name), list) for name in COMPRESSION_OPTIONS)
    return differ or not COMPRESSING_STRATEGIES.isdisjoint(names)


def alternatives(values: Mapping[str, Any], baseline: bool = False) -> list[Alternative]:
    """Return an alternative for each combination of option values. An option in `values` has one value or a list of values.

    The order is that of nested loops over the options in `values`, with the seed in the innermost loop. If `baseline` is set, the dense
    (uncompressed) baselines of the alternatives follow, except for baselines that are alternatives already. Raises ConfigError for invalid
    options.
    """
    listed = [name for name, value in values.items() if isinstance(value, list)]
    listed.sort(key=lambda name: name == "seed")
    products = itertools.product(*(values[name] for name in listed))
    choices = [dict(zip(listed, choice, strict=True)) for choice in products]
    if len(choices) > MAX_ALTERNATIVES:
        counts = " × ".join(str(len(values[name])) for name in listed)
        raise ConfigError(
            f"{counts} option values make {len(choices):,} combinations; give at most {MAX_ALTERNATIVES:,} combinations"
        )
    texts = ["_".join(_name_part(*item) for item in choice.items()) for choice in choices]
    options = [{**values, **choice} for choice in choices]
    if baseline:
        others = [name for name in listed if name not in COMPRESSION_OPTIONS]
        baselines = [dense(each) for each in options if is_dense(each)]
        for baseline_run in [dense(each) for each in options]:
            if baseline_run not in baselines:
                baselines.append(baseline_run)
                options.append(baseline_run)
                texts.append("_".join([NAME, *(_name_part(n, baseline_run[n]) for n in others)]))
    result = [*map(Alternative, _unique_names(texts), options)]
    for alternative in result:
        alternative.config  # noqa: B018 — raises ConfigError for invalid values
    return result


def alternative_error(name: str, message: str, exit_status: int) -> FedcompError:
    """Return the error for an alternative that cannot run. `name` is the alternative's name, or "" if the command has only one run."""
    error = FedcompError(f"alternative {name}: {message}" if name else message)
    error.exit_status = exit_status
    return error


def _unique_names(texts: Sequence[str]) -> list[str]:
    """Shorten names to MAX_NAME_LENGTH characters. Append a number to a name that equals an earlier name, up to case."""
    names: list[str] = []
    for text in texts:
        name = base = text[:MAX_NAME_LENGTH].rstrip("-_.")
        number = 1
        while name.lower() in (taken.lower() for taken in names):
            number += 1
            name = f"{base}-{number}"
        names.append(name)
    return names


def _name_part(option: str, value: Any) -> str:
    """Return an option's value as a part of a folder name, such as `stc-1-400` for `stc:density=1/400`, or `seed-3`."""
    text = re.sub(r"\w+=", "", str(value)).replace("%", "pct")
    text = re.sub(r"[^\w.]+", "-", text, flags=re.ASCII).strip("-.") or "none"
    return text if option in NAMED_BY_VALUE else f"{flag(option)[2:]}-{text}"
