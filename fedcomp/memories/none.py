"""No error feedback: the codec's error is lost."""

from collections.abc import Sequence

import numpy as np

from ..codecs import Context, Update
from ..errors import NonFiniteError
from ..kernels import Rows
from .base import Memory

# Value of `pending` instead of a frame of a lossless codec, which contains all coordinates
SENT_ALL = b""


class NoMemory(Memory):
    """A memory without state. With a lossless codec, `pending` is SENT_ALL instead of the frame, which would be as large as the model."""

    name = "none"

    @property
    def sent_positions(self) -> np.ndarray | None:
        return None if self.pending == SENT_ALL else super().sent_positions

    def _pending_part(self, frame: bytes) -> bytes:
        return SENT_ALL if self.codec.unscoped.lossless else frame

    @classmethod
    def _propose(
        cls, memories: Sequence[Memory], x: Rows, seeds: Sequence[int], context: Context
    ) -> list[bytes | NonFiniteError]:
        return cls._encode(memories, x, seeds, context)

    @classmethod
    def _commit(
        cls, memories: Sequence[Memory], frames: Sequence[bytes], dropped: Sequence[Update | None]
    ) -> None: ...
