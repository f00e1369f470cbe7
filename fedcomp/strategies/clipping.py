"""Clipping of updates on the server.

    y = Σ w_i min(1, C/‖x_i‖₂) x_i / Σ w_i,  x_i the decoded update of client i

This is the norm bound of Sun, Kairouz, Suresh, McMahan: Can you really backdoor federated learning? 2019. In McMahan, Ramage, Talwar,
Zhang: Learning differentially private recurrent language models. ICLR 2018, clients clip before they send. The clipped part is lost: it
does not return to the client's memory, from which it would be sent again.
"""

import math

import numpy as np
import torch

from ..codecs import Update
from ..codecs.update import Sections, Sparse
from ..kernels.sums import sum_squares
from .blocks import BLOCK


def clip_factor(update: Update, max_norm: float) -> float:
    """Return min(1, max_norm/‖update‖₂)."""
    length = norm(update)
    return max_norm / length if length > max_norm else 1.0


def norm(update: Update) -> float:
    """Return ‖update‖₂. Infinite values count as the largest float32."""
    return math.sqrt(_sum_squares(update))


def _sum_squares(update: Update) -> float:
    if isinstance(update, Sections):
        return math.fsum(_sum_squares(part) for _, part in update.parts)
    if isinstance(update, Sparse):
        return _array_sum_squares(update.values)
    starts = range(0, update.numel, BLOCK)
    return math.fsum(
        _array_sum_squares(update.block(start, min(start + BLOCK, update.numel)))
        for start in starts
    )


def _array_sum_squares(values: np.ndarray) -> float:
    return sum_squares(torch.from_numpy(np.nan_to_num(values)))
