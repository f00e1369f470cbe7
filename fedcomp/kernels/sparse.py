"""Sparse values: checked, and added to a dense vector."""

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from . import rice
from .bits import Signs


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
    _add(rice.loops(positions.size), _array(into), positions, values, weight)


def add_all_at(
    into: Tensor,
    positions: Sequence[np.ndarray],
    values: Sequence[np.ndarray | Signs],
    weights: Sequence[float],
) -> None:
    """`add_at` of many, one after the other: those of few positions in one pass. Raises IndexError like it, before anything is changed."""
    sizes = [at.size for at in positions]
    if not into.is_cpu:
        for at, some, weight in zip(positions, values, weights, strict=True):
            add_at(into, at, some, weight)
        return
    dense = _array(into)
    ends = [at.item(i) for at, size in zip(positions, sizes) if size for i in (0, -1)]
    if not ends:
        return
    if not 0 <= min(ends) <= max(ends) < dense.size:
        raise IndexError(f"positions {min(ends)}..{max(ends)} do not fit a vector of {dense.size}")
    if loops := rice.loops(max(sizes)):
        for at, some, weight in zip(positions, values, weights, strict=True):
            _add(loops, dense, at, some, weight)
        return
    weighted = np.repeat(np.array(weights, np.float32), sizes)
    weighted *= np.concatenate([_spread(run) for run in values])
    np.add.at(dense, np.concatenate(positions), weighted)


def _add(
    loops: ModuleType | None,
    dense: np.ndarray,
    positions: np.ndarray,
    values: np.ndarray | Signs,
    weight: float,
) -> None:
    """`add_at` of a vector on the CPU, whose positions were checked."""
    if loops is None:
        dense[positions] += np.float32(weight) * _spread(values)
    elif isinstance(values, Signs):
        loops.add_signs_at(dense, positions, values.raw, values.magnitude, weight)
    else:
        loops.add_at(dense, positions, values, weight)


def _array(x: Tensor) -> np.ndarray:
    return (x.detach() if x.requires_grad else x).numpy()


def _spread(values: np.ndarray | Signs) -> np.ndarray:
    return values.values() if isinstance(values, Signs) else values
