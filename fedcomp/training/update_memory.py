"""Memory for the updates of a cohort that is used again in later rounds.

Memory that is new to a process is expensive: the operating system sets it to zero, one page at a time. For large models, writing an update
into new memory takes up to five times as long as writing it into memory that was used before.
"""

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Memory = TypeVar("Memory")


class UpdateMemory(Generic[Memory]):
    """Memory on the CPU for stacks of float32 vectors, used again when no tensor refers to the previous stack any more.

    `allocate` returns an object with memory for a number of float32 elements, and the tensor [elements] in this memory.
    """

    def __init__(self, allocate: Callable[[int], tuple[Memory, Tensor]]):
        self._allocate = allocate
        self._unused: tuple[Memory, Tensor] | None = None

    def stack(self, vectors: int, numel: int) -> tuple[Memory, Tensor]:
        """Return an uninitialised tensor [vectors, numel], and the object with its memory."""
        unused, self._unused = self._unused, None
        if unused is None or len(unused[1]) != vectors * numel:
            unused = self._allocate(vectors * numel)
        memory, whole = unused
        # torch refers to this array as long as a tensor uses the stack.
        array = whole.numpy()[:]
        weakref.finalize(array, self._keep, memory, whole).atexit = False
        return memory, torch.from_numpy(array).view(vectors, numel)

    def _keep(self, memory: Memory, whole: Tensor) -> None:
        self._unused = memory, whole


def in_process(elements: int) -> tuple[None, Tensor]:
    """Allocate memory of this process for `UpdateMemory`."""
    return None, torch.empty(elements, dtype=torch.float32)
