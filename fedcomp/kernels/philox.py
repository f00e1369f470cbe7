"""Philox: a counter-based random number generator. Each 32-bit word is computed independently, and is the same on every device.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The generator is Philox4x32 with ten rounds.

A seed has many streams, numbered sequences of words, one for each use of the seed: for example, stream 0 for stochastic rounding, and
stream 1 for the random signs that sign codecs send for zeros. Words are computed in blocks of four. For block j of a stream, the key of the
generator is the seed, and the counter is (low half of j, high half of j, stream, 0).
"""

import numpy as np

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85  # constants that are added to the key after each round
ROUNDS = 10
LOW = np.uint64(0xFFFFFFFF)
PIECE = 1 << 12  # number of blocks that are computed at a time, chosen to fit in the cache


def words(seed: int, count: int, start: int = 0, stream: int = 0) -> np.ndarray:
    """Return the random words start..start+count-1 of a 32-bit stream of a 64-bit seed, as uint32 [count]."""
    first, last = start // 4, (start + count + 3) // 4  # blocks
    out = np.empty((last - first, 4), np.uint32)
    for block in range(first, last, PIECE):
        numbers = np.arange(block, min(block + PIECE, last), dtype=np.uint64)
        out[block - first :][: numbers.size] = _blocks(*halves(seed), *_split(numbers), stream)
    return out.ravel()[start - 4 * first :][:count]


def words_at(seed: int, indices: np.ndarray, stream: int = 0) -> np.ndarray:
    """Return the random words, uint32 [m], at indices ≥ 0, int64 [m]."""
    out = np.empty(indices.size, np.uint32)
    for start in range(0, indices.size, PIECE):
        piece = indices[start : start + PIECE]
        blocks = _blocks(*halves(seed), *_split(piece.astype(np.uint64) >> np.uint64(2)), stream)
        out[start : start + piece.size] = blocks[np.arange(piece.size), piece & 3]
    return out


def sample(numel: int, count: int, seed: int, stream: int) -> np.ndarray:
    """Draw 0 ≤ `count` ≤ numel of the positions 0..numel-1 without replacement. Return them as int64, ascending.

    The sample consists of the first `count` distinct positions of a random sequence. Each position is a 64-bit random integer modulo numel,
    with a bias below numel·2⁻⁶⁴. If count > numel/2, the positions that are left out are drawn instead.
    """
    drawn, start = min(count, numel - count), 0
    marked = np.zeros(numel, np.bool_)
    while missing := drawn - int(np.count_nonzero(marked)):
        pairs = words(seed, 2 * missing, 2 * start, stream).astype(np.uint64)
        marked[(pairs[::2] | pairs[1::2] << np.uint64(32)) % np.uint64(numel)] = True
        start += missing
    return np.flatnonzero(marked if drawn == count else ~marked)


def halves(seed: int) -> tuple[int, int]:
    """Return the low and the high 32-bit half of a seed."""
    return seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF


def _split(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return blocks & LOW, blocks >> np.uint64(32)


def _blocks(
    low: int, high: int, c0: np.ndarray, c1: np.ndarray, c2: int, c3: int = 0
) -> np.ndarray:
    """Return the random blocks [m, 4] for a key (low, high) and counters (c0 [m], c1 [m], c2, c3)."""
    a, b, c, d = c0, c1, np.full_like(c0, c2), np.full_like(c0, c3)
    shift = np.uint64(32)
    for _ in range(ROUNDS):
        x, y = a * np.uint64(MULTIPLIERS[0]), c * np.uint64(MULTIPLIERS[1])
        a, b = (y >> shift) ^ b ^ np.uint64(low), y & LOW
        c, d = (x >> shift) ^ d ^ np.uint64(high), x & LOW
        low, high = low + WEYL[0] & 0xFFFFFFFF, high + WEYL[1] & 0xFFFFFFFF
    return np.stack([a, b, c, d], axis=1).astype(np.uint32)
