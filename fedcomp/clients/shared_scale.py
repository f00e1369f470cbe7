"""The client half of the strategy `shared-scale`: first what the update's scale is, then the update in the scale of all."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..codecs import Codec, Context, LayerWise, codec
from ..codecs.base import nonfinite_rows
from ..errors import ProtocolError
from ..layout import Layout
from ..memories import Memory
from ..messages import TRAIN
from .work import Work

SCALE = "scale"  # the phase, and the name of what is announced in the next one
NUMBERS = codec("identity")  # makes the frames of this phase
UPDATE = "update"  # what is held


class ScaleThenTrain(Work):
    """Holds the update [numel] from phase to phase."""

    def __init__(self) -> None:
        super().__init__((SCALE, TRAIN))

    def answer(
        self, memory: Memory, x: Tensor | None, held: dict[str, Any], seed: int, context: Context
    ) -> bytes | None:
        if x is None and UPDATE not in held:
            raise ProtocolError(
                f"this client holds no update for a phase '{context.phase}'; ask it again in the next round"
            )
        if x is None:
            return memory.propose(held.pop(UPDATE), seed=seed, context=context)
        (error,) = nonfinite_rows(x[:1], memory.layout, "the update")
        if error is not None:
            raise error
        held[UPDATE] = x[0]
        return NUMBERS.encode(
            torch.tensor(scales(memory.codec, x[0], memory.layout), dtype=torch.float32)
        )

    def answer_stack(
        self,
        memories: Sequence[Memory],
        x: Tensor | None,
        held: Sequence[dict[str, Any]],
        seeds: Sequence[int],
        context: Context,
    ) -> list[Any]:
        if x is None and all(UPDATE in mine for mine in held):
            updates = torch.stack([mine.pop(UPDATE) for mine in held])
            return type(memories[0]).propose_stack(memories, updates, seeds, context)
        return super().answer_stack(memories, x, held, seeds, context)


def scales(ternary: Codec, x: Tensor, layout: Layout | None) -> list[float]:
    """The scale of each section that the codec makes of x [numel]."""
    return (
        [ternary.inner.scale(x[e.span]) for e in layout]
        if isinstance(ternary, LayerWise)
        else [ternary.scale(x)]
    )
