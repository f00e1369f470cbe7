"""The share of an update that a server takes whose norm is bounded.

    y = Σ w_i min(1, C/‖x_i‖₂) x_i / Σ w_i,  x_i what the frame of client i says

A server cannot see what a client trained, and clips what it sent: as the norm bound of Sun, Kairouz, Suresh, McMahan: Can you really
backdoor federated learning? 2019, and of McMahan, Ramage, Talwar, Zhang: Learning differentially private recurrent language models.
ICLR 2018, for which clients clip. What is cut off is lost: it does not return to the client's memory, where it would come again.
"""

import math

import numpy as np
import torch

from ..codecs import Update
from ..codecs.update import Sections, Sparse
from ..kernels.sums import sum_squares
from .blocks import BLOCK


def share(update: Update, largest: float) -> float:
    """Return min(1, largest/‖update‖₂)."""
    length = norm(update)
    return largest / length if length > largest else 1.0


def norm(update: Update) -> float:
    """Return ‖update‖₂: of a sparse update from its values alone, of others block by block. Values beyond float32 are read as its ends."""
    return math.sqrt(_squares(update))


def _squares(update: Update) -> float:
    if isinstance(update, Sections):
        return math.fsum(_squares(part) for _, part in update.parts)
    if isinstance(update, Sparse):
        return _of(update.values)
    starts = range(0, update.numel, BLOCK)
    return math.fsum(_of(update.block(start, min(start + BLOCK, update.numel))) for start in starts)


def _of(values: np.ndarray) -> float:
    return sum_squares(torch.from_numpy(np.nan_to_num(values)))
