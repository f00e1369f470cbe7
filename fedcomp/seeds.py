"""Random numbers that depend only on a key, never on the time, the machine or the order of the draws.

Every draw comes from a Philox generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with the key (run seed, round,
client or partition, purpose). For example, a client's batches in round 7 are the same on every machine, whichever other clients take
part in the round, and whether or not the run was interrupted.
"""

import hashlib
import struct

import numpy as np


def key(seed: int, purpose: str, round: int = 0, index: int = 0) -> int:
    """Return a 64-bit key for (seed, purpose, round, index).

    `index` is a client id, the number of a partition, or a 64-bit node id of Flower.
    """
    text = struct.pack("<qqQ", seed, round, index % 2**64) + purpose.encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def generator(seed: int, purpose: str, round: int = 0, index: int = 0) -> np.random.Generator:
    """Return a NumPy generator for (seed, purpose, round, index)."""
    return np.random.Generator(np.random.Philox(key=key(seed, purpose, round, index)))
