"""Sums of m rows of bits in every column, with adders made of logic operations on many columns at a time.

The counts are stored in binary, as one row of packed bits for each binary digit ("bit-sliced"). A full adder replaces three rows of a digit
by one row of this digit and a carry, a row of the next digit, in five operations (Harley & Seal; Warren: Hacker's Delight, 2nd ed. 2013,
§5–2).
"""

from collections.abc import Iterable

import numpy as np


def digits(rows: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Return the counts of ones as one packed row per binary digit, the lowest first. Memory: at most three rows per digit."""
    waiting: list[list[np.ndarray]] = []
    for row in rows:
        for digit in range(len(waiting) + 1):
            if digit == len(waiting):
                waiting.append([])
            waiting[digit].append(row)
            if len(waiting[digit]) < 3:
                break
            total, row = _full_add(*waiting[digit])
            waiting[digit] = [total]
    sums: list[np.ndarray] = []
    carry: np.ndarray | None = None
    for rows_of_digit in waiting:
        total, carry = _add([*rows_of_digit, *([] if carry is None else [carry])])
        sums.append(total)
    return sums if carry is None else [*sums, carry]


def at_least(digits: list[np.ndarray], count: int) -> np.ndarray:
    """Return packed flags of the columns whose count is at least `count`. Digits are compared from the highest."""
    above = digits[0] ^ digits[0]
    equal = ~above
    if count <= 0:
        return equal
    if (count - 1).bit_length() > len(digits):
        return above
    for i in reversed(range(len(digits))):
        if count - 1 >> i & 1:
            equal = equal & digits[i]
        else:
            above, equal = above | equal & digits[i], equal & ~digits[i]
    return above


def _add(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the sum of one to three rows of a digit, and the carry, None for one row."""
    if len(rows) == 1:
        return rows[0], None
    return _full_add(*rows) if len(rows) == 3 else (rows[0] ^ rows[1], rows[0] & rows[1])


def _full_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum and the carry of three rows of a digit."""
    odd = a ^ b
    return odd ^ c, a & b | odd & c
