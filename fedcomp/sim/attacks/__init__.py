"""Attacks: virtual Byzantine clients in a simulation. One attack, one line here."""

from ... import spec
from ...errors import SpecError
from .alie import ALIE
from .base import Attack, Scene, Sender
from .blind import Constant, Gaussian, Inverted, RandomSign, Rescaled
from .code_aware import CodeAware
from .equivocation import Equivocation
from .ipm import InnerProduct
from .label_flip import LabelFlip
from .liars import Liars
from .low_margin import LowMargin
from .mimic import Mimic
from .replies import Abstention, Infinity, Malformed

__all__ = ["Attack", "Liars", "Scene", "Sender", "attacks", "available_attacks"]

_ATTACKS: dict[str, type[Attack]] = {
    cls.name: cls
    for cls in (
        Inverted,
        Rescaled,
        RandomSign,
        Constant,
        Gaussian,
        LabelFlip,
        ALIE,
        InnerProduct,
        Mimic,
        LowMargin,
        CodeAware,
        Infinity,
        Malformed,
        Abstention,
        Equivocation,
    )
}


def available_attacks() -> dict[str, type[Attack]]:
    """Every attack that a spec string may name: name → class."""
    return dict(_ATTACKS)


def attacks(text: str) -> list[Attack]:
    """The attacks of a spec string such as `inverted:2` or `alie:3,z=1.5+mimic:clients=7`. Raises SpecError."""
    parsed = spec.parse(text)
    if parsed.scope:
        raise SpecError(f"attack '{text}' cannot have a scope; leave @{parsed.scope} out")
    made = [spec.build(part, _ATTACKS, "attack") for part in parsed.parts]
    if len(set(made)) != len(made):
        raise SpecError(f"attack '{text}' says the same twice; give one of them a larger count")
    return made
