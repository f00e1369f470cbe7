"""TernGrad (ternary updates) with a scale that all clients of a round share.

Wen, Xu, Yan, Wu, Wang, Chen, Li: TernGrad: ternary gradients to reduce communication in distributed deep learning. NeurIPS 2017, section 4:
scaler sharing.

    Phase scale:   Client i trains, clips the values of its update as the codec `terngrad` does, and sends the largest absolute value sᵢ.
                   The server computes the shared scale s = maxᵢ sᵢ.
    Phase train:   The server announces s. Client i sends its ternary update s·tᵢ; each value of tᵢ is −1, 0 or 1. The server computes
                   the mean update s · Σ wᵢ tᵢ / Σ wᵢ, with the weights wᵢ of the strategy `average`.

Ternary values with the same scale add like integers, so the sum is exact in any order. But a round needs one more exchange of messages than
with `average`, and the variance is larger, since s is the largest scale of all clients. If one client reports a huge scale, the nonzero
values of all clients become rare and large. With the scope @layer (the default), each tensor has its own scale, as in the paper. The
default downlink codec, `identity`, sends the update uncompressed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .. import codecs
from ..codecs import Codec, Context, Update, codec
from ..codecs.base import nonfinite_errors
from ..codecs.identity import Identity
from ..codecs.terngrad import SCALE as FLOAT
from ..codecs.terngrad import TernGrad
from ..errors import FrameError, ProtocolError
from ..layout import Layout
from ..memories import Memory
from ..memories.none import NoMemory
from ..messages import TRAIN
from .average import Average
from .base import (
    AcceptedByPhase,
    Aggregation,
    ClientAlgorithm,
    Phase,
    PhaseResult,
    RoundUpdates,
    Values,
)

SCALE = "scale"  # name of the first phase, and of the announcement with the scales
NUMBERS = codec("identity")  # codec for scales
UPDATE = "update"  # name of the client's update in RoundState.values


@dataclass(frozen=True)
class SharedScaleClient(ClientAlgorithm):
    """Client half: send the scale of the update in the first phase, and the ternary update in the second phase."""

    phases: tuple[str, ...] = (SCALE, TRAIN)
    one_by_one: ClassVar[bool] = True

    def encode_one(
        self, memory: Memory, update: Tensor | None, values: Values, seed: int, context: Context
    ) -> bytes | None:
        if update is not None:
            (error,) = nonfinite_errors(update[None], memory.layout, "the update")
            if error is not None:
                raise error
            values[UPDATE] = update  # for the second phase
            own = scales(memory.codec, update, memory.layout)
            return NUMBERS.encode(torch.tensor(own, dtype=torch.float32))
        if UPDATE not in values:
            raise ProtocolError(
                f"this client has no update for phase '{context.phase}', because it has already sent its update or did not train in this "
                "round; it can take part in the next round"
            )
        return memory.propose(values.pop(UPDATE), seed=seed, context=context)


def scales(ternary: Codec, x: Tensor, layout: Layout | None) -> list[float]:
    """Return the scales of a vector x [numel]: one scale per tensor for a codec with the scope @layer, else one for the whole vector."""
    spans = codecs.spans(ternary, layout or Layout.flat(x.numel()))
    return [ternary.unscoped.scale(x[span]) for span in spans]


class SharedScale(Average):
    """The weighted mean of ternary updates that have a shared scale."""

    name: ClassVar[str] = "shared-scale"
    allowed_uplinks: ClassVar[tuple[type[Codec], ...]] = (TernGrad,)
    required_memory: ClassVar[str] = NoMemory.name
    supports_clipping: ClassVar[bool] = False
    client_algorithm: ClientAlgorithm = SharedScaleClient()

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.spans = codecs.spans(self.uplink, self.layout)
        self.scales = np.zeros(len(self.spans), FLOAT)  # scales that all clients of the round share

    @classmethod
    def defaults(cls, options: Any) -> Mapping[str, str]:
        return {"uplink": "terngrad@layer", "downlink": Identity.name}

    def announce(self, phase: Phase, client: int, before: AcceptedByPhase) -> Mapping[str, bytes]:
        return {} if phase.name == SCALE else {SCALE: self.scales.tobytes()}

    def on_phase_end(self, result: PhaseResult) -> Mapping[int, str]:
        if result.phase == SCALE:
            sent = [
                a.update.block(0, len(self.spans)) for a in result.accepted if a.update is not None
            ]
            self.scales = np.max([np.zeros(len(self.spans), FLOAT), *sent], axis=0).astype(FLOAT)
        return {}

    def open(self, phase: Phase, frames: Sequence[bytes]) -> list[Update | FrameError]:
        if phase.name == TRAIN:
            opened = self.uplink.open_batch(frames, self.layout.numel, self.layout)
            return [self._in_scale(update) for update in opened]
        return [_checked(update) for update in NUMBERS.open_batch(frames, len(self.spans))]

    def aggregate(self, updates: RoundUpdates, into: Tensor) -> Aggregation:
        accepted = updates.phases[TRAIN]
        weights = self.client_weights(accepted)
        votes = torch.zeros(into.numel(), dtype=torch.float64)
        for answer, weight in zip(accepted, weights, strict=True):
            if answer.update is not None:
                votes.add_(answer.update.dense().sign(), alpha=weight)
        for span, scale in zip(self.spans, self.scales.tolist(), strict=True):
            into[span] = votes[span] * scale / sum(weights)
        return Aggregation()

    def _in_scale(self, update: Update | FrameError) -> Update | FrameError:
        """Return the update, or a FrameError if a value is neither 0 nor ± the announced scale of its tensor."""
        if isinstance(update, FrameError):
            return update
        for span, scale in zip(self.spans, self.scales, strict=True):
            sizes = np.abs(update.block(span.start, span.stop))
            if not ((sizes == 0) | (sizes == scale)).all():
                return FrameError(
                    f"the update has values other than 0 and ± the announced scale {scale:g}"
                )
        return update


def _checked(update: Update | FrameError) -> Update | FrameError:
    """Return the scales that a client sent, or a FrameError if a scale is negative."""
    if isinstance(update, FrameError):
        return update
    sent = update.block(0, update.numel)
    if (sent < 0).any():
        return FrameError(f"the client sent the negative scale {sent.min():g}")
    return update
