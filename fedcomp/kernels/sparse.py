"""Adding what few coordinates a frame holds to a dense vector."""

import numpy as np
import torch
from torch import Tensor

from . import backend


def add_at(into: Tensor, positions: np.ndarray, values: np.ndarray, weight: float) -> None:
    """into[positions] += weight·values: into is a contiguous float32 [n] on any device, positions int64, ascending, values float32.

    The product is rounded to float32, then the sum: the same bits on every device. The cost grows with the positions, not
    with n. Raises IndexError, and changes nothing, if a position is not in 0..n−1.
    """
    if not positions.size:
        return
    if not 0 <= positions.item(0) <= positions.item(-1) < into.numel():
        raise IndexError(f"positions {positions[0]}..{positions[-1]} do not fit a vector of {into.numel()}")
    if into.device.type != "cpu":
        at = torch.from_numpy(positions).to(into.device)
        into[at] += torch.from_numpy(np.float32(weight) * values).to(into.device)
        return
    dense = (into.detach() if into.requires_grad else into).numpy()
    if backend.compile_positions(positions.size):
        from . import loops

        loops.add_at(dense, positions, values, np.float32(weight))
    else:
        dense[positions] += np.float32(weight) * values
