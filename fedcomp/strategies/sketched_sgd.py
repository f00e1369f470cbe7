"""Sketched SGD: sketches find where the mean is large, and a second exchange brings its exact values there.

Ivkin, Rothchild, Ullah, Braverman, Stoica, Arora: Communication-efficient distributed SGD with sketching. NeurIPS 2019, algorithms 2, 3.

    sketch   clients send S(vᵢ);  the P·k largest estimates of Σ wᵢ S(vᵢ) / Σ wᵢ are the candidates, and announced
    values   clients send vᵢ at the candidates;  the update is the weighted mean at its k largest, else 0

Momentum and what was not sent stay in the clients' memory `sketched`, which hears by `returned` which candidates were not kept: marks
among P·k places, the same for all, of about 3.3 bits a coordinate that is kept where P is 4. It does not ask the broadcast for them: the
downlink may lose some, and who was away may get the model without the broadcast of its own round.

k and P are the strategy's, of which the uplink's density has no part; with `@layer` each tensor has a sketch and P·k candidates by its
size. The usual downlink, `topk` of k, loses nothing of the update. Unlike the paper's, our count of bytes holds the positions: those of
the candidates, of what was kept, and of the broadcast.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .. import codecs, kernels, spec
from ..codecs import Codec, Update, add_all, at_density
from ..codecs.sketch import Sketch, reread
from ..codecs.topk import TopK
from ..errors import ConfigError, FrameError
from ..memories.sketched import CANDIDATES, MARKS, NUMBERS, SKETCH, VALUES, Sketched
from .average import Average
from .base import AcceptedUpdate, Aggregation, Phase, RoundUpdates
from .client_algorithm import ClientAlgorithm


@dataclass(frozen=True)
class Options:
    density: float = 1 / 100  # share of the coordinates that a round moves
    candidates: int = 4  # P: whose exact values are asked for, in multiples of these; more = more bytes, fewer that are overlooked

    def __post_init__(self) -> None:
        TopK(self.density)  # checks it
        spec.check_ranges(self, candidates=(1, math.inf))


class SketchedSGD(Average):
    """The k largest of the weighted mean, as far as a sketch of it finds them."""

    name: ClassVar[str] = "sketched-sgd"
    Options: ClassVar[type] = Options
    allowed_uplinks: ClassVar[tuple[type[Codec], ...]] = (Sketch,)
    required_memory: ClassVar[str] = Sketched.name
    fixed_frame_size: ClassVar[bool] = True
    supports_clipping: ClassVar[bool] = False
    client_algorithm: ClassVar[ClientAlgorithm] = ClientAlgorithm((SKETCH, VALUES))

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        share = self.options.density
        # Reads as many coordinates of a sketch as there are candidates.
        self.reader = at_density(self.uplink, min(1.0, self.options.candidates * share))
        spans = codecs.spans(self.uplink, self.layout)
        self.most = sum(self.reader.unscoped.count(span.stop - span.start) for span in spans)
        self.count = TopK(share).count(self.layout.numel)  # k
        self.candidates = np.empty(0, np.int64)  # of the round
        self._announced = b""  # these, as a frame
        self._merged: Sequence[AcceptedUpdate] | None = None  # what they were found in
        self._returned = b""  # those that the last aggregate did not keep

    def _check_settings(self) -> None:
        super()._check_settings()
        share, read = self.options.density, self.uplink.density
        if read not in (Sketch.density, share):
            raise ConfigError(
                f"--strategy {self.name} moves a share of {share:g}, its uplink reads one of {read:g}; "
                f"give --strategy {self.name}:density={read:g}"
            )

    @classmethod
    def defaults(cls, options: Any) -> Mapping[str, str]:
        return {
            "uplink": Sketch.name,
            "memory": Sketched.name,
            "downlink": str(TopK(options.density)),
        }

    def phases(self, round: int) -> Iterable[Phase]:
        return Phase(SKETCH), Phase(VALUES)

    def announce(
        self, phase: Phase, client: int, before: Mapping[str, Sequence[AcceptedUpdate]]
    ) -> Mapping[str, bytes]:
        if phase.name == SKETCH:
            return {}
        if self._merged is not before[SKETCH]:
            self._merged, self.candidates = before[SKETCH], self._largest(before[SKETCH])
            self._announced = _marks(self.candidates, self.layout.numel)
        return {CANDIDATES: self._announced}

    def open(self, phase: Phase, frames: Sequence[bytes]) -> list[Update | FrameError]:
        if phase.name == SKETCH:
            opened = self.reader.open_batch(frames, self.layout.numel, self.layout)
            return [
                update if isinstance(update, FrameError) else reread(update, self.reader.unscoped)
                for update in opened
            ]
        return NUMBERS.open_batch(frames, self.candidates.size)

    def aggregate(self, updates: RoundUpdates, into: Tensor) -> Aggregation:
        mean = torch.zeros(self.candidates.size, dtype=torch.float32)
        for update, share in self.weighted_updates(updates.phases[VALUES]):
            update.add_to(mean, share)
        kept = kernels.top_k([mean], self.count).positions.numpy()
        into[torch.from_numpy(self.candidates[kept])] = mean[kept]
        left = np.setdiff1d(np.arange(mean.numel()), kept, assume_unique=True)
        self._returned = _marks(left, mean.numel()) if left.size else b""
        return Aggregation()

    def returned_frame(self, accepted: AcceptedUpdate) -> bytes:
        return self._returned if accepted.update is not None else b""

    def _largest(self, accepted: Sequence[AcceptedUpdate]) -> np.ndarray:
        """Return the positions of the largest estimates of the weighted mean, halved so that rounding cannot overflow."""
        found, shares = (
            torch.zeros(self.layout.numel, dtype=torch.float32),
            self.weighted_updates(accepted),
        )
        add_all([update for update, _ in shares], [share / 2 for _, share in shares], found)
        return kernels.top_k([found], self.most).positions.numpy()


def _marks(positions: np.ndarray, numel: int) -> bytes:
    """Return a frame that marks these positions among numel coordinates."""
    marked = torch.zeros(numel, dtype=torch.float32)
    marked[torch.from_numpy(positions)] = 1
    return MARKS.encode(marked)
