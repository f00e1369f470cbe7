"""Random numbers that depend only on a key, never on the time, the machine or the order of the draws.

Every draw comes from a Philox generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Its key is a hash of the run's
seed, the purpose of the draw, the round, and the client or partition. For example, a client's batches in round 7 are the same on every
machine, and the same after an interruption of the run.
"""

import hashlib
import struct

import numpy as np


def key(seed: int, purpose: str, round: int = 0, index: int = 0) -> int:
    """Return a 64-bit key.

    `purpose`: name of what is drawn, such as "cohort". `index`: a client id, the number of a partition, or a 64-bit node id of Flower.
    """
    text = struct.pack("<qqQ", seed, round, index % 2**64) + purpose.encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def generator(seed: int, purpose: str, round: int = 0, index: int = 0) -> np.random.Generator:
    """Return a NumPy generator. See `key` for the arguments."""
    return np.random.Generator(np.random.Philox(key=key(seed, purpose, round, index)))
