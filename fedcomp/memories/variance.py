"""Variance-based gradient compression: a coordinate is sent once its gradient is no longer ambiguous.

Tsuzuku, Imachi, Akiba: Variance-based gradient compression for efficient distributed deep learning. ICLR 2018 (workshop), algorithm 1.

    r ← r + Σ g;  v ← v + Σ g²;  send where r² > α·v;  r and v become zero where accepted, elsewhere v ← ζ·v

The sums are over the gradients g of the local steps; those of the paper are over the examples of a batch. The client sends the accumulated
update e, which for plain SGD is −η·r; as in error feedback, e keeps the codec's error. Without moments, an update counts as one step. The
uplink codec sends the selected coordinates, and its density has no effect; `topk` suits best, since magnitudes differ widely.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..codecs import Context, Update
from ..errors import SpecError
from .base import Updated, VectorMemory, Vectors, mask


@dataclass(frozen=True)
class VarianceOptions:
    alpha: float = 2.0  # required ratio of the squared sum to the sum of squares; larger = fewer coordinates, later
    zeta: float = 0.999  # factor by which the sum of squares decays in a round

    def __post_init__(self) -> None:
        if not (self.alpha > 0 and 0 < self.zeta <= 1):
            given = f"alpha={self.alpha:g},zeta={self.zeta:g}"
            raise SpecError(
                f"memory 'variance' has {given}; give alpha above 0, and zeta above 0 and at most 1"
            )


class Variance(VectorMemory):
    """Error feedback for unambiguous coordinates. `residual` is e."""

    name: ClassVar[str] = "variance"
    source: ClassVar[str] = "Tsuzuku et al. 2018"
    Options: ClassVar[type] = VarianceOptions
    selects_coordinates: ClassVar[bool] = True
    needs_moments: ClassVar[bool] = True
    vectors: ClassVar[tuple[str, ...]] = ("residual", "gradients", "squares")
    gradients: Tensor | None = None  # r
    squares: Tensor | None = None  # v

    def _update_vectors(self, vectors: Vectors, x: Tensor, context: Context) -> Updated:
        sums, squares = (x, x * x) if context.moments is None else context.moments
        e, r, v = vectors["residual"] + x, vectors["gradients"] + sums, vectors["squares"] + squares
        send = e.where(r * r > v * self.options.alpha, 0)
        return {"residual": e, "gradients": r, "squares": v * self.options.zeta}, send

    def _on_accepted(self, update: Update, dropped: Update | None) -> None:
        super()._on_accepted(update, dropped)
        mask((self.gradients, self.squares), update.positions, dropped)
