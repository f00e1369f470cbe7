"""Stacks of vectors: the rows of a tensor [m, n], or m separate tensors [n] of one type on one device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import backend

Rows = Tensor | Sequence[Tensor]


def stacked(rows: Rows) -> Tensor:
    """Return m ≥ 1 vectors as a tensor [m, n]; a tensor is returned as it is, and one vector is not copied."""
    if isinstance(rows, Tensor):
        return rows
    return torch.stack(tuple(rows)) if len(rows) > 1 else rows[0][None]


def are_large(rows: Rows, onto: Sequence[Tensor] | None = None) -> bool:
    """Return whether the vectors, and those of `onto`, go to the compiled loops, one by one."""
    return (
        len(rows) > 0
        and rows[0].device.type == "cpu"
        and backend.compile_vector(rows[0].numel())
        and all(total.is_contiguous() for total in onto or ())
    )
