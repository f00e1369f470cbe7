"""Variance-based gradient compression: a coordinate is sent once its summed gradient is large compared to the gradient's variance.

Tsuzuku, Imachi and Akiba, "Variance-based gradient compression for efficient distributed deep learning", ICLR 2018 (workshop), algorithm 1.
With the update x, the gradients g of the local steps, a factor α and a decay ζ:

    e ← e + x
    r ← r + Σ g
    v ← v + Σ g²
    send e at the coordinates where r² > α·v
    e ← e − (accepted update)
    set r and v to zero at accepted coordinates, and v ← ζ·v at all other coordinates

In the paper, the sums Σ g and Σ g² are over the examples of a batch, and e is −η·r for the learning rate η. Here, e is a separate vector,
the attribute `residual`. As in other error feedback, it also contains the codec's errors. If `Context.moments` (the sums Σ g and Σ g²) is
None, the update x counts as the gradient of a single local step.

The memory itself selects the coordinates, so the codec's option `density` has no effect. The most suitable codec is `topk`, which sends
exact values. A codec that sends one magnitude for all coordinates, such as `stc`, is less accurate, because the magnitudes of the selected
coordinates differ widely.
"""

from dataclasses import dataclass

from torch import Tensor

from ..codecs import Context, Update
from ..errors import SpecError
from .base import Updated, VectorMemory, Vectors, mask


@dataclass(frozen=True)
class VarianceOptions:
    # α: a coordinate is sent if (sum of its gradients)² > α · (sum of its squared gradients). With a larger α, coordinates are sent later,
    # so a round sends fewer of them.
    alpha: float = 2.0
    zeta: float = 0.999  # ζ: factor by which the sum of squared gradients of an unsent coordinate is multiplied in each round

    def __post_init__(self) -> None:
        if not (self.alpha > 0 and 0 < self.zeta <= 1):
            given = f"alpha={self.alpha:g},zeta={self.zeta:g}"
            raise SpecError(
                f"memory 'variance' has {given}; give alpha above 0, and zeta above 0 and at most 1"
            )


class Variance(VectorMemory):
    """Error feedback that sends a coordinate once its gradient is large compared to the gradient's variance."""

    name = "variance"
    source = "Tsuzuku et al. 2018"
    Options = VarianceOptions
    selects_coordinates = True
    needs_moments = True
    vectors = ("residual", "gradients", "squares")
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
