"""The null object: what the codec loses is lost."""

from typing import ClassVar

from torch import Tensor

from ..codecs import Context, Update
from .base import Memory


class Nothing(Memory):
    """Keeps nothing between rounds."""

    name: ClassVar[str] = "none"

    def _propose(self, x: Tensor, seed: int, context: Context) -> bytes:
        return self.codec.encode(x, seed=seed, layout=self.layout, context=context)

    def _commit(self, frame: bytes, dropped: Update | None) -> None: ...

    def _rollback(self, frame: bytes) -> None: ...
