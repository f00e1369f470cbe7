"""Memories: error-feedback algorithms, each in its own file. A memory compensates for the errors of a client's lossy codec."""

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
AUTO = (
    "auto"  # value of --memory: `residual` if the codec is lossy and contractive, otherwise `none`
)

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
    """Return the memory classes by name, including those that other packages define."""
    return _MEMORIES.available()


def memory(text: str, codec: Codec, numel: int, layout: Layout | None = None) -> Memory:
    """Create a memory (error feedback of a client) from a spec string such as `residual:decay=0.95`, for updates of `numel` elements.

        memory = fedcomp.memory("residual", fedcomp.codec("stc:density=1/400"), numel=1_000_000)
        frame = memory.propose(update)  # update: a vector [numel]; frame: bytes, or None if there is nothing to send
        memory.commit()  # or memory.rollback(), if the frame did not arrive

    The spec string `auto` means `residual` if the codec is lossy and contractive (`Codec.contraction` is not None), and otherwise `none`.
    `layout`: names and shapes of the model's tensors, which are concatenated in an update; by default, an update counts as one tensor.
    Raises SpecError for an unknown memory or option. Raises ConfigError if error feedback would diverge with this codec, or if `layout`
    does not have `numel` elements.
    """
    if not isinstance(text, str) or not isinstance(codec, Codec):
        raise SpecError(
            f"memory() needs a spec string and a codec, such as memory('residual', codec('stc'), numel); given {text!r}, {codec!r}"
        )
    cls, options = _parsed(_suited(codec, numel) if text == AUTO else text)
    return cls(codec, numel, layout, options)


def with_memories(options: T, numel: int) -> T:
    """Return a copy of `options` in which each memory `auto` is replaced by `residual` or `none`, depending on the codec.

    `options` is a dataclass with the codecs `uplink` and `downlink` and their memories, `memory` and `downlink_memory`. Raises SpecError.
    """
    links = {"memory": options.uplink, "downlink_memory": options.downlink}
    auto = [name for name in links if getattr(options, name) == AUTO]
    return dataclasses.replace(options, **{n: _suited(codec(links[n]), numel) for n in auto})


def _suited(codec: Codec, numel: int) -> str:
    needs_none = codec.unscoped.lossless or codec.contraction(numel) is None
    return "none" if needs_none else "residual"


@functools.lru_cache(64)
def _parsed(text: str) -> tuple[type[Memory], Any]:
    """Parse a spec string into a memory class and its options. Cache the results, because a simulation creates a memory per client."""
    with spec.error_context(text):
        return spec.choose(spec.parse_part(text, "memory"), _MEMORIES, "memory")


def default_uplink(text: str) -> str:
    """Return the default of --uplink with the memory spec string `text`, or "" if this memory sets no default. Raises SpecError."""
    return "" if text == AUTO else _parsed(text)[0].default_uplink
