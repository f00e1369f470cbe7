"""The majority of numbers equals the majority of packed bits."""

import numpy as np
import pytest
import torch
from cases import for_each

from fedcomp.errors import ConfigError
from fedcomp.kernels import votes as kernel
from fedcomp.strategies import majority


def drawn(voters: int, numel: int) -> np.ndarray:
    return 2 * np.random.default_rng(voters).integers(0, 2, (voters, numel)) - 1


@for_each("voters", [1, 2, 5, 16])
@for_each("dtype", [np.int8, np.int64, np.float32])
def test_the_majority_wins_and_ties_are_random_bits_of_the_seed(voters, dtype):
    votes = drawn(voters, 1003).astype(dtype)
    won, total = majority(votes, 7), votes.sum(0, dtype=np.int64)
    assert won.dtype == dtype and won.shape == (1003,)
    random_bits = (
        2
        * np.unpackbits(kernel.bits.random_bits(7, 1003, kernel.TIE_STREAM), count=1003).astype(
            np.int64
        )
        - 1
    )
    assert np.array_equal(won, np.where(total == 0, random_bits, np.sign(total)))
    of_tensor = majority(torch.from_numpy(votes), 7)
    assert of_tensor.dtype is torch.from_numpy(votes).dtype and np.array_equal(
        of_tensor.numpy(), won
    )
    packed = kernel.majority([np.packbits(vote > 0).tobytes() for vote in votes], 1003, 7)
    assert np.array_equal(np.unpackbits(packed, count=1003), won > 0)


def test_the_order_of_voters_does_not_matter_and_the_seed_only_at_ties():
    votes = drawn(6, 5000)
    assert np.array_equal(majority(votes, 1), majority(votes[::-1], 1))
    differ = majority(votes, 1) != majority(votes, 2)
    assert differ.any() and not votes.sum(0)[differ].any()


@for_each(
    "votes",
    [np.zeros((2, 3)), np.array([[1.0, np.nan]]), np.full((1, 2), 2), np.ones(3), np.ones((0, 3))],
)
def test_invalid_votes_are_refused(votes):
    for given in (votes, torch.from_numpy(votes)):
        with pytest.raises(ConfigError, match="vote"):
            majority(given, 0)
