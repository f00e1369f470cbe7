"""Sketched SGD: sketches locate the large coordinates of the mean update, and a second phase fetches their exact values.

Ivkin, Rothchild, Ullah, Braverman, Stoica, Arora: Communication-efficient distributed SGD with sketching. NeurIPS 2019, algorithms 2, 3.

    Phase sketch:   Client i sends the count sketch S(vᵢ) of the vector vᵢ, the accumulated unsent part of its updates. The weights wᵢ are
                    those of the strategy `average`. From the mean sketch Σ wᵢ S(vᵢ) / Σ wᵢ, the server estimates every coordinate of the
                    weighted mean of the vᵢ.
    Phase values:   The server announces the P·k coordinates with the largest estimates as candidates. Client i sends the values of vᵢ at
                    the candidates, and the server computes their weighted mean. The update of the model consists of the k largest values
                    of this mean, and is 0 elsewhere.

The memory `sketched` of a client stores vᵢ and the client's momentum. After the round, the server sends the clients one frame with the
positions of the candidates that it dropped. For P = 4, this frame takes about 3.3 bits for each of the k coordinates. A client cannot infer
these positions from the broadcast, because the downlink codec may drop further coordinates, and because the client may miss the broadcast
and later download the whole model.

The strategy's options `density` and `candidates` set k and P. The uplink codec must have the same density or its default density. With the
scope `@layer`, each tensor has its own sketch, and a number of candidates in proportion to its size. The default downlink codec, `topk`
with the same k, sends the update without loss. All positions count as traffic; the paper does not count them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .. import codecs, kernels, spec
from ..codecs import Codec, Update, add_all, at_density
from ..codecs.sketch import Sketch, read_at_density
from ..codecs.topk import TopK
from ..errors import FrameError
from ..memories.sketched import CANDIDATES, MARKS, NUMBERS, SKETCH, VALUES, Sketched
from .average import Average
from .base import (
    AcceptedByPhase,
    AcceptedUpdate,
    Aggregation,
    ClientAlgorithm,
    Phase,
    PhaseResult,
    RoundUpdates,
)
from .fetchsgd import check_sketch_density


@dataclass(frozen=True)
class SketchedSGDOptions:
    density: float = 1 / 100  # k divided by the number of coordinates
    # P: number of candidates divided by k; larger = more bytes, fewer missed coordinates
    candidates: int = 4

    def __post_init__(self) -> None:
        TopK(self.density)  # raises SpecError for an invalid density
        spec.check_ranges(self, candidates=(1, math.inf))


class SketchedSGD(Average):
    """The k largest coordinates of the weighted mean, among candidates that sketches determine."""

    name: ClassVar[str] = "sketched-sgd"
    Options: ClassVar[type] = SketchedSGDOptions
    allowed_uplinks: ClassVar[tuple[type[Codec], ...]] = (Sketch,)
    required_memory: ClassVar[str] = Sketched.name
    fixed_frame_size: ClassVar[bool] = True
    supports_clipping: ClassVar[bool] = False
    client_algorithm: ClientAlgorithm = ClientAlgorithm((SKETCH, VALUES))

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        density = self.options.density
        # The codec that decodes sketches. It estimates as many coordinates as there are candidates.
        self.reader = at_density(self.uplink, min(1.0, self.options.candidates * density))
        sizes = [span.stop - span.start for span in codecs.spans(self.uplink, self.layout)]
        self.max_candidates = sum(map(self.reader.unscoped.count, sizes))
        self.count = TopK(density).count(self.layout.numel)  # k
        # In the current round: the positions of the candidates, as an array and encoded.
        self.candidates, self._announced = np.empty(0, np.int64), b""
        self._returned = b""  # encoded positions of the dropped candidates

    def _check_settings(self) -> None:
        super()._check_settings()
        check_sketch_density(self.name, self.options.density, self.uplink.density)

    @classmethod
    def defaults(cls, options: Any) -> Mapping[str, str]:
        return {"uplink": Sketch.name, "downlink": str(TopK(options.density))}

    def announce(self, phase: Phase, client: int, before: AcceptedByPhase) -> Mapping[str, bytes]:
        return {} if phase.name == SKETCH else {CANDIDATES: self._announced}

    def on_phase_end(self, result: PhaseResult) -> Mapping[int, str]:
        if result.phase == SKETCH and result.accepted:
            mean = torch.zeros(self.layout.numel, dtype=torch.float32)
            weighted = self.weighted_updates(result.accepted)
            updates = [update for update, _ in weighted]
            # Only the order of the estimates matters. Halve the weights, so that the sum cannot overflow.
            add_all(updates, [weight / 2 for _, weight in weighted], mean)
            self.candidates = kernels.top_k([mean], self.max_candidates).positions.numpy()
            self._announced = _marks(self.candidates, self.layout.numel)
        return {}

    def open(self, phase: Phase, frames: Sequence[bytes]) -> list[Update | FrameError]:
        if phase.name == SKETCH:
            opened = self.reader.open_batch(frames, self.layout.numel, self.layout)
            codec = self.reader.unscoped
            return [u if isinstance(u, FrameError) else read_at_density(u, codec) for u in opened]
        return NUMBERS.open_batch(frames, self.candidates.size)

    def aggregate(self, updates: RoundUpdates, into: Tensor) -> Aggregation:
        mean = self.weighted_mean(updates.phases[VALUES], self.candidates.size)
        selected = kernels.top_k([mean], self.count).positions.numpy()
        into[torch.from_numpy(self.candidates[selected])] = mean[selected]
        dropped = np.setdiff1d(np.arange(mean.numel()), selected, assume_unique=True)
        self._returned = _marks(dropped, mean.numel()) if dropped.size else b""
        return Aggregation()

    def returned_frame(self, accepted: AcceptedUpdate) -> bytes:
        return self._returned if accepted.update is not None else b""


def _marks(positions: np.ndarray, numel: int) -> bytes:
    """Encode a set of positions among `numel` coordinates as a frame."""
    marked = torch.zeros(numel, dtype=torch.float32)
    marked[torch.from_numpy(positions)] = 1
    return MARKS.encode(marked)
