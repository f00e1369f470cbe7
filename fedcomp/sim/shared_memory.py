"""Tensors in memory that is shared between processes of one machine.

The memory is anonymous: it has no file, and the system frees it when the last process that maps it ends. Linux only.
"""

import math
import os
import weakref
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor


class SharedMemory:
    """Anonymous memory that one SharedTensor after another may use, since new memory costs page faults."""

    def __init__(self, size: int):
        file = os.memfd_create("fedcomp", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, file)
        os.ftruncate(file, max(1, size))
        self.path, self.size = f"/proc/{os.getpid()}/fd/{file}", size
        self._mapping: weakref.ref[np.memmap] | None = None

    @property
    def is_free(self) -> bool:
        """Whether no tensor of this process uses the memory."""
        return self._mapping is None or self._mapping() is None

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        mapping = np.memmap(self.path, np.uint8, "r+")
        self._mapping = weakref.ref(mapping)
        return _as_tensor(mapping, shape, dtype)


class SharedTensor:
    """A tensor in shared memory. A process that unpickles it gets a tensor with the same storage.

    The object has to exist until the other process has unpickled it. The storage exists as long as a tensor uses it. `memory`: free
    memory of sufficient size; None: new memory.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        memory: SharedMemory | None = None,
    ):
        self.memory = memory or SharedMemory(math.prod(shape) * dtype.itemsize)
        self.tensor = self.memory.tensor(shape, dtype)

    @classmethod
    def copy_of(cls, tensor: Tensor) -> Self:
        shared = cls(tuple(tensor.shape), tensor.dtype)
        shared.tensor.copy_(tensor)
        return shared

    def __reduce__(self) -> tuple[Any, ...]:
        return _map, (self.memory.path, tuple(self.tensor.shape), self.tensor.dtype)


def _map(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return _as_tensor(np.memmap(path, np.uint8, "r+"), shape, dtype)


def _as_tensor(mapping: np.memmap, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(mapping[: math.prod(shape) * dtype.itemsize]).view(dtype).view(shape)
