"""Tensors in memory that processes share. It has no name in any file system: it is gone when the last process that maps it is."""

import itertools
import math
import mmap
import os
import weakref
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

Ref = list  # [region, offset in bytes, dtype, shape]: a tensor, as one process names it to another


class Region:
    """Bytes that are mapped here. `file` is the descriptor that another process maps them by."""

    def __init__(self, name: int, size: int, file: int | None = None):
        self.name, self.size = name, max(size, 1)
        self.file = os.memfd_create("fedcomp", os.MFD_CLOEXEC) if file is None else file
        if file is None:
            os.ftruncate(self.file, self.size)
        self._map = mmap.mmap(self.file, self.size)
        self._lent: list[weakref.ref] = []
        self._close = weakref.finalize(self, os.close, self.file)

    @property
    def free(self) -> bool:
        """Whether no tensor over these bytes is left in this process."""
        return all(ref() is None for ref in self._lent)

    def tensor(self, shape: Iterable[int], dtype: torch.dtype, offset: int = 0) -> Tensor:
        shape = tuple(shape)
        raw = np.frombuffer(self._map, np.uint8, math.prod(shape) * dtype.itemsize, offset)
        self._lent = [ref for ref in self._lent if ref() is not None] + [weakref.ref(raw)]
        return torch.from_numpy(raw).view(dtype).view(shape)

    def close(self) -> None:
        """Give the descriptor back; the bytes stay for as long as tensors are over them."""
        self._close()


class Pool:
    """The regions of a process that makes them for others."""

    def __init__(self) -> None:
        self.regions: dict[int, Region] = {}
        self._names = itertools.count()

    def new(self, size: int) -> Region:
        region = Region(next(self._names), size)
        self.regions[region.name] = region
        return region

    def lend(
        self, region: Region | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Region, Tensor]:
        """A tensor in `region` if it is large enough and free, else in a new one, which takes its place."""
        size = math.prod(shape) * dtype.itemsize
        if region is None or region.size < size or not region.free:
            if region is not None:
                self.drop(region)
            region = self.new(size)
        return region, region.tensor(shape, dtype)

    def drop(self, region: Region) -> None:
        self.regions.pop(region.name, None)
        region.close()


def ref(region: Region, shape: Iterable[int], dtype: torch.dtype, offset: int = 0) -> Ref:
    return [region.name, offset, str(dtype).removeprefix("torch."), list(shape)]


def opened(regions: dict[int, Region], named: Ref) -> Tensor:
    """The tensor that another process names."""
    region, offset, dtype, shape = named
    return regions[region].tensor(shape, getattr(torch, dtype), offset)
