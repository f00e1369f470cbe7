"""Sparse values: checked, and added to a dense vector."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .bits import Signs

FEW = 1_000  # positions of each of many, below which they are added in one pass


def all_finite(values: np.ndarray) -> bool:
    """Return whether an array of float32 has no NaN and no infinity."""
    return bool(np.isfinite(values).all())


def add_at(into: Tensor, positions: np.ndarray, values: np.ndarray | Signs, weight: float) -> None:
    """into[positions] += weight·values: into is a contiguous float32 [n] on any device, positions int64, ascending, values float32.

    The product is rounded to float32, then the sum: the same bits on every device. The cost grows with the positions, not
    with n. Raises IndexError, and changes nothing, if a position is not in 0..n−1.
    """
    if not positions.size:
        return
    if not 0 <= positions.item(0) <= positions.item(-1) < into.numel():
        raise IndexError(
            f"positions {positions[0]}..{positions[-1]} do not fit a vector of {into.numel()}"
        )
    if not into.is_cpu:
        at = torch.from_numpy(positions).to(into.device)
        into[at] += torch.from_numpy(np.float32(weight) * _spread(values)).to(into.device)
        return
    dense = (into.detach() if into.requires_grad else into).numpy()
    dense[positions] += np.float32(weight) * _spread(values)


def add_all_at(
    into: Tensor,
    positions: Sequence[np.ndarray],
    values: Sequence[np.ndarray | Signs],
    weights: Sequence[float],
) -> None:
    """`add_at` of many, one after the other: those of few positions in one pass. Raises IndexError like it, before anything is changed."""
    sizes = [at.size for at in positions]
    if not into.is_cpu or max(sizes, default=0) >= FEW:
        for at, some, weight in zip(positions, values, weights, strict=True):
            add_at(into, at, some, weight)
    elif any(sizes):
        every = np.concatenate(positions)
        if not 0 <= every.min() <= every.max() < into.numel():
            raise IndexError(
                f"positions {every.min()}..{every.max()} do not fit a vector of {into.numel()}"
            )
        weighted = np.repeat(np.array(weights, np.float32), sizes) * np.concatenate(
            [_spread(run) for run in values]
        )
        np.add.at((into.detach() if into.requires_grad else into).numpy(), every, weighted)


def _spread(values: np.ndarray | Signs) -> np.ndarray:
    return values.values() if isinstance(values, Signs) else values
