"""The vectors that local training updates or uses besides the weights: momentum, gradient moments and gradient correction."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import Layout
from .local_sgd import LocalSGD, Tensors


@dataclass(frozen=True)
class Traces:
    """Vectors that steps update or use besides the weights: float32 [n], or [m, n] for a stack of clients. Updated in place."""

    momentum: Tensor | None = None  # before the first step, then after the last one
    moments: tuple[Tensor, Tensor] | None = None  # sums of clipped gradients, and of their squares
    correction: Tensor | None = None  # constant, added to every clipped gradient

    def __bool__(self) -> bool:
        return self.momentum is not None or self.moments is not None or self.correction is not None

    @classmethod
    def for_round(
        cls,
        sgd: LocalSGD,
        needs_moments: bool,
        start: Tensor,
        momentum: Tensor | None,
        correction: Tensor | None = None,
    ) -> "Traces":
        """Return the traces of a round from `start` [n]. `momentum` is that after the client's last round; it is copied."""
        if sgd.keep_momentum:
            momentum = (
                torch.zeros_like(start)
                if momentum is None
                else momentum.to(start.device, copy=True)
            )
        return cls(
            momentum if sgd.keep_momentum else None,
            (torch.zeros_like(start), torch.zeros_like(start)) if needs_moments else None,
            None if correction is None else correction.to(start.device),
        )

    @classmethod
    def stack(cls, traces: Sequence["Traces"]) -> "Traces":
        """Stack the traces of clients, which all have the same vectors."""
        momenta = [t.momentum for t in traces if t.momentum is not None]
        moments = [t.moments for t in traces if t.moments is not None]
        corrections = [t.correction for t in traces if t.correction is not None]
        return cls(
            torch.stack(momenta) if momenta else None,
            (torch.stack([sums for sums, _ in moments]), torch.stack([sq for _, sq in moments]))
            if moments
            else None,
            torch.stack(corrections) if corrections else None,
        )

    def rows(self, index: Tensor | int) -> "Traces":
        """Return a copy of some rows of a stack, or of one row."""
        momentum = None if self.momentum is None else self.momentum[index].clone()
        moments = self.moments and (self.moments[0][index].clone(), self.moments[1][index].clone())
        return Traces(
            momentum, moments, None if self.correction is None else self.correction[index]
        )

    def copy_from_row(self, stack: "Traces", row: int) -> None:
        """Copy momentum and moments from a row of a stack."""
        for own, stacked in zip(self._updated(), stack._updated(), strict=True):
            own.copy_(stacked[row])

    def write_rows(self, index: Tensor, rows: "Traces") -> None:
        """Write momentum and moments of `rows` into these rows of a stack."""
        for own, changed in zip(self._updated(), rows._updated(), strict=True):
            own[index] = changed

    def momentum_views(self, layout: Layout, weights: Iterable[Tensor]) -> list[Tensor] | None:
        """Return the momentum before the first step, one tensor for each weight, in its precision; None without kept momentum."""
        if self.momentum is None:
            return None
        return [
            view.to(weight.dtype)
            for view, weight in zip(layout.views(self.momentum).values(), weights, strict=True)
        ]

    def corrected(self, layout: Layout, gradients: Tensors) -> Tensors:
        """Return the gradients plus the correction."""
        if self.correction is None:
            return gradients
        views = layout.views(self.correction).values()
        return [
            gradient + view.to(gradient.dtype)
            for gradient, view in zip(gradients, views, strict=True)
        ]

    def add_gradients(self, layout: Layout, gradients: Tensors) -> None:
        """Add the gradients of a step to the moments."""
        if self.moments is not None:
            sums, squares = (layout.views(moment).values() for moment in self.moments)
            for total, square, gradient in zip(sums, squares, gradients, strict=True):
                total.add_(gradient)
                square.addcmul_(gradient.to(torch.float32), gradient.to(torch.float32))

    def store_momentum(self, layout: Layout, momenta: Tensors | None) -> None:
        """Store the momentum after the last step, one tensor for each weight, if it is kept."""
        if self.momentum is not None and momenta is not None:
            for view, momentum in zip(layout.views(self.momentum).values(), momenta, strict=True):
                view.copy_(momentum)

    def _updated(self) -> list[Tensor]:
        """Return the vectors that training updates."""
        momentum = [] if self.momentum is None else [self.momentum]
        return [*momentum, *(self.moments or ())]


NO_TRACES = Traces()
