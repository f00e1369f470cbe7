"""Flower strategies: the round loop and its policies. One algorithm, one file; one line here."""

from .. import spec
from ..errors import SpecError, nearest
from .average import Average
from .base import Outcome, Phase, RoundStrategy, Rules
from .broadcasts import Broadcast, Broadcasts

__all__ = ["Average", "Broadcast", "Broadcasts", "Outcome", "Phase", "RoundStrategy", "Rules", "available_strategies", "strategy_class"]

_STRATEGIES: dict[str, type[RoundStrategy]] = {cls.name: cls for cls in (Average,)}


def available_strategies() -> dict[str, type[RoundStrategy]]:
    """Every strategy that a spec string may name: name → class."""
    return dict(_STRATEGIES)


def strategy_class(text: str) -> type[RoundStrategy]:
    """The class that a spec string names. Raises SpecError."""
    part = spec.parse(text).parts[0]
    if part.name not in _STRATEGIES:
        raise SpecError(f"unknown strategy '{part.name}'; {nearest(part.name, _STRATEGIES)}")
    if part.options:
        raise SpecError(f"strategy '{part.name}' takes no options; write {part.name}")
    return _STRATEGIES[part.name]
