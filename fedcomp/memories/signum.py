"""Signum: the client sends its momentum instead of its update.

Bernstein, Zhao, Azizzadenesheli, Anandkumar: signSGD with majority vote is communication efficient and fault tolerant. ICLR 2019, algorithm
1.

    u ← β·u + (1 − β)·x;  send C(u)

x is the update, C the codec, and u a momentum, not an unsent error: u does not change when C(u) is accepted or rejected. With `--uplink
sign --strategy vote`, this memory gives the paper's algorithm. With β = 0, it gives signSGD.
"""

from typing import ClassVar

from torch import Tensor

from ..codecs import Context, Update
from .base import MomentumOptions, Updated, VectorMemory, Vectors


class Signum(VectorMemory):
    """A memory that sends the momentum of the updates. `velocity` is u."""

    name: ClassVar[str] = "signum"
    source: ClassVar[str] = "Bernstein et al. 2019"
    Options: ClassVar[type] = MomentumOptions
    vectors: ClassVar[tuple[str, ...]] = ("velocity",)
    velocity: Tensor | None = None  # u

    def _update_vectors(self, vectors: Vectors, x: Tensor, context: Context) -> Updated:
        u = (vectors["velocity"] * self.options.momentum).add_(x, alpha=1 - self.options.momentum)
        return {"velocity": u}, u

    def _on_accepted(self, update: Update, dropped: Update | None) -> None: ...
