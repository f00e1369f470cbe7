"""Addition of sparse values to a dense vector."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from . import rice


def all_finite(values: np.ndarray) -> bool:
    """Return whether all elements of an array are finite."""
    return bool(np.isfinite(values).all())


def add_all_at(
    into: Tensor,
    positions: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    weights: Sequence[float],
) -> None:
    """Add sparse updates to a vector in place: for each update j, in order, add weights[j]·values[j] to into[positions[j]].

    `into`: contiguous float32 [n], on any device. Positions are int64, ascending. A product is rounded to float32 before it is added, so
    all devices compute the same bits. Raises IndexError, and changes nothing, if a position is not in 0..n−1.
    """
    numel, sizes = into.numel(), [at.size for at in positions]
    for at, size in zip(positions, sizes):
        if size and not 0 <= at.item(0) <= at.item(-1) < numel:
            raise IndexError(
                f"positions {at[0]}..{at[-1]} are out of range for a vector of {numel} elements"
            )
    if not any(sizes):
        return
    updates = zip(positions, values, weights, strict=True)
    if not into.is_cpu:
        for at, addends, weight in updates:
            product = torch.from_numpy(np.float32(weight) * addends)
            into[torch.from_numpy(at).to(into.device)] += product.to(into.device)
        return
    dense, loops = into.detach().numpy(), rice.loops(max(sizes))
    if loops is None:
        weighted = np.repeat(np.array(weights, np.float32), sizes)
        weighted *= np.concatenate(values)
        np.add.at(dense, np.concatenate(positions), weighted)
        return
    for at, addends, weight in updates:
        loops.add_at(dense, at, addends, weight)
