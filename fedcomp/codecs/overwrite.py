"""The overwrite frame. The server sends an overwrite frame to a client that missed several broadcasts. The frame contains the current
weights at the positions that changed.

The frame of a codec holds an update, which the client adds to its weights. An overwrite frame replaces weights, so the client's weights
become bit-identical to the server's.

Format of the body (see codecs/frame.py):

    the parameter of the Rice code, in one byte;
    the new weights, as float32;
    the positions of the weights, Rice-coded (kernels/rice.py).
"""

import numpy as np
import torch
from torch import Tensor

from ..kernels import rice
from . import floats, frame, selection
from .frame import EMPTY, OVERWRITE, Section


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
    """Write the values of an overwrite frame into `weights` [numel], in place.

    Raises FrameError if the frame is invalid; the weights are then unchanged.
    """
    _, ((_, (count, body)),) = frame.unseal(data, OVERWRITE, weights.numel())
    if not count:
        return
    first, rest = selection.take(memoryview(body), 1)
    values, used = floats.unpack(rest, count, floats.FP32)
    positions = rice.unpack(rest[used:], count, first[0], weights.numel())
    new = torch.from_numpy(values.astype(np.float32)).to(weights.device)
    weights[torch.from_numpy(positions).to(weights.device)] = new
