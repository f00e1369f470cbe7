"""Stacks of vectors: the rows of a tensor [m, n], or m separate tensors [n] of one type on one device."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

LARGE = 100_000  # elements of a vector on the CPU from which each vector has its own thread

Rows = Tensor | Sequence[Tensor]


def stacked(rows: Rows) -> Tensor:
    """Return m ≥ 1 vectors as a tensor [m, n]. A tensor, and a single vector, are not copied."""
    if isinstance(rows, Tensor):
        return rows
    return torch.stack(tuple(rows)) if len(rows) > 1 else rows[0][None]


def are_large(rows: Rows) -> bool:
    """Return whether each of m ≥ 1 vectors is processed separately, on its own thread."""
    return rows[0].device.type == "cpu" and rows[0].numel() >= LARGE


def split_runs(values: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Return m runs of values that follow one another, counts [m] long, as views. Several times faster than np.split."""
    edges = [0, *counts.cumsum().tolist()]
    return [values[start:stop] for start, stop in pairwise(edges)]
