"""How many of m bits are 1, in each of n places side by side: 64 at a time, with adders made of logic operations.

The counts are held in binary, one row of bits for each binary digit ("bit-sliced"). A full adder takes three rows of one digit and leaves
one there and a carry for the next digit: five operations for a word of 64 (Harley & Seal; Warren: Hacker's Delight, 2nd ed. 2013, §5–2).
"""

from collections.abc import Iterable

import numpy as np


def digits(rows: Iterable[np.ndarray]) -> list[np.ndarray]:
    """The counts, packed by digit, the lowest first. However many rows there are, two of each digit wait for a third."""
    waiting: list[list[np.ndarray]] = []
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


def at_least(digits: list[np.ndarray], count: int) -> np.ndarray:
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


def unlike(rows: list[np.ndarray], other: np.ndarray, far: np.ndarray) -> np.ndarray:
    """In how many bits each of m rows is not the one of `other`, and in how many of these `far` is 1: int64 [2, m]."""
    return np.array([(ones(row ^ other), ones((row ^ other) & far)) for row in rows], np.int64).T


def ones(packed: np.ndarray) -> int:
    """How many bits are 1."""
    whole = packed.size // 8 * 8
    return sum(
        int(np.bitwise_count(part).sum(dtype=np.int64))
        for part in (packed[:whole].view(np.uint64), packed[whole:])
    )


def _add(
    a: np.ndarray, b: np.ndarray | None, c: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """What stays at the digit, and the carry; None is zeros."""
    if b is None:
        a, b, c = (a, c, None)
    if b is None:
        return a, None
    odd = a ^ b
    return (odd, a & b) if c is None else (odd ^ c, a & b | odd & c)
