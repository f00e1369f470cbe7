"""Memories keep the part of a client's updates that its codec has not sent. One algorithm, one file."""

import dataclasses
import functools
from typing import Any, TypeVar

from .. import spec
from ..codecs import Codec, codec
from ..errors import SpecError
from ..layout import Layout
from ..plugins import PluginRegistry, subclass_of
from .base import Counterpart, Memory

T = TypeVar("T")
AUTO = "auto"  # the value of --memory that selects a memory by the codec

__all__ = [
    "AUTO",
    "Counterpart",
    "Memory",
    "available_memories",
    "default_uplink",
    "memory",
    "with_memories",
]

_MEMORIES: PluginRegistry[type[Memory]] = PluginRegistry(
    __name__, "fedcomp.memories", subclass_of(Memory)
)


def available_memories() -> dict[str, type[Memory]]:
    """Return all memories, including those of other packages, as a dict from name to class."""
    return _MEMORIES.available()


def memory(text: str, codec: Codec, numel: int, layout: Layout | None = None) -> Memory:
    """Return the memory that a spec string such as `residual:decay=0.95` describes, for `codec` and for vectors [numel].

        memory = fedcomp.memory("residual", fedcomp.codec("stc:density=1/400"), numel=1_000_000)
        frame = memory.propose(update)  # update: a vector [numel]; frame: bytes, or None if there is nothing to send
        memory.commit()  # or memory.rollback(), if the frame did not arrive

    The spec string `auto` means `residual` for a lossy codec that contracts, and otherwise `none`. `layout`: names and shapes of the
    tensors in a vector; by default, the vector is one tensor. Raises SpecError for an unknown memory or option. Raises ConfigError if the
    memory would diverge with this codec, or if the layout has another number of elements.
    """
    if not isinstance(text, str) or not isinstance(codec, Codec):
        raise SpecError(
            f"memory() needs a spec string and a codec, such as memory('residual', codec('stc'), numel); given {text!r}, {codec!r}"
        )
    cls, options = _parsed(_suited(codec, numel) if text == AUTO else text)
    return cls(codec, numel, layout, options)


def with_memories(options: T, numel: int) -> T:
    """Return `options` with each memory `auto` replaced by the name of a memory that suits its codec for vectors [numel].

    `options` is a dataclass with the fields uplink, memory, downlink and downlink_memory. Raises SpecError.
    """
    links = {"memory": options.uplink, "downlink_memory": options.downlink}
    auto = [name for name in links if getattr(options, name) == AUTO]
    return dataclasses.replace(options, **{n: _suited(codec(links[n]), numel) for n in auto})


def _suited(codec: Codec, numel: int) -> str:
    needs_none = codec.unscoped.lossless or codec.contraction(numel) is None
    return "none" if needs_none else "residual"


@functools.lru_cache(64)
def _parsed(text: str) -> tuple[type[Memory], Any]:
    """Return the class and the options of a memory. Results are cached, since a simulation creates a memory for every client."""
    with spec.error_context(text):
        return spec.choose(spec.parse_part(text, "memory"), _MEMORIES, "memory")


def default_uplink(text: str) -> str:
    """Return the default of --uplink with this memory, "" if the memory has no default of its own. Raises SpecError."""
    return "" if text == AUTO else _parsed(text)[0].default_uplink
