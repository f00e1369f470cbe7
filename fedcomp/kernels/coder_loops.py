"""Loops of the entropy coder, compiled by numba. kernels/range_coder.py says what they do.

Indices are unsigned, as in kernels/loops.py. States stay below 2⁵³, so that their quotient as float64, cut off, is exact.
"""

import numpy as np
from numpy import float64, int64, uint32, uint64

from .loops import compiled
from .range_coder import FLOOR, WORD


@compiled
def encode(symbols, frequencies, bits, states, words):
    """Fill `words` from its end with the code of `symbols`, and `states` with what decoding starts from. Returns where the code begins."""
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
    """Fill `symbols`; `table` is the symbol of each slot. Returns how many words that took, or -1 where they run out."""
    firsts = frequencies.cumsum() - frequencies
    mask, lanes, at, i = (int64(1) << bits) - 1, states.size, 0, 0
    while i + lanes <= symbols.size and at + lanes <= words.size:
        for lane in range(uint64(lanes)):
            slot = states[lane] & mask
            s = uint64(table[uint64(slot)])
            symbols[uint64(i) + lane] = s
            state = frequencies[s] * (states[lane] >> bits) + slot - firsts[s]
            empty = state < FLOOR
            filled = state << WORD | int64(words[uint64(at)])
            states[lane] = filled if empty else state
            at += empty
        i += lanes
    while i < symbols.size:
        lane = uint64(i % lanes)
        slot = states[lane] & mask
        s = uint64(table[uint64(slot)])
        symbols[uint64(i)] = s
        states[lane] = frequencies[s] * (states[lane] >> bits) + slot - firsts[s]
        if states[lane] < FLOOR:
            if at == words.size:
                return -1
            states[lane] = states[lane] << WORD | int64(words[uint64(at)])
            at += 1
        i += 1
    return at
