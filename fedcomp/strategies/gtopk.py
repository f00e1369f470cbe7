"""Global top-k: the mean of sparse updates is made as sparse as each of them.

Shi, Wang, Zhao, Tang, Wang, Huang, Chu: A distributed synchronous SGD algorithm with global top-k sparsification for low bandwidth
networks. ICDCS 2019.

    y = Σ w_i C(a_i) / Σ w_i at its k largest coordinates, else 0;  what client i sent elsewhere returns to its memory

The default downlink, `topk:density=1`, sends the kept coordinates with their float32 values and loses nothing.

k is what the uplink's density makes it, or what the fullest frame of the round holds where a schedule makes frames denser. The paper cuts
pair by pair in a tree of workers, none of which sees the whole sum; a server does, and cuts once. What returns is a frame, and counted.
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
    """The k largest of the weighted mean."""

    name: ClassVar[str] = "gtopk"
    allowed_uplinks: ClassVar[tuple[type[Codec], ...]] = (TopK, Largest)

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._kept = np.empty(0, np.int64)  # positions that the last aggregate left
        if getattr(self.uplink.unscoped, "values", "") == "2bit":
            raise ConfigError(
                f"--uplink {self.uplink}: --strategy gtopk returns what it drops, which values=2bit would change again; use values=fp16"
            )
        if self.counterpart is not None or self.config.memory == NoMemory.name:
            raise ConfigError(
                f"--strategy gtopk returns what it drops, and memory '{self.config.memory}' cannot take it back; "
                "use --memory residual"
            )

    @classmethod
    def defaults(cls, options: Any) -> Mapping[str, str]:
        return {"memory": Residual.name, "downlink": str(TopK(density=1.0))}

    def aggregate(self, updates: RoundUpdates, into: Tensor) -> Aggregation:
        aggregation = super().aggregate(updates, into)
        sent = [a.update for a in updates.accepted if a.update is not None]
        self._kept = self._largest(into, sent)
        at = torch.from_numpy(self._kept)
        values = into[at]
        into.zero_()[at] = values
        return aggregation

    def returned_frame(self, accepted: AcceptedUpdate) -> bytes:
        update = accepted.update
        if update is None or np.isin(update.positions, self._kept, assume_unique=True).all():
            return b""
        dropped = update.dense()
        dropped[torch.from_numpy(self._kept)] = 0
        return at_density(self.uplink, 1.0).encode(
            dropped, layout=self.layout
        )  # loses nothing: these values were made by this codec

    def _largest(self, mean: Tensor, updates: Sequence[Update]) -> np.ndarray:
        """Return the positions of the k largest of the mean, tensor by tensor under an uplink @layer."""
        found = [np.empty(0, np.int64)]
        for span in codecs.spans(self.uplink, self.layout):
            k = self.uplink.unscoped.count(span.stop - span.start)
            for update in updates:
                start, stop = np.searchsorted(update.positions, (span.start, span.stop))
                k = max(k, int(stop - start))
            found.append(kernels.top_k([mean[span]], k).positions.numpy() + span.start)
        return np.concatenate(found)
