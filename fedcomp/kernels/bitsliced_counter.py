"""Counts of the ones among m bits, in each of n places: 64 places at a time, with adders made of logic operations.

The counts are held in binary, one row of bits for each binary digit ("bit-sliced"). A full adder takes three rows of one digit and leaves
one there and a carry for the next digit: five operations for a word of 64 (Harley & Seal; Warren: Hacker's Delight, 2nd ed. 2013, §5–2).
"""

from collections.abc import Iterable

import numpy as np


def digits(rows: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Return the counts, packed by binary digit, the lowest first. At most two rows of each digit are kept at a time."""
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
    """Return packed flags of the counts that are at least `count`, compared digit by digit from the highest."""
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


def _add(
    a: np.ndarray, b: np.ndarray | None, c: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the sum and the carry of up to three rows of one digit; None stands for zeros."""
    if b is None:
        a, b, c = (a, c, None)
    if b is None:
        return a, None
    odd = a ^ b
    return (odd, a & b) if c is None else (odd ^ c, a & b | odd & c)
