"""The majority of votes as numbers, with the result that kernels/votes.py has of them as bits.

Bernstein, Zhao, Azizzadenesheli, Anandkumar: signSGD with majority vote is communication efficient and fault tolerant. ICLR 2019.
"""

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from ..kernels import votes as kernel


def majority(votes: Tensor | np.ndarray, seed: int) -> Tensor | np.ndarray:
    """The majority, ±1 [n], of ±1 votes [voters, n]: a tensor or an array as these are, of their type.

    A tie is decided by the coin of (seed, coordinate), the same for all who know the seed. Raises ConfigError for what is no vote.
    """
    held = votes if isinstance(votes, Tensor) else np.asarray(votes)
    if held.ndim != 2 or len(held) == 0:
        raise ConfigError(
            f"votes have the shape {list(held.shape)}; give ±1 votes of at least one voter, [voters, n]"
        )
    if not ((held == 1) | (held == -1)).all():
        raise ConfigError(
            "a vote is neither 1 nor −1; toss a coin of the client's own for each zero before it votes"
        )
    n = held.shape[1]
    won = np.unpackbits(kernel.majority(kernel.pack(held), n, seed), count=n)
    if isinstance(held, Tensor):
        return 2 * torch.from_numpy(won).to(held) - 1
    return 2 * won.astype(held.dtype) - 1
