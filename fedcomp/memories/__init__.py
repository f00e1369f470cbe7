"""What is kept between rounds, around a codec. One rule, one file."""

import functools
from typing import Any

from .. import spec
from ..codecs import Codec
from ..errors import SpecError
from ..layout import Layout
from ..registry import Registry, subclass_of
from .base import Counterpart, Memory

__all__ = [
    "Counterpart",
    "Memory",
    "available_memories",
    "chooses",
    "counterpart",
    "default_uplink",
    "memory",
    "momentum",
    "only_under",
]

_MEMORIES: Registry[type[Memory]] = Registry(__name__, "fedcomp.memories", subclass_of(Memory))


def available_memories() -> dict[str, type[Memory]]:
    """Return every memory that a spec string may name, those of other packages included: name → class."""
    return dict(_MEMORIES)


def memory(text: str, codec: Codec, numel: int, layout: Layout | None = None) -> Memory:
    """A memory around `codec` for vectors [numel]. Raises SpecError, and ConfigError for a codec that it would diverge with."""
    if not isinstance(text, str) or not isinstance(codec, Codec):
        raise SpecError(
            f"a memory is a name and a codec, such as memory('residual', codec('stc'), numel); given {text!r}, {codec!r}"
        )
    made, options = _named(text)
    return made(codec, numel, layout, options)


@functools.lru_cache(64)
def _named(text: str) -> tuple[type[Memory], Any]:
    """The class and its options; remembered, since a simulation makes a memory for every client."""
    parsed = spec.parse(text)
    if parsed.scope or len(parsed.parts) > 1:
        raise SpecError(f"memory '{text}' cannot have a scope or a second part; name one memory")
    return spec.choose(parsed.parts[0], _MEMORIES, "memory")


def chooses(text: str) -> bool:
    """Whether a memory decides itself which coordinates are sent."""
    name = spec.parse(text).parts[0].name
    return name in _MEMORIES and _MEMORIES[name].chooses


def only_under(text: str) -> str:
    """The strategy without which a memory has no frames, "" for a memory that works under any."""
    name = spec.parse(text).parts[0].name
    return _MEMORIES[name].only_under if name in _MEMORIES else ""


def default_uplink(text: str) -> str:
    """Return the codec of a run with this memory where --uplink is left out; "" for the general default. Raises SpecError."""
    return _named(text)[0].default_uplink


def momentum(text: str) -> float:
    """Return the momentum that a memory applies to updates, 0 for none. Raises SpecError."""
    return getattr(_named(text)[1], "momentum", 0.0)


def counterpart(
    text: str, codec: Codec, numel: int, layout: Layout | None = None
) -> Counterpart | None:
    """The server's side of memories that `memory` makes of the same; None where clients alone keep something. Raises like `memory`."""
    kept = memory(text, codec, numel, layout)
    return kept.counterpart and kept.counterpart(kept)
