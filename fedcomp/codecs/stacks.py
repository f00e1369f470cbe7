"""Stacks that are more than a device has room to work on: halved where memory runs out, which is remembered for the device."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import ConfigError

T = TypeVar("T")

_most: dict[torch.device, int] = {}  # elements that were not too many


def in_pieces(work: Callable[[Tensor, slice], Sequence[T]], x: Tensor) -> list[T]:
    """What `work` makes of the rows of x [m, n], as many of them at a time as there is room for; it gets rows, and which they are.

    Raises ConfigError where there is no room for one.
    """
    made: list[T] = []
    while len(made) < len(x):
        room = max(1, _most.get(x.device, x.numel()) // max(1, x.shape[1]))
        rows = slice(len(made), min(len(made) + room, len(x)))
        found = _unless_full(work, x[rows], rows)
        if found is not None:
            made += found
        elif rows.stop - rows.start == 1:
            raise ConfigError(
                f"the memory of {x.device} does not hold the compression of one update of {x.shape[1]:,} elements; give "
                "--device cpu, or a codec that needs less, such as --uplink stc"
            )
        else:
            _most[x.device] = (rows.stop - rows.start) // 2 * x.shape[1]
    return made


def _unless_full(
    work: Callable[[Tensor, slice], Sequence[T]], x: Tensor, rows: slice
) -> Sequence[T] | None:
    try:
        return work(x, rows)
    except torch.cuda.OutOfMemoryError:
        return None
