"""One-bit votes, tallied as they are packed.

A vote is ±1 in each of n coordinates, sent as bits (kernels/bits.py): 1 for positive.

    majority_i = 1  where  2·ones_i > m,   the coin of (seed, i)  where  2·ones_i = m

A tie needs no case of its own: where m is even the coin is one more voter. Everyone who knows the seed gets the same coins.

m votes, at least one, come as a sequence of buffers (bytes, memoryviews, arrays), each of ⌈n/8⌉ bytes. Bits past the last coordinate are
zero, in votes and in results. Every function raises FrameError for a vote of another size or with other bits there, and ValueError where
there is none.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from . import bits, bitsliced_counter, philox
from .parallel import map_ranges

TIES = 4  # stream of the coins for ties
BLOCK = 1 << 17  # bytes of each vote that are tallied together, near the processor

Vote = bytes | memoryview | np.ndarray
Votes = Sequence[Vote]


def majority(votes: Votes, numel: int, seed: int) -> np.ndarray:
    """Return the majority in each coordinate, of a tie the coin of (seed, coordinate): packed, uint8 [⌈numel/8⌉].

    `kernels.Signs(result, numel, lr).values()` is ±lr.
    """
    held = _opened(votes, numel)
    if len(held) % 2 == 0:
        held.append(coins(seed, numel))
    out = np.empty((numel + 7) // 8, np.uint8)

    def work(start: int, stop: int) -> None:
        for a, b in _blocks(start, stop):
            digits = bitsliced_counter.digits(row[a:b] for row in held)
            out[a:b] = bitsliced_counter.at_least(digits, len(held) // 2 + 1)

    map_ranges(numel, work)
    return out


def coins(seed: int, numel: int) -> np.ndarray:
    """Return the coins for ties: packed, uint8 [⌈numel/8⌉]. Coin i is bit i of the words that kernels/philox.py draws for (seed, TIES)."""
    words = np.empty((numel + 31) // 32, bits.WORD)

    def work(start: int, stop: int) -> None:
        first, last = start // 32, (stop + 31) // 32
        words[first:last] = philox.words(seed, last - first, first, TIES)

    map_ranges(numel, work)
    packed = words.view(np.uint8)[: (numel + 7) // 8]
    if numel % 8:
        packed[-1] &= 256 - (1 << -numel % 8)
    return packed


def disagreement(
    votes: Votes, result: Vote, numel: int, wide: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return in how many coordinates each voter lost to the packed `result`, and in how many of these the margin was ≥ `wide`, from 1 up.

    Two int64 arrays [m]. The margin is that of the votes given, |2·ones − m|, whatever the result is. Lost coins count in the first.
    """
    held = _opened(votes, numel)
    (won,) = _opened([result], numel)
    # A margin is wide from `high` ones up, and below `low`.
    high, low = (len(held) + wide + 1) // 2, (len(held) - wide) // 2 + 1

    def work(start: int, stop: int) -> np.ndarray:
        found = np.zeros((2, len(held)), np.int64)
        for a, b in _blocks(start, stop):
            rows = [row[a:b] for row in held]
            digits = bitsliced_counter.digits(rows)
            above, below = (bitsliced_counter.at_least(digits, count) for count in (high, low))
            far = above | ~below
            lost = [row ^ won[a:b] for row in rows]
            found += [_ones(one) for one in lost], [_ones(one & far) for one in lost]
        return found

    lost, widely = sum(map_ranges(numel, work))
    return lost, widely


def pack(votes: np.ndarray | Tensor) -> np.ndarray:
    """The rows of bits of votes [m, n], array or tensor of any numbers, 1 for positive: uint8 [m, ⌈n/8⌉]."""
    if isinstance(votes, Tensor):
        return bits._pack_torch(votes > 0).cpu().numpy()
    return np.packbits(votes > 0, axis=1)


def _opened(votes: Votes, numel: int) -> list[np.ndarray]:
    """Each vote as uint8 [⌈numel/8⌉], a view of the buffer."""
    if len(votes) == 0:
        raise ValueError("a tally needs at least one vote")
    return [
        bits.read_bits(
            memoryview(np.ascontiguousarray(v)) if isinstance(v, np.ndarray) else v, numel
        )
        for v in votes
    ]


def _ones(packed: np.ndarray) -> int:
    """Return the number of bits that are 1, counted by words of 64 bits."""
    whole = packed.size // 8 * 8
    parts = packed[:whole].view(np.uint64), packed[whole:]
    return sum(int(np.bitwise_count(part).sum(dtype=np.int64)) for part in parts)


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The bytes of coordinates start..stop-1, block by block."""
    first, last = start // 8, (stop + 7) // 8
    return ((a, min(a + BLOCK, last)) for a in range(first, last, BLOCK))
