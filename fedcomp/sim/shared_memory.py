"""Tensors in memory that processes of one machine share.

The memory is anonymous: it leaves no file behind, and the system frees it when the last process that maps it ends. Linux only.
"""

import math
import os
import weakref
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor


class SharedMemory:
    """Anonymous memory for one SharedTensor after the other: new memory costs page faults."""

    def __init__(self, size: int):
        file = os.memfd_create("fedcomp", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, file)
        os.ftruncate(file, max(1, size))
        self.path, self.size = f"/proc/{os.getpid()}/fd/{file}", size
        self._mapping: weakref.ref[np.memmap] | None = None

    @property
    def is_free(self) -> bool:
        """Whether no tensor of this process lies in the memory."""
        return self._mapping is None or self._mapping() is None

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        mapping = np.memmap(self.path, np.uint8, "r+")
        self._mapping = weakref.ref(mapping)
        return _over(mapping, shape, dtype)


class SharedTensor:
    """A tensor in shared memory. A process that unpickles it gets a tensor over the same bytes.

    The object has to live until the other process has unpickled it; the bytes live as long as tensors over them. `memory` is free
    memory that is large enough, by default new memory.
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
        return _mapped, (self.memory.path, tuple(self.tensor.shape), self.tensor.dtype)


def _mapped(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return _over(np.memmap(path, np.uint8, "r+"), shape, dtype)


def _over(raw: np.memmap, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(raw[: math.prod(shape) * dtype.itemsize]).view(dtype).view(shape)
