"""The overwrite frame: current values at named coordinates, for a client that missed several broadcasts.

Unlike a codec's frame it replaces what it names instead of adding to it, so the weights end bit-identical to the
server's whatever order the missed broadcasts would have been added in.

    body   b, 1 byte; values as float32; gaps, Rice-coded with parameter b (kernels/rice.py)
"""

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..kernels import rice
from . import frame, selection
from .base import expect
from .frame import EMPTY, OVERWRITE, Section


def encode(weights: Tensor, positions: np.ndarray) -> bytes:
    """A frame of weights[positions]; weights [numel] float32, positions int64, ascending."""
    section = EMPTY
    if positions.size:
        b = rice.best_parameter(positions, weights.numel())
        values = weights[torch.from_numpy(positions).to(weights.device)].cpu().numpy()
        section = Section(
            positions.size,
            bytes([b]) + values.astype("<f4", copy=False).tobytes() + rice.pack(positions, b),
        )
    return frame.seal(OVERWRITE, frame.MODEL, weights.numel(), [section])


def least_bytes(count: int) -> int:
    """Return the fewest bytes that a frame of so many values takes."""
    return frame.SECTIONS + 1 + (1 + 4 * count + (count + 7) // 8 if count else 0)


def apply(data: bytes, weights: Tensor) -> None:
    """Write a frame's values into weights [numel], in place. Raises FrameError with the weights untouched."""
    _, ((_, (count, body)),) = frame.unseal(data, OVERWRITE, weights.numel())
    if not count:
        return
    first, rest = selection.take(memoryview(body), 1)
    sent, gaps = selection.take(rest, 4 * count)
    values = np.frombuffer(sent, "<f4")
    expect(kernels.all_finite(values), "an overwrite section holds NaN or infinity")
    positions = rice.unpack(gaps, count, first[0], weights.numel())
    weights[torch.from_numpy(positions).to(weights.device)] = torch.from_numpy(
        values.astype(np.float32)
    ).to(weights.device)
