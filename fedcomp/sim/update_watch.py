"""A warning about residuals that grow without bound.

If ‖a − C(a)‖ ≤ ‖a‖ for every a, error feedback never holds more than was put in: ‖e‖ ≤ Σ‖x‖, whatever is accepted or lost. A much longer
residual was lengthened by its codec, which will do it again.
"""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from ..memories import Memory
from ..messages import Assignment

GROWTH = "residual growth"  # the kind of the warning
MARGIN = (
    10.0  # contraction holds in the mean over seeds, and not every memory adds updates unchanged
)
WATCHED = (
    16  # clients; a codec treats all alike, and measuring every update would cost a pass over it
)


class UpdateWatch:
    """Follows the residuals of the first clients of a run and warns once. After a checkpoint, a residual counts as put in."""

    def __init__(self, warn: Callable[..., None]):
        self.warn, self.warned = warn, False
        self.put_in: dict[int, float] = {}  # by client: the sum of the norms of its updates

    def __call__(
        self, assignments: Sequence[Assignment], memories: Sequence[Memory], updates: Tensor
    ) -> None:
        """Look at updates [m, numel] that clients are about to encode."""
        for a, memory, update in zip(assignments, memories, updates, strict=True):
            if not self.warned and (a.client in self.put_in or len(self.put_in) < WATCHED):
                self._look(a.client, memory, update)

    def _look(self, client: int, memory: Memory, update: Tensor) -> None:
        length = 0.0 if memory.residual is None else float(memory.residual.norm())
        before, added = self.put_in.get(client, length), float(update.norm())
        if length > MARGIN * memory.gain * before:
            self.warned = True
            self.warn(
                f"the residual of client {client} grows without bound: its norm is {length:.3g}, and the norms of all its updates add "
                f"up to {before:.3g}; {memory.codec} lengthens what it should shorten, use --uplink stc, or --memory none",
                kind=GROWTH,
            )
        self.put_in[client] = before + (added if math.isfinite(added) else 0.0)
