"""Signum: the client sends its momentum instead of its update.

Bernstein, Zhao, Azizzadenesheli and Anandkumar, "signSGD with majority vote is communication efficient and fault tolerant", ICLR 2019,
algorithm 1. With the update x, the codec C, the momentum u and the momentum factor β:

    u ← β·u + (1 − β)·x;  send C(u).

The momentum u is an average of all updates, so it does not depend on whether the server accepts C(u). With `--uplink sign --strategy vote`,
this memory gives the paper's algorithm. With β = 0, this algorithm is signSGD.
"""

from torch import Tensor

from ..codecs import Context, Update
from .base import MomentumOptions, Updated, VectorMemory, Vectors


class Signum(VectorMemory):
    """A memory that sends the momentum of the client's updates. The momentum is the attribute `velocity`."""

    name = "signum"
    source = "Bernstein et al. 2019"
    Options = MomentumOptions
    vectors = ("velocity",)
    velocity: Tensor | None = None  # u

    def _update_vectors(self, vectors: Vectors, x: Tensor, context: Context) -> Updated:
        u = (vectors["velocity"] * self.options.momentum).add_(x, alpha=1 - self.options.momentum)
        return {"velocity": u}, u

    def _on_accepted(self, update: Update, dropped: Update | None) -> None: ...
