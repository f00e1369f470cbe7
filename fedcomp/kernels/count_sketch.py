"""Count Sketch: a linear map from a vector to a small table, from which the coordinates of the vector can be estimated.

Charikar, Chen and Farach-Colton, "Finding frequent items in data streams", ICALP 2002.

In each row r of the table S, every coordinate i has a random cell h_r(i), called its bucket, and a random sign s_r(i):

    S[r, h_r(i)] += s_r(i)·x_i
    estimate of x_i = median over r of s_r(i)·S[r, h_r(i)]

In row r, coordinate i uses word i of the random stream STREAM + r (kernels/philox.py). Its bucket is ⌊word·columns/2³²⌋, and its sign is
negative if the lowest bit of the word is 1. The number of rows is odd, so the median is the value of one row. The cells of a dense vector
are summed in float32, on the CPU and in the order of the coordinates (separately for the two halves of a large vector). The cells of a
sparse vector are summed in float64.
"""

import numpy as np
import torch
from torch import Tensor

from . import philox
from .parallel import map_ranges, pieces, starmap

STREAM = 1 << 16  # index of the random stream for row 0; row r uses stream STREAM + r
HALVED = 1 << 20  # a vector with at least this many elements is sketched in two halves, in parallel
# Number of random words that are drawn at a time. Parts of a vector start at multiples of UNIT.
UNIT = 1024
LARGEST = np.finfo(np.float32).max


def sketch(x: Tensor, rows: int, columns: int, seed: int) -> np.ndarray:
    """Return the sketch, float32 [rows, columns], of a finite x [n], of any float dtype, on any device.

    Cells are clipped to the range of float32.
    """
    x = x.detach().cpu()
    middle = x.numel() // 2 // UNIT * UNIT if x.numel() >= HALVED else 0
    spans = [(0, middle), (middle, x.numel())] if middle else [(0, x.numel())]
    parts = np.zeros((len(spans), rows, columns), np.float32)
    both = [(half, r) for half in range(len(spans)) for r in range(rows)]
    starmap(_sum, [(x, *spans[half], seed, r, parts[half, r]) for half, r in both])
    with np.errstate(over="ignore", invalid="ignore"):
        cells = parts[0] if len(spans) == 1 else parts[0] + parts[1]
    if np.isfinite(cells).all():
        return cells
    # A sum overflowed, so all sums are computed again, in float64.
    values = x.to(torch.float32).numpy()
    return sketch_at(np.arange(values.size), values, rows, columns, seed)


def sketch_at(
    positions: np.ndarray, values: np.ndarray, rows: int, columns: int, seed: int
) -> np.ndarray:
    """Return the sketch, float32 [rows, columns], of a sparse vector with float32 `values` at int64 `positions`."""
    cells = np.zeros((rows, columns), np.float64)
    for r, (buckets, negative) in enumerate(buckets_and_signs(positions, rows, columns, seed)):
        np.add.at(cells[r], buckets, np.where(negative, -values, values))
    return cells.clip(-LARGEST, LARGEST).astype(np.float32)


def estimates(cells: np.ndarray, numel: int, seed: int) -> np.ndarray:
    """Return float32 estimates [numel] of all coordinates from a sketch `cells` [rows, columns]."""
    from . import sketch_loops

    out, (low, high) = np.empty(numel, np.float32), philox.halves(seed)

    def work(start: int, stop: int) -> None:
        sketch_loops.estimate(cells, None, start, low, high, STREAM, out[start:stop])

    map_ranges(numel, work, UNIT)
    return out


def estimates_at(cells: np.ndarray, positions: np.ndarray, seed: int) -> np.ndarray:
    """Return float32 estimates [k] of the coordinates at `positions`, int64 [k], from a sketch."""
    from . import sketch_loops

    out = np.empty(positions.size, np.float32)
    sketch_loops.estimate(cells, positions, 0, *philox.halves(seed), STREAM, out)
    return out


def buckets_and_signs(
    positions: np.ndarray, rows: int, columns: int, seed: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each row, return the buckets of `positions`, int64 [k], and whether their signs are negative, bool [k]."""
    words = [philox.words_at(seed, positions, STREAM + r) for r in range(rows)]
    buckets = [(own.astype(np.uint64) * np.uint64(columns) >> np.uint64(32)) for own in words]
    return [(at.astype(np.int64), (own & 1).astype(np.bool_)) for at, own in zip(buckets, words)]


def _sum(x: Tensor, start: int, stop: int, seed: int, row: int, cells: np.ndarray) -> None:
    """Add x[start:stop] to the cells [columns] of one row of a sketch."""
    from . import sketch_loops

    for piece in pieces(x, start, stop):
        sketch_loops.add(piece, start, *philox.halves(seed), STREAM + row, cells)
        start += piece.size
