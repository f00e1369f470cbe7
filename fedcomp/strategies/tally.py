"""The majority of votes given as numbers. kernels/votes.py computes the same for packed bits.

Bernstein, Zhao, Azizzadenesheli, Anandkumar: signSGD with majority vote is communication efficient and fault tolerant. ICLR 2019.
"""

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from ..kernels import votes as kernel


def majority(votes: Tensor | np.ndarray, seed: int) -> Tensor | np.ndarray:
    """Return the majority, ±1 [n], of ±1 votes [voters, n], as a tensor or an array of the type of `votes`.

    Ties are broken at random, keyed by (seed, coordinate). Raises ConfigError for votes of another shape, or other than ±1.
    """
    cast = votes if isinstance(votes, Tensor) else np.asarray(votes)
    if cast.ndim != 2 or len(cast) == 0:
        raise ConfigError(
            f"votes have the shape {list(cast.shape)}; give ±1 votes of at least one voter, [voters, n]"
        )
    if not ((cast == 1) | (cast == -1)).all():
        raise ConfigError("a vote is neither 1 nor −1; replace each zero by a random sign first")
    n = cast.shape[1]
    bits = np.unpackbits(kernel.majority(kernel.pack(cast), n, seed), count=n)
    if isinstance(cast, Tensor):
        return 2 * torch.from_numpy(bits).to(cast) - 1
    return 2 * bits.astype(cast.dtype) - 1
