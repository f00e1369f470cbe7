"""Loops of the entropy coder (kernels/range_coder.py), compiled by numba.

`frequencies`: f_s for each symbol s. `bits`: the exponent B of their sum 2^B. Coder states are below 2⁵³, so that float64 divisions of
states, truncated to integers, are exact.
"""

import numpy as np
from numpy import float64, int64, uint32, uint64

from .loops import compiled
from .range_coder import FLOOR, WORD


@compiled
def encode(symbols, frequencies, bits, states, words):
    """Encode `symbols`, from the last to the first. Write the final coder states, from which decoding starts, to `states`.

    Fill `words` from its end to its start, and return the index of the first filled word.
    """
    firsts = frequencies.cumsum() - frequencies
    divisors = frequencies.astype(np.float64)
    whole, limit, lanes, at = int64(1) << bits, 53 - bits, uint64(states.size - 1), words.size
    states[:] = FLOOR
    for back in range(1, symbols.size + 1):
        i = uint64(symbols.size - back)
        s, state = uint64(symbols[i]), states[i & lanes]
        full = state >= frequencies[s] << limit
        words[uint64(at - 1)] = uint32(state)
        at -= full
        state >>= WORD if full else 0
        states[i & lanes] = (
            state
            + firsts[s]
            + int64(np.divide(float64(state), divisors[s])) * (whole - frequencies[s])
        )
    return at


@compiled
def decode(words, states, table, frequencies, bits, symbols):
    """Fill `symbols` with the decoded symbols. Return the number of words read, or -1 if there are too few words.

    `states`: the coder states at the start of the code; they are overwritten by the states at the end. `table`: the symbol for each value
    of (state mod 2^bits).
    """
    firsts = frequencies.cumsum() - frequencies
    mask, lanes, at = (int64(1) << bits) - 1, uint64(states.size - 1), 0
    for i in range(uint64(symbols.size)):
        state = states[i & lanes]
        slot = state & mask
        s = uint64(table[uint64(slot)])
        symbols[i] = s
        state = frequencies[s] * (state >> bits) + slot - firsts[s]
        if state < FLOOR:
            if at == words.size:
                return -1
            state = state << WORD | int64(words[uint64(at)])
            at += 1
        states[i & lanes] = state
    return at
