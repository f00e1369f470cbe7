"""Count Sketch: a vector as a table of a few rows, in which sums of vectors are sums of tables.

Charikar, Chen, Farach-Colton: Finding frequent items in data streams. ICALP 2002.

    S[r, h_r(i)] += s_r(i)·x_i       estimate of x_i: the median over r of s_r(i)·S[r, h_r(i)]

h and s come from word i of the seed's stream r (kernels/philox.py), in integers: they are the same everywhere, and no table of them is
kept. The bucket is the word's place among `columns` equal parts of 0..2³²−1, the sign its lowest bit. The number of rows is odd, so that
the median is one of the cells. A vector is copied to the CPU and summed in float32 from its beginning; a long one is summed in two
halves, which are then added. Values at given positions are summed in float64.
"""

import numpy as np
import torch
from torch import Tensor

from . import philox
from .parallel import map_ranges, pieces, starmap

STREAM = 1 << 16  # of row 0; row r has the stream r behind it
HALVED = 1 << 20  # elements of a vector from which it is summed in halves
UNIT = 1024  # elements whose words are drawn together; halves and ranges begin at multiples
BLOCK = 1 << 13  # elements that are summed together in float64
LARGEST = np.finfo(np.float32).max


def sketch(x: Tensor, rows: int, columns: int, seed: int) -> np.ndarray:
    """The cells of a finite x [n], of any float dtype, on any device: float32 [rows, columns]. What float32 cannot hold is cut."""
    x = x.detach().cpu()
    middle = x.numel() // 2 // UNIT * UNIT if x.numel() >= HALVED else 0
    spans = [(0, middle), (middle, x.numel())] if middle else [(0, x.numel())]
    parts = np.zeros((len(spans), rows, columns), np.float32)
    calls = [
        (x, *span, seed, r, parts[half, r]) for half, span in enumerate(spans) for r in range(rows)
    ]
    starmap(_sum, calls)
    with np.errstate(over="ignore", invalid="ignore"):
        cells = parts[0] if len(spans) == 1 else parts[0] + parts[1]
    return cells if np.isfinite(cells).all() else _cut(_wide(x, rows, columns, seed))


def sketch_at(
    positions: np.ndarray, values: np.ndarray, rows: int, columns: int, seed: int
) -> np.ndarray:
    """The cells of a vector that is zero but for values, float32, at positions, int64: float32 [rows, columns]."""
    cells = np.zeros((rows, columns), np.float64)
    for r, (buckets, negative) in enumerate(places(positions, rows, columns, seed)):
        np.add.at(cells[r], buckets, np.where(negative, -values, values))
    return _cut(cells)


def estimates(cells: np.ndarray, seed: int, start: int, stop: int) -> np.ndarray:
    """Coordinates start..stop−1 as cells [rows, columns] tell them: float32."""
    from . import sketch_loops

    first = start // UNIT * UNIT  # loops begin where a block of words does
    found, (low, high) = np.empty(stop - first, np.float32), philox.halves(seed)

    def work(a: int, b: int) -> None:
        sketch_loops.estimate(cells, None, first + a, low, high, STREAM, found[a:b])

    map_ranges(found.size, work, UNIT)
    return found[start - first :]


def estimates_at(cells: np.ndarray, positions: np.ndarray, seed: int) -> np.ndarray:
    """The coordinates at positions, int64 [k]: float32 [k]."""
    from . import sketch_loops

    found = np.empty(positions.size, np.float32)
    sketch_loops.estimate(cells, positions, 0, *philox.halves(seed), STREAM, found)
    return found


def places(
    positions: np.ndarray, rows: int, columns: int, seed: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each row the buckets of positions, int64 [k], and whether their sign is negative, bool [k]."""
    return [_split(philox.words_at(seed, positions, STREAM + r), columns) for r in range(rows)]


def _sum(x: Tensor, start: int, stop: int, seed: int, row: int, cells: np.ndarray) -> None:
    """Add x[start:stop] to the cells [columns] of a row."""
    from . import sketch_loops

    for piece in pieces(x, start, stop):
        sketch_loops.add(piece, start, *philox.halves(seed), STREAM + row, cells)
        start += piece.size


def _wide(x: Tensor, rows: int, columns: int, seed: int) -> np.ndarray:
    """The cells in float64, where no sum is too large."""
    cells = np.zeros((rows, columns), np.float64)
    for start in range(0, x.numel(), BLOCK):
        piece = x[start : start + BLOCK].to(torch.float64).numpy()
        for r in range(rows):
            buckets, negative = _split(philox.words(seed, piece.size, start, STREAM + r), columns)
            np.add.at(cells[r], buckets, np.where(negative, -piece, piece))
    return cells


def _cut(cells: np.ndarray) -> np.ndarray:
    return cells.clip(-LARGEST, LARGEST).astype(np.float32)


def _split(words: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Buckets, int64, and whether the sign is negative, bool."""
    return (words.astype(np.uint64) * np.uint64(columns) >> np.uint64(32)).astype(np.int64), (
        words & np.uint32(1)
    ).astype(np.bool_)
