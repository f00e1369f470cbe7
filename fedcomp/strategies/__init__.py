"""Strategies: federated algorithms, each with a server half and a client half. Each algorithm has its own file."""

import dataclasses
from typing import Any

from .. import spec
from ..codecs import codec
from ..config import RunConfig, StrategyDefault, flag, read_run, with_horizon
from ..layout import Layout
from ..memories import AUTO, default_uplink
from ..plugins import PluginRegistry, subclass_of
from .asynchronous import Asynchronous
from .average import Average
from .base import ClientAlgorithm, Phase, RoundStrategy, StrategyConfig
from .codes import allocation_matrix
from .optimizers import optimizer
from .vote import majority

__all__ = [
    "Asynchronous",
    "Average",
    "ClientAlgorithm",
    "Phase",
    "RoundStrategy",
    "StrategyConfig",
    "allocation_matrix",
    "available_strategies",
    "majority",
    "make_client_algorithm",
    "resolved",
    "strategy",
]

_STRATEGIES: PluginRegistry[type[RoundStrategy]] = PluginRegistry(
    __name__, "fedcomp.strategies", subclass_of(RoundStrategy)
)

# Options of a run whose values are spec strings, such as `stc:density=1%`. Each function raises SpecError for an invalid string.
SPEC_READERS = {
    "uplink": codec,
    "downlink": codec,
    "downlink_memory": default_uplink,
    "server_optimizer": optimizer,
}


def available_strategies() -> dict[str, type[RoundStrategy]]:
    """Return the strategy classes by name, including those that other packages define."""
    return _STRATEGIES.available()


def strategy(text: str, config: StrategyConfig, layout: Layout, **settings: Any) -> RoundStrategy:
    """Create the server half of a strategy from a spec string such as `powersgd:rank=2`, for models of the given layout.

    `settings`: further keyword arguments of `RoundStrategy`, such as `warn`. Raises SpecError for an invalid spec string, and ConfigError
    for a `config` with which the strategy does not work.
    """
    cls, options = _chosen(text)
    return cls(config, layout, options=options, **settings)


def make_client_algorithm(text: str) -> ClientAlgorithm:
    """Create the client half of a strategy from a spec string such as `powersgd:rank=2`. Raises SpecError."""
    cls, options = _chosen(text)
    return cls.client_for(options)


def resolved(config: RunConfig) -> RunConfig:
    """Return a copy of the run options in which the defaults of the strategy and of the memory replace unset options. Raises UserError.

    If the run is resumed, a memory `auto` becomes the memory of the stored run. Else it becomes the strategy's default. Without such a
    default it stays `auto`, and `fedcomp.memories.with_memories` replaces it when the size of the model is known. The option `horizon`
    (the round in which schedules end) is set if a schedule needs it.
    """
    with spec.error_context(flag="--strategy"):
        cls, options = _chosen(config.strategy)
    stored = read_run(config.out) if config.resume and config.out else {}
    memories = {"memory": cls.required_memory or AUTO, "downlink_memory": AUTO}
    filled: dict[str, Any] = {}
    for name, default in (memories | dict(cls.defaults(options))).items():
        given = getattr(config, name)
        if given == AUTO:
            filled[name] = stored.get(name, default)
        elif isinstance(given, StrategyDefault):
            filled[name] = default
    chosen = dataclasses.replace(config, **filled)
    with spec.error_context(flag="--memory"):
        suited = default_uplink(chosen.memory)
    if isinstance(chosen.uplink, StrategyDefault) and suited:
        chosen = dataclasses.replace(chosen, uplink=suited)
    for name, read in SPEC_READERS.items():
        with spec.error_context(flag=flag(name)):
            read(getattr(chosen, name))
    return with_horizon(chosen)


def _chosen(text: str) -> tuple[type[RoundStrategy], Any]:
    with spec.error_context(text):
        return spec.choose(spec.parse_part(text, "strategy"), _STRATEGIES, "strategy")
