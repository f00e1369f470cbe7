"""Randomness that depends on what it is for, never on when or where it is drawn.

Every draw comes from a Philox generator (Salmon et al.: Parallel random numbers: as easy as 1, 2, 3. SC 2011) keyed by
(run seed, round, client or partition, purpose). A client's batches in round 7 are the same whether the run was
interrupted, on which machine the client lives, and index else is in the cohort.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.random.bit_generator import ISeedSequence


def key(seed: int, purpose: str, round: int = 0, index: int = 0) -> int:
    """Return a key of 64 bits for (seed, purpose, round, index). `index` may be a Flower node id of 64 bits."""
    text = struct.pack("<qqQ", seed, round, index % 2**64) + purpose.encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def generator(seed: int, purpose: str, round: int = 0, index: int = 0) -> np.random.Generator:
    """Return a NumPy generator for (seed, purpose, round, index)."""
    return np.random.Generator(np.random.Philox(_Key(key(seed, purpose, round, index))))


def generators(
    seed: int, purpose: str, rounds_and_indices: Iterable[tuple[int, int]]
) -> Iterator[np.random.Generator]:
    """Yield `generator(seed, purpose, round, index)` for each pair, faster: one object with a new key, valid until the next."""
    bits = np.random.Philox(_Key(0))
    made, begun = np.random.Generator(bits), bits.state
    for key_of_one in [key(seed, purpose, round, index) for round, index in rounds_and_indices]:
        begun["state"]["key"][0] = key_of_one
        bits.state = begun
        yield made


class _Key(ISeedSequence):
    """A key for Philox. With `key=`, NumPy would also gather entropy from the machine, which takes six times as long."""

    def __init__(self, key: int):
        self.key = key

    def generate_state(self, n_words: int, dtype: type = np.uint64) -> np.ndarray:
        return np.array([self.key, 0], np.uint64)
