"""Flower strategies: the round loop and its policies. One algorithm, one file."""

import dataclasses
from typing import Any

from .. import spec
from ..config import RunConfig, Usual, read_run, with_horizon
from ..errors import SpecError
from ..memories import AUTO, default_uplink
from ..registry import Registry, subclass_of
from .asynchronous import Asynchronous
from .average import Average
from .base import Outcome, Phase, RoundStrategy, Rules
from .broadcasts import Broadcast, Broadcasts
from .client_algorithm import ClientAlgorithm
from .codes import allocation_matrix
from .compressed import Compressed
from .tally import majority

__all__ = [
    "Asynchronous",
    "Average",
    "Broadcast",
    "Broadcasts",
    "ClientAlgorithm",
    "Compressed",
    "Outcome",
    "Phase",
    "RoundStrategy",
    "Rules",
    "allocation_matrix",
    "available_strategies",
    "majority",
    "make_client_algorithm",
    "resolved",
    "strategy",
]

_STRATEGIES: Registry[type[RoundStrategy]] = Registry(
    __name__, "fedcomp.strategies", subclass_of(RoundStrategy)
)


def available_strategies() -> dict[str, type[RoundStrategy]]:
    """Return every strategy that a spec string may name, those of other packages included: name → class."""
    return dict(_STRATEGIES)


def strategy(text: str, rules: Rules | None = None, **told: Any) -> RoundStrategy:
    """The strategy of a spec string such as `powersgd:rank=2`. Raises SpecError, and ConfigError for rules that do not suit it."""
    cls, options = _chosen(text)
    return cls(rules, options=options, **told)


def make_client_algorithm(text: str) -> ClientAlgorithm:
    """Return the client half of the strategy of a spec string. Raises SpecError."""
    cls, options = _chosen(text)
    return cls.client_for(options)


def resolved(config: RunConfig) -> RunConfig:
    """Return the options of a run, with the choices of its strategy and memory where they were left out. Raises UserError.

    The horizon of schedules is filled in as well. Memories are left at `auto` where they depend on the model: see
    `fedcomp.memories.with_memories`. A resumed run has those of the stored run.
    """
    cls, options = _chosen(config.strategy)
    stored = read_run(config.out) if config.resume and config.out else {}
    own = {
        name: stored.get(name, value) if getattr(config, name) == AUTO else value
        for name, value in (
            {"memory": AUTO, "downlink_memory": AUTO} | cls.defaults(options)
        ).items()
        if isinstance(getattr(config, name), Usual) or getattr(config, name) == AUTO
    }
    chosen = dataclasses.replace(config, **own)
    if isinstance(chosen.uplink, Usual) and (suited := default_uplink(chosen.memory)):
        chosen = dataclasses.replace(chosen, uplink=suited)
    return with_horizon(chosen)


def _chosen(text: str) -> tuple[type[RoundStrategy], Any]:
    parsed = spec.parse(text)
    if parsed.scope or len(parsed.parts) > 1:
        raise SpecError(
            f"strategy '{text}' cannot have a scope or a second part; name one strategy"
        )
    return spec.choose(parsed.parts[0], _STRATEGIES, "strategy")
