"""Flower strategies: the round loop and its policies. One algorithm, one file; one line here."""

import dataclasses
from typing import Any

from .. import spec
from ..config import RunConfig, Usual, with_horizon
from ..errors import SpecError
from ..memories import default_uplink
from .asynchronous import Asynchronous
from .average import Average
from .base import Outcome, Phase, RoundStrategy, Rules
from .broadcasts import Broadcast, Broadcasts
from .centered_clipping import CenteredClipping
from .codes import allocation_matrix
from .compressed import Compressed
from .election import Election
from .fetchsgd import FetchSGD
from .geometric_median import GeometricMedian
from .gtopk import GTopK
from .krum import Krum, MultiKrum
from .median import Median, TrimmedMean
from .powersgd import PowerSGD
from .scaffold import Scaffold
from .shared_scale import SharedScale
from .sketched_sgd import SketchedSGD
from .tally import majority
from .vote import Vote

__all__ = [
    "Asynchronous",
    "Average",
    "Broadcast",
    "Broadcasts",
    "Compressed",
    "Outcome",
    "Phase",
    "RoundStrategy",
    "Rules",
    "allocation_matrix",
    "available_strategies",
    "majority",
    "resolved",
    "strategy",
]

_STRATEGIES: dict[str, type[RoundStrategy]] = {
    cls.name: cls
    for cls in (
        Average,
        FetchSGD,
        GTopK,
        PowerSGD,
        Scaffold,
        SharedScale,
        SketchedSGD,
        Asynchronous,
        Median,
        TrimmedMean,
        Krum,
        MultiKrum,
        GeometricMedian,
        CenteredClipping,
        Vote,
        Election,
    )
}


def available_strategies() -> dict[str, type[RoundStrategy]]:
    """Every strategy that a spec string may name: name → class."""
    return dict(_STRATEGIES)


def strategy(text: str, rules: Rules | None = None, **told: Any) -> RoundStrategy:
    """The strategy of a spec string such as `powersgd:rank=2`. Raises SpecError, and ConfigError for rules that do not suit it."""
    cls, options = _chosen(text)
    return cls(rules, options=options, **told)


def resolved(config: RunConfig) -> RunConfig:
    """Return the options of a run, with the choices of its strategy and memory where they were left out. Raises UserError.

    The horizon of schedules is filled in as well.
    """
    cls, options = _chosen(config.strategy)
    own = {
        name: value
        for name, value in cls.defaults(options).items()
        if isinstance(getattr(config, name), Usual)
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
    options = spec.build(
        parsed.parts[0], {name: cls.Options for name, cls in _STRATEGIES.items()}, "strategy"
    )
    return _STRATEGIES[parsed.parts[0].name], options
