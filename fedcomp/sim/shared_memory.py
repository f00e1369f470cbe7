"""Tensors in memory that processes of one machine share.

The memory is anonymous: no file can be left behind, and it is freed when the last process that maps it ends. Needs Linux.
"""

import math
import os
import weakref
from typing import Self

import numpy as np
import torch
from torch import Tensor


class SharedTensor:
    """A tensor in shared memory. A process that unpickles it gets a tensor over the same bytes.

    The object has to live until the other process has unpickled it; the bytes live as long as tensors over them.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32):
        file = os.memfd_create("fedcomp", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, file)
        os.ftruncate(file, max(1, math.prod(shape) * dtype.itemsize))
        self.path = f"/proc/{os.getpid()}/fd/{file}"
        self.tensor = _mapped(self.path, shape, dtype)

    @classmethod
    def copy_of(cls, tensor: Tensor) -> Self:
        shared = cls(tuple(tensor.shape), tensor.dtype)
        shared.tensor.copy_(tensor)
        return shared

    def __reduce__(self) -> tuple:
        return _mapped, (self.path, tuple(self.tensor.shape), self.tensor.dtype)


def _mapped(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    raw = np.memmap(path, np.uint8, "r+")
    return torch.from_numpy(raw[: math.prod(shape) * dtype.itemsize]).view(dtype).view(shape)
