"""Attacks by Byzantine clients in a simulation. Each attack is a subclass of `Attack`."""

from ... import spec
from ...errors import SpecError
from ...plugins import PluginRegistry, subclass_of
from .base import Attack, ReplyContext, UpdateContext
from .byzantine import ByzantineClients

__all__ = [
    "Attack",
    "ByzantineClients",
    "UpdateContext",
    "ReplyContext",
    "attacks",
    "available_attacks",
]

_ATTACKS: PluginRegistry[type[Attack]] = PluginRegistry(
    __name__, "fedcomp.attacks", subclass_of(Attack)
)


def available_attacks() -> dict[str, type[Attack]]:
    """Return the classes of all attacks by name, including attacks from plugins (fedcomp/plugins.py)."""
    return _ATTACKS.available()


def attacks(text: str) -> list[Attack]:
    """Return the attacks in a value of --attack, such as `inverted:2` or `alie:3,z=1.5+mimic:clients=7`. Raises SpecError."""
    with spec.error_context(text, "--attack"):
        parsed = spec.parse(text)
        if parsed.scope:
            raise SpecError(f"an attack changes the whole update; leave @{parsed.scope} out")
        parsed_attacks = [spec.build(part, _ATTACKS, "attack") for part in parsed.parts]
        if len(set(parsed_attacks)) != len(parsed_attacks):
            raise SpecError("the same attack is given twice; give it once, with a larger count")
    return parsed_attacks
