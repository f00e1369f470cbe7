"""How many of m bits are 1, in each of n places side by side: 64 at a time, with adders made of logic operations.

The counts are held in binary, one row of bits for each binary digit ("bit-sliced"). A full adder takes three rows of one digit and leaves
one there and a carry for the next digit: five operations for a word of 64 (Harley & Seal; Warren: Hacker's Delight, 2nd ed. 2013, §5–2).

Arrays and tensors are treated alike; compiled loops take over where the vectors are large and in main memory.
"""

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from . import backend

AT_ONCE = 15  # rows that one pass of the compiled loops adds up: four digits

Array = TypeVar("Array", np.ndarray, Tensor)


class Rows:
    """m rows of packed bits, uint8 [n/8] each, in main memory."""

    def __init__(self, rows: list[np.ndarray]):
        self.rows, self.words = rows, None
        if backend.compile_vector(8 * rows[0].size):
            self.words = [_words(row) for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def at_least(
        self, count: int, start: int, stop: int, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Where `count` or more are 1, in bytes start..stop-1: packed, in `out` if it is given. `start` is a multiple of 8."""
        out = np.empty(stop - start, np.uint8) if out is None else out
        m, whole = len(self), stop // 8 * 8
        if self.words is None or whole <= start or not 0 < count <= m:
            out[:] = at_least(digits(row[start:stop] for row in self.rows), count)
            return out
        words = self._words(start, whole)
        if count <= 8 and m - count <= 7:
            from . import bitsliced_counter_loops

            # What is missing of fifteen rows is filled up so that `count` comes to eight, the highest of four digits.
            ones = bitsliced_counter_loops.full(words[0].size)
            zeros = bitsliced_counter_loops.empty(words[0].size)
            bitsliced_counter_loops.eight(
                *words,
                *[ones] * (8 - count),
                *[zeros] * (AT_ONCE - m - 8 + count),
                out[: whole - start].view(np.uint64),
            )
        else:
            top = max((count - 1).bit_length(), (m - count).bit_length(), 3)
            out[: whole - start] = _sum(words, top + 1, (1 << top) - count)[top].view(np.uint8)
        if whole < stop:
            out[whole - start :] = at_least(digits(row[whole:stop] for row in self.rows), count)
        return out

    def digits(self, start: int, stop: int) -> list[np.ndarray]:
        """The counts in bytes start..stop-1, packed by digit, the lowest first. `start` is a multiple of 8."""
        whole, width = stop // 8 * 8, len(self).bit_length()
        if self.words is None or whole <= start:
            return digits(row[start:stop] for row in self.rows)
        found = np.zeros((width, stop - start), np.uint8)
        found[:, : whole - start] = _sum(self._words(start, whole), max(width, 4), 0)[:width].view(
            np.uint8
        )
        if whole < stop:
            found[:, whole - start :] = digits(row[whole:stop] for row in self.rows)
        return list(found)

    def unlike(self, other: "Rows", far: np.ndarray, start: int, stop: int) -> np.ndarray:
        """In how many bits of bytes start..stop-1 each row is not the one of `other`, and in how many of these `far` is 1: int64 [2, m]."""
        whole = stop // 8 * 8
        if self.words is None or whole <= start:
            return unlike([row[start:stop] for row in self.rows], other.rows[0][start:stop], far)
        from . import bitsliced_counter_loops

        (target,), words = other._words(start, whole), far[: whole - start].view(np.uint64)
        found = np.array(
            [
                bitsliced_counter_loops.unlike(row, target, words)
                for row in self._words(start, whole)
            ],
            np.int64,
        ).T
        if whole < stop:
            found += unlike(
                [row[whole:stop] for row in self.rows],
                other.rows[0][whole:stop],
                far[whole - start :],
            )
        return found

    def _words(self, start: int, stop: int) -> list[np.ndarray]:
        return [words[start // 8 : stop // 8] for words in self.words]


def digits(rows: Iterable[Array]) -> list[Array]:
    """The counts, packed by digit, the lowest first. However many rows there are, two of each digit wait for a third."""
    waiting: list[list[Array]] = []
    for row in rows:
        for digit in range(len(waiting) + 1):
            if digit == len(waiting):
                waiting.append([])
            waiting[digit].append(row)
            if len(waiting[digit]) < 3:
                break
            kept, row = _add(*waiting[digit])
            waiting[digit] = [kept]
    found, carry = [], None
    for held in waiting:
        kept, carry = _add(*held, *[None] * (2 - len(held)), carry)
        found.append(kept)
    return found if carry is None else [*found, carry]


def at_least(digits: list[Array], count: int) -> Array:
    """Where counts are `count` or more, packed: compared digit by digit, from the highest, with what lies below."""
    above = digits[0] ^ digits[0]
    equal = ~above
    if count <= 0:
        return equal
    if (count - 1).bit_length() > len(digits):
        return above
    for place in reversed(range(len(digits))):
        if count - 1 >> place & 1:
            equal = equal & digits[place]
        else:
            above, equal = above | equal & digits[place], equal & ~digits[place]
    return above


def unlike(rows: list[Array], other: Array, far: Array) -> np.ndarray:
    """`Rows.unlike` of whole rows."""
    return np.array([(ones(row ^ other), ones((row ^ other) & far)) for row in rows], np.int64).T


def ones(packed: Array) -> int:
    """How many bits are 1."""
    if isinstance(packed, Tensor):
        table = torch.tensor([i.bit_count() for i in range(256)], device=packed.device)
        return int(table[packed.long()].sum())
    whole = packed.size // 8 * 8
    return sum(
        int(np.bitwise_count(part).sum(dtype=np.int64))
        for part in (packed[:whole].view(np.uint64), packed[whole:])
    )


def _add(a: Array, b: Array | None, c: Array | None) -> tuple[Array, Array | None]:
    """What stays at the digit, and the carry; None is zeros."""
    if b is None:
        a, b, c = (a, c, None)
    if b is None:
        return a, None
    odd = a ^ b
    return (odd, a & b) if c is None else (odd ^ c, a & b | odd & c)


def _sum(words: list[np.ndarray], width: int, begin: int) -> np.ndarray:
    """`begin` plus the counts, below 2^width, by the compiled loops: uint64 [width, words]; width ≥ 4."""
    from . import bitsliced_counter_loops

    found, carry = np.empty((width, words[0].size), np.uint64), np.empty(words[0].size, np.uint64)
    for digit, row in enumerate(found):
        row[:] = 0xFFFF_FFFF_FFFF_FFFF * (begin >> digit & 1)
    for first in range(0, len(words), AT_ONCE):
        group = words[first : first + AT_ONCE]
        zeros = [bitsliced_counter_loops.empty(words[0].size)] * (AT_ONCE - len(group))
        bitsliced_counter_loops.add(*group, *zeros, *found[:4], carry)
        bitsliced_counter_loops.carry(found[4:], carry)
    return found


def _words(row: np.ndarray) -> np.ndarray:
    """The whole words of a row, uint64, read-only, where they are if they are aligned: the one type that loops are compiled for."""
    words = row[: row.size // 8 * 8].view(np.uint64)
    words = words if words.flags.aligned else words.copy()
    words.flags.writeable = False
    return words
