"""Signum: the client's momentum is what is sent, or what it votes with.

Bernstein, Zhao, Azizzadenesheli, Anandkumar: signSGD with majority vote is communication efficient and fault tolerant. ICLR 2019,
algorithm 1.

    u ← β·u + (1 − β)·x;  send C(u)

u is not an error that waits to be sent: it stays when C(u) arrives, and when it does not. With `--uplink sign --strategy vote` it is the
paper's algorithm; β = 0 is signSGD.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .. import spec
from ..codecs import Context, Update
from .vector_memory import NamedVectors, VectorMemory


@dataclass(frozen=True)
class Options:
    momentum: float = 0.9  # β; higher = votes that change more slowly

    def __post_init__(self) -> None:
        spec.check_decays(self, "momentum")


class Signum(VectorMemory):
    """`velocity` is u."""

    name: ClassVar[str] = "signum"
    source: ClassVar[str] = "Bernstein et al. 2019"
    Options: ClassVar[type] = Options
    vectors: ClassVar[tuple[str, ...]] = ("velocity",)
    velocity: Tensor | None = None  # u

    def _update_vectors(
        self, kept: NamedVectors, x: Tensor, context: Context
    ) -> tuple[NamedVectors, Tensor]:
        u = (kept["velocity"] * self.options.momentum).add_(x, alpha=1 - self.options.momentum)
        return {"velocity": u}, u

    def _on_accepted(self, update: Update, dropped: Update | None) -> None: ...
