"""What is kept between rounds, around a codec. One rule, one file; one line here."""

from .. import spec
from ..codecs import Codec
from ..errors import SpecError, nearest
from ..layout import Layout
from .base import Memory
from .none import Nothing
from .residual import Residual

__all__ = ["Memory", "available_memories", "memory"]

_MEMORIES: dict[str, type[Memory]] = {cls.name: cls for cls in (Nothing, Residual)}


def available_memories() -> dict[str, type[Memory]]:
    """Every memory that a spec string may name: name → class."""
    return dict(_MEMORIES)


def memory(text: str, codec: Codec, numel: int, layout: Layout | None = None) -> Memory:
    """A memory around `codec` for vectors [numel]. Raises SpecError, and ConfigError for a codec that it would diverge with."""
    parsed = spec.parse(text)
    name, options = parsed.parts[0].name, parsed.parts[0].options
    if name not in _MEMORIES:
        raise SpecError(f"unknown memory '{name}'; {nearest(name, _MEMORIES)}")
    if options or parsed.scope or len(parsed.parts) > 1:
        raise SpecError(f"memory '{name}' takes no options; write {name}")
    return _MEMORIES[name](codec, numel, layout)
