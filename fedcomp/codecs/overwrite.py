"""The overwrite frame contains current weights of the server's model. The server sends it to a client that missed several broadcasts.

A broadcast usually is the frame of a codec. It contains an update, which the client adds to its weights. An overwrite frame contains the
current values and the positions of the weights that changed since the client's version of the model. The client replaces these weights. All
its weights then have the same bits as the server's.
"""

import numpy as np
import torch
from torch import Tensor

from ..kernels import rice
from . import floats, frame, selection
from .frame import EMPTY, OVERWRITE, Section


def min_bytes(count: int) -> int:
    """Return the smallest possible size in bytes of an overwrite frame with `count` weights."""
    return frame.SECTIONS + 1 + (1 + 4 * count + (count + 7) // 8 if count else 0)


def encode(weights: Tensor, positions: np.ndarray) -> bytes:
    """Return an overwrite frame that contains the weights at the given positions.

    `weights` [numel]: float32. `positions`: int64, ascending.
    """
    section = EMPTY
    if positions.size:
        b = rice.best_parameter(positions, weights.numel())
        values = weights[torch.from_numpy(positions).to(weights.device)].cpu().numpy()
        sent = bytes([b]) + floats.pack(values, floats.FP32) + rice.pack(positions, b)
        section = Section(positions.size, sent)
    return frame.seal(OVERWRITE, frame.MODEL, weights.numel(), [section])


def apply(data: bytes, weights: Tensor) -> None:
    """Write the weights in an overwrite frame into `weights` [numel], in place.

    If the frame is invalid, raises FrameError and leaves `weights` unchanged.
    """
    _, ((_, (count, body)),) = frame.unseal(data, OVERWRITE, weights.numel())
    if not count:
        return
    first, rest = selection.take(memoryview(body), 1)
    values, used = floats.unpack(rest, count, floats.FP32)
    positions = rice.unpack(rest[used:], count, first[0], weights.numel())
    new = torch.from_numpy(values.astype(np.float32)).to(weights.device)
    weights[torch.from_numpy(positions).to(weights.device)] = new
