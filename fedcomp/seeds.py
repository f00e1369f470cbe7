"""Random numbers that depend only on a key, never on the time, the machine or the order of the draws.

Every draw comes from a Philox generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with the key (run seed, round,
client or partition, purpose). For example, a client's batches in round 7 are the same on every machine, whichever other clients take
part in the round, and whether or not the run was interrupted.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence


def key(seed: int, purpose: str, round: int = 0, index: int = 0) -> int:
    """Return a 64-bit key for (seed, purpose, round, index).

    `index` is a client id, the number of a partition, or a 64-bit node id of Flower.
    """
    text = struct.pack("<qqQ", seed, round, index % 2**64) + purpose.encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def generator(seed: int, purpose: str, round: int = 0, index: int = 0) -> np.random.Generator:
    """Return a NumPy generator for (seed, purpose, round, index)."""
    return np.random.Generator(_philox(key(seed, purpose, round, index)))


def generators(
    seed: int, purpose: str, rounds_and_indices: Iterable[tuple[int, int]]
) -> Iterator[np.random.Generator]:
    """Yield `generator(seed, purpose, round, index)` for each (round, index). The same generator object is yielded each time, with a new
    state.
    """
    bits = _philox(0)
    generator, state = np.random.Generator(bits), bits.state
    for new_key in [key(seed, purpose, round, index) for round, index in rounds_and_indices]:
        state["state"]["key"][0] = new_key
        bits.state = state
        yield generator


def _philox(key: int) -> np.random.Philox:
    # NumPy accepts any ISeedSequence, but its type stubs allow only SeedSequence.
    seed_sequence: Any = _Key(key)
    return np.random.Philox(seed_sequence)


class _Key(ISeedSequence):
    """A key for NumPy's Philox. `Philox(key=…)` takes six times as long as `Philox(_Key(…))`, because it also collects entropy."""

    def __init__(self, key: int):
        self.key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> np.ndarray:
        return np.array([self.key, 0], np.uint64)
