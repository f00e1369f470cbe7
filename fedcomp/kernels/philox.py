"""Random words by coordinate: a counter-based generator, the same on every device and in any order.

Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3. SC 2011. Philox4x32 with ten rounds.

Word i of a seed and a stream is word i mod 4 of the block with the counter (⌊i/4⌋ in its low two words, stream, 0) and the seed as
its key. A stream is a use: one seed may round values with stream 0 and toss coins for zeros with stream 1.
"""

import numpy as np

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85  # added to the key from round to round
ROUNDS = 10
LOW = np.uint64(0xFFFFFFFF)
PIECE = 1 << 12  # blocks that are drawn together, near the processor


def words(seed: int, count: int, start: int = 0, stream: int = 0) -> np.ndarray:
    """Words start..start+count-1 of a seed (64 bits) and a stream (32 bits): uint32 [count], uniform."""
    first, last = start // 4, (start + count + 3) // 4  # blocks
    made = np.empty((last - first, 4), np.uint32)
    for block in range(first, last, PIECE):
        numbers = np.arange(block, min(block + PIECE, last), dtype=np.uint64)
        made[block - first :][: numbers.size] = _blocks(*halves(seed), *_split(numbers), stream)
    return made.ravel()[start - 4 * first :][:count]


def words_at(seed: int, places: np.ndarray, stream: int = 0) -> np.ndarray:
    """The words of a seed and a stream at places, int64 [m], from 0 up: uint32 [m]."""
    made = np.empty(places.size, np.uint32)
    for start in range(0, places.size, PIECE):
        some = places[start : start + PIECE]
        blocks = _blocks(*halves(seed), *_split(some.astype(np.uint64) >> np.uint64(2)), stream)
        made[start : start + some.size] = blocks[np.arange(some.size), some & 3]
    return made


def halves(seed: int) -> tuple[int, int]:
    """The two words of a seed, the low one first."""
    return seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF


def _split(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two words of block numbers, the low one first."""
    return blocks & LOW, blocks >> np.uint64(32)


def _blocks(
    low: int, high: int, c0: np.ndarray, c1: np.ndarray, c2: int, c3: int = 0
) -> np.ndarray:
    """The blocks [m, 4] of counters c0, c1 [m], c2, c3; all 32 bits wide, held in uint64."""
    a, b, c, d = c0, c1, np.full_like(c0, c2), np.full_like(c0, c3)
    shift = np.uint64(32)
    for round in range(ROUNDS):
        keys = (
            np.uint64(key + round * step & 0xFFFFFFFF)
            for key, step in zip((low, high), WEYL, strict=True)
        )
        x, y = a * np.uint64(MULTIPLIERS[0]), c * np.uint64(MULTIPLIERS[1])
        a, b, c, d = (y >> shift) ^ b ^ next(keys), y & LOW, (x >> shift) ^ d ^ next(keys), x & LOW
    return np.stack([a, b, c, d], axis=1).astype(np.uint32)
