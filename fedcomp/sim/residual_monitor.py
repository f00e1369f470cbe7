"""A warning about residuals that grow without bound.

If ‖a − C(a)‖ ≤ ‖a‖ for every a, the residual of error feedback is bounded: ‖e‖ ≤ Σ‖x‖, whichever updates x are accepted or lost. A much
longer residual means that the codec C lengthens vectors, and the residual will keep growing.
"""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from ..memories import Memory
from ..messages import Assignment

GROWTH = "residual growth"  # the kind of the warning
# Contraction holds in the mean over seeds, and some memories do not add updates unchanged.
MARGIN = 10.0
# All clients use the same codec, and measuring an update costs a pass over it.
MAX_CLIENTS = 16


class ResidualMonitor:
    """Monitors the residuals of the first clients of a run and warns once. After a restart, a residual counts as an update."""

    def __init__(self, warn: Callable[..., None]):
        self.warn, self.warned = warn, False
        self.norm_sums: dict[int, float] = {}  # by client: the sum of the norms of its updates

    def __call__(
        self, assignments: Sequence[Assignment], memories: Sequence[Memory], updates: Tensor
    ) -> None:
        """Check the residuals of clients that are about to encode updates [m, numel]."""
        for a, memory, update in zip(assignments, memories, updates, strict=True):
            if not self.warned and (
                a.client in self.norm_sums or len(self.norm_sums) < MAX_CLIENTS
            ):
                self._check(a.client, memory, update)

    def _check(self, client: int, memory: Memory, update: Tensor) -> None:
        residual_norm = 0.0 if memory.residual is None else float(memory.residual.norm())
        norm_sum, norm = self.norm_sums.get(client, residual_norm), float(update.norm())
        if residual_norm > MARGIN * memory.gain * norm_sum:
            self.warned = True
            self.warn(
                f"the residual of client {client} grows without bound: its norm is {residual_norm:.3g}, but the norms of all its "
                f"updates add up to only {norm_sum:.3g}; {memory.codec} lengthens vectors instead of shortening them; use "
                "--uplink stc, or --memory none",
                kind=GROWTH,
            )
        self.norm_sums[client] = norm_sum + (norm if math.isfinite(norm) else 0.0)
