"""Residuals that grow without bound, found by what none can do whose codec contracts.

Where ‖a − C(a)‖ ≤ ‖a‖ for every a, error feedback never holds more than was put in: ‖e‖ ≤ Σ‖x‖, whatever is accepted or lost. A residual
that is much longer was lengthened by its codec, which will do it again. Sparse frames alone never look like that, however slow they are.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..memories import Memory

GROWTH = "residual growth"  # the kind of the warning
MARGIN = 10.0  # contraction is a promise in the mean over seeds, and not every memory adds up updates as they are


WATCHED = 16  # clients: what a codec does to one it does to all, and the length of every update would take a pass over it


class Growth:
    """Follows the residuals of the first clients of a run and warns once. After a checkpoint, a residual counts as put in."""

    def __init__(self, warn: Callable[..., None]):
        self.warn, self.warned = warn, False
        self.put_in: dict[int, float] = {}  # by client: the length of all of its updates

    def look(self, clients: Sequence[int], memories: Sequence[Memory], updates: Tensor) -> None:
        """Before a cohort proposes `updates` [m, numel], with nothing waiting."""
        known = [i for i, client in enumerate(clients) if client in self.put_in]
        new = [i for i, client in enumerate(clients) if client not in self.put_in][
            : WATCHED - len(self.put_in)
        ]
        if self.warned or not known + new:
            return
        watched = [(clients[i], memories[i]) for i in known + new]
        lengths = _lengths([memory.residual for _, memory in watched])
        added = _lengths([updates[i] for i in known + new])
        for (client, memory), length, more in zip(watched, lengths, added, strict=True):
            before = self.put_in.get(client, length)
            if length > MARGIN * memory.gain * before and not self.warned:
                self.warned = True
                sizes = f"it is {length:.3g} long, all of its updates together {before:.3g}"
                self.warn(
                    f"the residual of client {client} grows without bound: {sizes}; {memory.codec} makes longer what it should make "
                    "shorter, use --uplink stc, or --memory none",
                    kind=GROWTH,
                )
            self.put_in[client] = before + (more if math.isfinite(more) else 0.0)


def _lengths(vectors: Sequence[Tensor | None]) -> list[float]:
    """Norms, 0 of None. A device is waited for once."""
    found = [None if vector is None else torch.linalg.vector_norm(vector) for vector in vectors]
    by_device: dict[torch.device, list[Tensor]] = {}
    for norm in found:
        if norm is not None:
            by_device.setdefault(norm.device, []).append(norm)
    read = {device: iter(torch.stack(norms).tolist()) for device, norms in by_device.items()}
    return [0.0 if norm is None else next(read[norm.device]) for norm in found]
