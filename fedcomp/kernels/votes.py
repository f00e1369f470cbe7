"""One-bit votes, tallied as they are packed.

A vote is ±1 in each of n coordinates, sent as bits (kernels/bits.py): 1 for positive.

    majority_i = 1  where  2·ones_i > m,   the coin of (seed, i)  where  2·ones_i = m

A tie needs no case of its own: where m is even the coin is one more voter. All who know the seed toss the same coins.

m votes, at least one, come as a sequence of buffers (bytes, memoryviews, arrays, the words of an update that is `Bits`), each of ⌈n/8⌉
bytes and perhaps zeros up to a whole word; or as a uint8 tensor [m, ⌈n/8⌉] on any device. Packed results are likewise arrays in main
memory, or tensors on that device. Bits past the last coordinate are zero, in votes and in results. Every function raises FrameError for a
vote of another size or with other bits there, and ValueError where there is none.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ..errors import FrameError
from . import bits, bitsliced_counter, philox
from .parallel import map_ranges

TIES = 4  # stream of the coins for ties
BLOCK = (
    1 << 17
)  # bytes of each vote that are tallied at a time, so that the digits of their counts stay near the processor

Array = TypeVar("Array", np.ndarray, Tensor)
Vote = bytes | memoryview | np.ndarray
Votes = Sequence[Vote] | Tensor


def majority(votes: Votes, numel: int, seed: int) -> np.ndarray | Tensor:
    """What more voted for in each coordinate, where equally many the coin of (seed, coordinate): packed, uint8 [⌈numel/8⌉].

    `kernels.Signs(result, numel, lr).values()` is ±lr.
    """
    held = _opened(votes, numel)
    if len(held) % 2 == 0:
        tossed = coins(seed, numel)
        held.append(
            torch.from_numpy(tossed).to(held[0].device) if isinstance(votes, Tensor) else tossed
        )
    return _at_least(held, numel, len(held) // 2 + 1)


def at_least(votes: Votes, numel: int, count: int) -> np.ndarray | Tensor:
    """Where `count` or more voted 1: packed, uint8 [⌈numel/8⌉]."""
    return _at_least(_opened(votes, numel), numel, count)


def coins(seed: int, numel: int) -> np.ndarray:
    """The coins for ties: packed, uint8 [⌈numel/8⌉]. Coin i is bit i of the words that kernels/philox.py draws for (seed, TIES)."""
    words = np.empty((numel + 31) // 32, bits.WORD)

    def work(start: int, stop: int) -> None:
        first, last = start // 32, (stop + 31) // 32
        words[first:last] = philox.words(seed, last - first, first, TIES)

    map_ranges(numel, work)
    return _trimmed(words.view(np.uint8)[: (numel + 7) // 8], numel)


def counts(votes: Votes, numel: int) -> np.ndarray:
    """How many voted 1 in each coordinate: [numel], of the smallest unsigned type that holds m."""
    held = _opened(votes, numel)
    out = np.zeros(numel, np.min_scalar_type(len(held)))

    def use(start: int, digits: list[np.ndarray]) -> None:
        into = out[start : start + 8 * digits[0].size]
        for place, digit in enumerate(digits):
            into |= np.unpackbits(digit, count=into.size).astype(
                out.dtype, copy=False
            ) << out.dtype.type(place)

    _tally(held, numel, use)
    return out


def margins(votes: Votes, numel: int) -> np.ndarray:
    """By how many votes each coordinate was won, |2·ones − m|, 0 for a tie: [numel], typed like `counts`."""
    ones = counts(votes, numel)
    rest = ones.dtype.type(len(votes)) - ones
    return np.maximum(ones, rest) - np.minimum(ones, rest)


def disagreement(
    votes: Votes, result: Vote | Tensor, numel: int, wide: int
) -> tuple[np.ndarray, np.ndarray]:
    """In how many coordinates each voter was against the packed `result`, and in how many of these the margin was ≥ `wide`, from 1 up.

    Two int64 arrays [m]. The margin is that of the votes given, |2·ones − m|, whatever the result is. Lost coins count in the first.
    """
    held = _opened(votes, numel)
    (won,) = _opened(result[None] if isinstance(result, Tensor) else [result], numel)
    high, low = (
        (len(held) + wide + 1) // 2,
        (len(held) - wide) // 2 + 1,
    )  # a margin is wide from `high` ones up, and below `low`
    if isinstance(votes, Tensor):
        digits = bitsliced_counter.digits(held)
        far = bitsliced_counter.at_least(digits, high) | ~bitsliced_counter.at_least(digits, low)
        lost, widely = bitsliced_counter.unlike(held, won, far)
        return lost, widely

    def work(start: int, stop: int) -> np.ndarray:
        found = np.zeros((2, len(held)), np.int64)
        for a, b in _blocks(start, stop):
            rows = [row[a:b] for row in held]
            digits = bitsliced_counter.digits(rows)
            far = bitsliced_counter.at_least(digits, high) | ~bitsliced_counter.at_least(
                digits, low
            )
            found += bitsliced_counter.unlike(rows, won[a:b], far)
        return found

    lost, widely = sum(map_ranges(numel, work))
    return lost, widely


def pack(votes: Array) -> Array:
    """The rows of bits of votes [m, n], array or tensor of any numbers, 1 for positive: uint8 [m, ⌈n/8⌉], where they are."""
    if isinstance(votes, Tensor):
        return bits._pack_torch(votes > 0)
    return np.packbits(votes > 0, axis=1)


def _opened(votes: Votes, numel: int) -> list:
    """Each vote as uint8 [⌈numel/8⌉]: a row of the tensor, or a view of the buffer."""
    size, spare = (numel + 7) // 8, (1 << -numel % 8) - 1
    if len(votes) == 0:
        raise ValueError("a tally needs at least one vote")
    if isinstance(votes, Tensor):
        if votes.dtype is not torch.uint8 or votes.dim() != 2 or votes.shape[1] != size:
            raise FrameError(
                f"votes are {votes.dtype} {list(votes.shape)}; packed, of {numel} coordinates, they are uint8 [m, {size}]"
            )
        held = list(votes)
        strange = size > 0 and bool((votes[:, -1] & spare).any())
    else:
        raw = [
            np.frombuffer(
                np.ascontiguousarray(vote) if isinstance(vote, np.ndarray) else vote, np.uint8
            )
            for vote in votes
        ]
        if odd := [r.size for r in raw if not size <= r.size < size + 8]:
            raise FrameError(
                f"a vote of {odd[0]} bytes does not have {numel} coordinates; the frame is damaged or of another size"
            )
        held = [r[:size] for r in raw]
        strange = any(r[size:].any() or (size > 0 and r[size - 1] & spare) for r in raw)
    if strange:
        raise FrameError(
            "the bits of a vote past its last coordinate are not zero; the frame is damaged"
        )
    return held


def _at_least(held: list, numel: int, count: int) -> np.ndarray | Tensor:
    if isinstance(held[0], Tensor):
        return _trimmed(bitsliced_counter.at_least(bitsliced_counter.digits(held), count), numel)
    out = np.empty((numel + 7) // 8, np.uint8)

    def work(start: int, stop: int) -> None:
        for a, b in _blocks(start, stop):
            digits = bitsliced_counter.digits(row[a:b] for row in held)
            out[a:b] = bitsliced_counter.at_least(digits, count)

    map_ranges(numel, work)
    return _trimmed(out, numel)


def _tally(held: list, numel: int, use: Callable[[int, list[np.ndarray]], object]) -> list:
    """use(first coordinate, digits of the counts) for every block, in main memory; the results in order."""
    rows = [vote.cpu().numpy() for vote in held] if isinstance(held[0], Tensor) else held

    def work(start: int, stop: int) -> list:
        return [
            use(8 * a, bitsliced_counter.digits(row[a:b] for row in rows))
            for a, b in _blocks(start, stop)
        ]

    return [result for results in map_ranges(numel, work) for result in results]


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The bytes of coordinates start..stop-1, block by block."""
    first, last = start // 8, (stop + 7) // 8
    return ((a, min(a + BLOCK, last)) for a in range(first, last, BLOCK))


def _trimmed(packed: Array, numel: int) -> Array:
    """The same memory, with zeros past the last coordinate."""
    if numel % 8:
        packed[-1:] &= 256 - (1 << -numel % 8)
    return packed
