"""What is kept between rounds, around a codec. One rule, one file; one line here."""

from .. import spec
from ..codecs import Codec
from ..errors import SpecError
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
    if not isinstance(text, str) or not isinstance(codec, Codec):
        raise SpecError(f"a memory is a name and a codec, such as memory('residual', codec('stc'), numel); given {text!r}, {codec!r}")
    parsed = spec.parse(text)
    if parsed.scope or len(parsed.parts) > 1:
        raise SpecError(f"memory '{text}' cannot have a scope or a second part; name one memory")
    options = spec.build(parsed.parts[0], {name: cls.Options for name, cls in _MEMORIES.items()}, "memory")
    return _MEMORIES[parsed.parts[0].name](codec, numel, layout, options)
