"""Addition of sparse values to a dense vector."""

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from . import rice
from .bits import Signs


def all_finite(values: np.ndarray) -> bool:
    """Return whether a float32 array has neither NaN nor infinity."""
    return bool(np.isfinite(values).all())


def add_at(into: Tensor, positions: np.ndarray, values: np.ndarray | Signs, weight: float) -> None:
    """Add weight·values to into[positions] in place. `into`: contiguous float32 [n], on any device. `positions`: int64, ascending.

    The product is rounded to float32, and then the sum, so all devices compute the same bits. The time grows with the number of positions,
    not with n. Raises IndexError, with `into` unchanged, if a position is not in 0..n−1.
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
    """Call `add_at` for several updates in order; small updates are added in one pass. Raises IndexError with `into` unchanged."""
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
    """Implement `add_at` on the CPU, for checked positions."""
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
