"""What is kept between rounds, around a codec. One rule, one file; one line here."""

from .. import spec
from ..codecs import Codec
from ..errors import SpecError
from ..layout import Layout
from .adacomp import AdaComp
from .base import Counterpart, Memory
from .dgc import DGC
from .diana import Diana
from .ecq import ECQ
from .ef21 import EF21
from .laq import LAQ
from .lowrank import LowRank
from .none import Nothing
from .residual import Residual
from .variance import Variance

__all__ = ["Counterpart", "Memory", "available_memories", "counterpart", "memory"]

_MEMORIES: dict[str, type[Memory]] = {cls.name: cls for cls in (Nothing, Residual, ECQ, DGC, AdaComp, Variance, EF21, Diana, LAQ, LowRank)}


def available_memories() -> dict[str, type[Memory]]:
    """Every memory that a spec string may name: name → class."""
    return dict(_MEMORIES)


def memory(text: str, codec: Codec, numel: int, layout: Layout | None = None) -> Memory:
    """A memory around `codec` for vectors [numel]. Raises SpecError, and ConfigError for a codec that it would diverge with."""
    if not isinstance(text, str) or not isinstance(codec, Codec):
        raise SpecError(f"a memory is a name and a codec, such as memory('residual', codec('stc'), numel); given {text!r}, {codec!r}")
    parsed = spec.parse(text)
    if parsed.scope or len(parsed.parts) > 1:
        raise SpecError(f"memory '{text}' cannot have a scope or a second part; name one memory")
    options = spec.build(parsed.parts[0], {name: cls.Options for name, cls in _MEMORIES.items()}, "memory")
    return _MEMORIES[parsed.parts[0].name](codec, numel, layout, options)


def counterpart(text: str, codec: Codec, numel: int, layout: Layout | None = None) -> Counterpart | None:
    """The server's side of memories that `memory` makes of the same; None where clients alone keep something. Raises like `memory`."""
    name = spec.parse(text).parts[0].name
    if name in _MEMORIES and _MEMORIES[name].counterpart is None:
        return None
    kept = memory(text, codec, numel, layout)
    return kept.counterpart(kept)
