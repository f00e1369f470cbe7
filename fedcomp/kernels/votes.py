"""Majority votes over packed bits.

A vote is ±1 in each of n coordinates, packed as bits (kernels/bits.py): 1 for positive. The majority of m votes in a coordinate is 1 if
more than m/2 votes are positive, and 0 if fewer than m/2 are positive. Random bits, which depend on the seed, break ties.

Each vote is a buffer (bytes, memoryview or array) of ⌈n/8⌉ bytes. Padding bits are zero in votes and in results. Functions raise FrameError
for a vote with the wrong size or padding, and ValueError if there are no votes.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from . import bits
from .parallel import map_ranges

TIE_STREAM = 4  # index of the random stream that breaks ties
BLOCK = 1 << 14  # number of bytes of each vote that are counted at a time, which fit in the cache

PackedSigns = bytes | memoryview | np.ndarray  # a vote or a result
Votes = Sequence[PackedSigns]


def majority(votes: Votes, numel: int, seed: int) -> np.ndarray:
    """Return the majority in each coordinate as packed bits, uint8 [⌈numel/8⌉]."""
    arrays = _as_arrays(votes, numel)
    if len(arrays) % 2 == 0:  # one more vote, of random bits, breaks ties
        arrays.append(bits.random_bits(seed, numel, TIE_STREAM))
    out = np.empty((numel + 7) // 8, np.uint8)

    def work(start: int, stop: int) -> None:
        for a, b in _blocks(start, stop):
            out[a:b] = np.packbits(_count([row[a:b] for row in arrays]) > len(arrays) // 2)

    map_ranges(numel, work)
    return out


def disagreement(
    votes: Votes, result: PackedSigns, numel: int, margin: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each of m votes, count the coordinates in which it differs from `result`.

    Return two int64 arrays [m]: the counts over all coordinates, and the counts over the coordinates whose margin is at least `margin` ≥ 1.
    If `ones` of the m votes are positive in a coordinate, its margin is |2·ones − m|.
    """
    arrays = _as_arrays(votes, numel)
    (won,) = _as_arrays([result], numel)
    # The margin is reached if at least `high` or fewer than `low` votes are positive.
    high, low = (len(arrays) + margin + 1) // 2, (len(arrays) - margin) // 2 + 1

    def work(start: int, stop: int) -> np.ndarray:
        counts = np.zeros((2, len(arrays)), np.int64)
        for a, b in _blocks(start, stop):
            rows = [row[a:b] for row in arrays]
            ones = _count(rows)
            far = np.packbits((ones >= high) | (ones < low))
            lost = [row ^ won[a:b] for row in rows]
            counts += [_ones(one) for one in lost], [_ones(one & far) for one in lost]
        return counts

    lost, by_margin = np.sum(map_ranges(numel, work), axis=0)
    return lost, by_margin


def pack(votes: np.ndarray | Tensor) -> np.ndarray:
    """Pack numbers [m, n] into bits, 1 for positive: uint8 [m, ⌈n/8⌉]."""
    if isinstance(votes, Tensor):
        return bits.pack_torch(votes > 0).cpu().numpy()
    return np.packbits(votes > 0, axis=1)


def _as_arrays(votes: Votes, numel: int) -> list[np.ndarray]:
    if len(votes) == 0:
        raise ValueError("a tally needs at least one vote")
    buffers = (np.ascontiguousarray(v).data if isinstance(v, np.ndarray) else v for v in votes)
    return [bits.read_bits(buffer, numel) for buffer in buffers]


def _count(votes: list[np.ndarray]) -> np.ndarray:
    """Return the number of positive votes in each coordinate."""
    ones = np.zeros(8 * votes[0].size, np.min_scalar_type(len(votes)))
    for vote in votes:
        ones += np.unpackbits(vote)
    return ones


def _ones(packed: np.ndarray) -> int:
    whole = packed.size // 8 * 8
    parts = packed[:whole].view(np.uint64), packed[whole:]
    return sum(int(np.bitwise_count(part).sum(dtype=np.int64)) for part in parts)


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Divide the bytes of the packed coordinates start..stop-1 into ranges of at most BLOCK bytes."""
    first, last = start // 8, (stop + 7) // 8
    return ((a, min(a + BLOCK, last)) for a in range(first, last, BLOCK))
