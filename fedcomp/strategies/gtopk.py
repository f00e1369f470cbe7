"""Global top-k: clients send updates with k coordinates each, and the server keeps the k largest coordinates of their mean.

Shi, Wang, Zhao, Tang, Wang, Huang, Chu: A distributed synchronous SGD algorithm with global top-k sparsification for low bandwidth
networks. ICDCS 2019. Client i sends C(a_i): its update plus the residual of its memory, compressed by the uplink codec C. With the weights
w_i of the strategy `average`, the server computes

    mean = Σ w_i C(a_i) / Σ w_i.

The update of the model equals this mean at its k largest coordinates, and is 0 elsewhere. The server returns to client i the values of
C(a_i) at all other coordinates, and the client's memory keeps them for later rounds. The frame with these values counts as traffic. The
density of the uplink codec determines k. With a density schedule, clients may send more than k coordinates. In this case, k is the largest
number of coordinates that a client sends in the round. In the paper, workers combine their updates in pairs, in a tree, and each pair
selects k coordinates. Here, the server selects k coordinates once, from the mean of all updates.

The default downlink codec, `topk:density=1`, sends the k coordinates without loss, as float32.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .. import codecs, kernels
from ..codecs import Codec, Update, at_density
from ..codecs.selection import Largest
from ..codecs.topk import TopK
from ..errors import ConfigError
from ..memories.none import NoMemory
from ..memories.residual import Residual
from .average import Average
from .base import AcceptedUpdate, Aggregation, RoundUpdates


class GTopK(Average):
    """The k largest coordinates of the weighted mean of the updates."""

    name: ClassVar[str] = "gtopk"
    allowed_uplinks: ClassVar[tuple[type[Codec], ...]] = (TopK, Largest)

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._selected = np.empty(0, np.int64)  # indices of the k coordinates of the round
        if getattr(self.uplink.unscoped, "values", "") == "2bit":
            raise ConfigError(
                f"--strategy gtopk returns unused values to clients, and --uplink {self.uplink} would round them a second time; "
                "give values=fp16 instead of values=2bit"
            )
        if self.counterpart is not None or self.config.memory == NoMemory.name:
            raise ConfigError(
                f"--strategy gtopk returns unused values to clients, but --memory {self.config.memory} cannot store them; "
                "use --memory residual"
            )

    @classmethod
    def defaults(cls, options: Any) -> Mapping[str, str]:
        return {"memory": Residual.name, "downlink": str(TopK(density=1.0))}

    def aggregate(self, updates: RoundUpdates, into: Tensor) -> Aggregation:
        aggregation = super().aggregate(updates, into)
        sent = [a.update for a in updates.accepted if a.update is not None]
        self._selected = self._largest(into, sent)
        at = torch.from_numpy(self._selected)
        values = into[at]
        into.zero_()[at] = values
        return aggregation

    def returned_frame(self, accepted: AcceptedUpdate) -> bytes:
        update = accepted.update
        if update is None or np.isin(update.positions, self._selected, assume_unique=True).all():
            return b""
        dropped = update.dense()
        dropped[torch.from_numpy(self._selected)] = 0
        # Lossless, because the uplink codec has already rounded these values.
        return at_density(self.uplink, 1.0).encode(dropped, layout=self.layout)

    def _largest(self, mean: Tensor, updates: Sequence[Update]) -> np.ndarray:
        """Return the indices of the k largest coordinates of `mean`, or of each tensor if the uplink codec has the scope @layer."""
        positions = [np.empty(0, np.int64)]
        for span in codecs.spans(self.uplink, self.layout):
            k = self.uplink.unscoped.count(span.stop - span.start)
            for update in updates:
                start, stop = np.searchsorted(update.positions, (span.start, span.stop))
                k = max(k, int(stop - start))
            positions.append(kernels.top_k([mean[span]], k).positions.numpy() + span.start)
        return np.concatenate(positions)
