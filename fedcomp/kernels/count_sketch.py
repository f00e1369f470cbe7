"""Count Sketch: a vector as a table of a few rows, in which sums of vectors are sums of tables.

Charikar, Chen, Farach-Colton: Finding frequent items in data streams. ICALP 2002.

    S[r, h_r(i)] += s_r(i)·x_i       estimate of x_i: the median over r of s_r(i)·S[r, h_r(i)]

h and s come from word i of the seed's stream r (kernels/philox.py), in integers: they are the same everywhere, and no table of them is
kept. The bucket is the word's place among `columns` equal parts of 0..2³²−1, the sign its lowest bit. The number of rows is odd, so that
the median is one of the cells. A vector is copied to the CPU and summed in float32 from its beginning; a long one is summed in two
halves, which are then added. Values at given positions are summed in float64.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from . import backend, philox
from .parallel import map_ranges, pieces, starmap

STREAM = 1 << 16  # of row 0; row r has the stream r behind it
HALVED = 1 << 20  # elements of a vector from which it is summed in halves
UNIT = (
    1024  # elements whose words compiled loops draw together; halves and ranges begin at multiples
)
BLOCK = 1 << 13  # elements that numpy works on together
LARGEST = np.finfo(np.float32).max


def sketch(x: Tensor, rows: int, columns: int, seed: int) -> np.ndarray:
    """The cells of a finite x [n], of any float dtype, on any device: float32 [rows, columns]. What float32 cannot hold is cut."""
    x = x.detach()
    x = x.cpu()
    middle = x.numel() // 2 // UNIT * UNIT if x.numel() >= HALVED else 0
    spans = [(0, middle), (middle, x.numel())] if middle else [(0, x.numel())]
    parts = np.zeros((len(spans), rows, columns), np.float32)
    calls = [
        (x, *span, seed, r, parts[half, r]) for half, span in enumerate(spans) for r in range(rows)
    ]
    if backend.compile_vector(x.numel()):
        starmap(_sum_compiled, calls)
    else:
        for call in calls:
            _sum(*call)
    with np.errstate(over="ignore", invalid="ignore"):
        cells = parts[0] if len(spans) == 1 else parts[0] + parts[1]
    return cells if np.isfinite(cells).all() else _cut(_wide(x, rows, columns, seed))


def sketch_at(
    positions: np.ndarray, values: np.ndarray, rows: int, columns: int, seed: int
) -> np.ndarray:
    """The cells of a vector that is zero but for values, float32, at positions, int64: float32 [rows, columns]."""
    cells = np.zeros((rows, columns), np.float64)
    if backend.compile_positions(rows * positions.size):
        from . import sketch_loops

        for r in range(rows):
            sketch_loops.add(values, positions, 0, *philox.halves(seed), STREAM + r, cells[r])
    else:
        for r, (buckets, negative) in enumerate(places(positions, rows, columns, seed)):
            np.add.at(cells[r], buckets, np.where(negative, -values, values))
    return _cut(cells)


def estimates(cells: np.ndarray, seed: int, start: int, stop: int) -> np.ndarray:
    """Coordinates start..stop−1 as cells [rows, columns] tell them: float32."""
    found = np.empty(stop - start, np.float32)
    if backend.compile_vector(found.size):
        from . import sketch_loops

        first = min(stop, -(-start // UNIT) * UNIT)  # loops begin where a block of words does
        lead = first - start
        found[:lead] = _median(cells, _words(seed, len(cells), start, first))
        low, high = philox.halves(seed)
        map_ranges(
            found.size - lead,
            lambda a, b: sketch_loops.estimate(
                cells, None, first + a, low, high, STREAM, found[lead + a : lead + b]
            ),
            UNIT,
        )
        return found
    for a in range(start, stop, BLOCK):
        b = min(a + BLOCK, stop)
        found[a - start : b - start] = _median(cells, _words(seed, len(cells), a, b))
    return found


def estimates_at(cells: np.ndarray, positions: np.ndarray, seed: int) -> np.ndarray:
    """The coordinates at positions, int64 [k]: float32 [k]."""
    if not backend.compile_positions(len(cells) * positions.size):
        return _median(
            cells, [philox.words_at(seed, positions, STREAM + r) for r in range(len(cells))]
        )
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
    for first in range(start, stop, BLOCK):
        piece = x[first : min(first + BLOCK, stop)].to(torch.float32).numpy()
        buckets, negative = _split(philox.words(seed, piece.size, first, STREAM + row), cells.size)
        with np.errstate(over="ignore", invalid="ignore"):
            np.add.at(cells, buckets, np.where(negative, -piece, piece))


def _sum_compiled(x: Tensor, start: int, stop: int, seed: int, row: int, cells: np.ndarray) -> None:
    """`_sum`, by numba."""
    from . import sketch_loops

    for piece in pieces(x, start, stop):
        sketch_loops.add(piece, None, start, *philox.halves(seed), STREAM + row, cells)
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


def _words(seed: int, rows: int, start: int, stop: int) -> list[np.ndarray]:
    """For each row the words of coordinates start..stop−1."""
    return [philox.words(seed, stop - start, start, STREAM + r) for r in range(rows)]


def _median(cells: np.ndarray, words: Sequence[np.ndarray]) -> np.ndarray:
    """What cells [rows, columns] tell of coordinates with these words in each row."""
    rows, columns = cells.shape
    found = np.empty((rows, words[0].size), np.float32)
    for r, (buckets, negative) in enumerate(_split(drawn, columns) for drawn in words):
        found[r] = np.where(negative, -cells[r, buckets], cells[r, buckets])
    for last in range(
        rows - 1, 0, -1
    ):  # neighbours are exchanged: faster than a sort along so short an axis
        for r in range(last):
            found[r], found[r + 1] = (
                np.minimum(found[r], found[r + 1]),
                np.maximum(found[r], found[r + 1]),
            )
    return found[rows // 2] + np.float32(0)  # no −0


def _split(words: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Buckets, int64, and whether the sign is negative, bool."""
    return (words.astype(np.uint64) * np.uint64(columns) >> np.uint64(32)).astype(np.int64), (
        words & np.uint32(1)
    ).astype(np.bool_)
