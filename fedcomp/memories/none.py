"""No memory: the codec's error is lost. The null object of memories."""

from collections.abc import Sequence
from typing import ClassVar

from ..codecs import Context, Update
from ..errors import NonFiniteError
from ..kernels import Rows
from .base import Memory


class NoMemory(Memory):
    """A memory without state."""

    name: ClassVar[str] = "none"

    @classmethod
    def _propose(
        cls, memories: Sequence[Memory], x: Rows, seeds: Sequence[int], context: Context
    ) -> list[bytes | NonFiniteError]:
        return cls._encode(memories, x, seeds, context)

    @classmethod
    def _commit(
        cls, memories: Sequence[Memory], frames: Sequence[bytes], dropped: Sequence[Update | None]
    ) -> None: ...
