"""Local SGD whose steps are alike, as one recorded step that is played again and again.

A step of a small model is hundreds of operations, and a GPU is through with them before they are called. A CUDA graph calls them all at
once. What a recorded step reads and writes stands in the same place every time: the weights, the momentum, the batch.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...clients.local_sgd import LocalSGD, anchors
from ...layout import Layout
from ...tasks.base import Data

Recorder = Callable[
    [Callable[[], None]], Callable[[], Any]
]  # a step that may be run → what runs it again
Batch = tuple[
    Tensor, Tensor | None
]  # positions in the data [m, b], and what augmentation drew for each [m, b, ...]
# Weights and momenta, both changed in place, and where the weights began → losses [m].
Step = Callable[[list[Tensor], list[Tensor] | None, list[Tensor], Data, Batch, LocalSGD], Tensor]

KEPT = 4  # recorded steps, those last played
WARM_UP = 3  # runs before a recording, in which libraries choose and allocate


class Recorded:
    """One step for m clients with batches like this one."""

    def __init__(
        self, step: Step, layout: Layout, data: Data, like: Batch, sgd: LocalSGD, record: Recorder
    ):
        m, device = len(like[0]), data.inputs.device
        self.stack = torch.zeros(m, layout.numel, device=device)
        self.momentum = torch.zeros_like(self.stack) if sgd.momentum else None
        self.base = torch.zeros_like(self.stack[0]) if sgd.proximal else None
        self.batch, self.losses = (
            (like[0].clone(), None if like[1] is None else like[1].clone()),
            torch.zeros(m, device=device),
        )
        weights = list(layout.views(self.stack).values())
        momenta = None if self.momentum is None else list(layout.views(self.momentum).values())
        near = [] if self.base is None else anchors(layout, self.base, weights, sgd)
        self.data = data  # stays where the recording reads it
        self._again = record(
            lambda: self.losses.add_(step(weights, momenta, near, data, self.batch, sgd))
        )

    def run(self, base: Tensor, batches: Sequence[Batch], stack: Tensor) -> Tensor:
        """Local SGD from `base` [n]; leaves the updates in `stack` [m, n], returns the mean losses [m]."""
        self.stack.copy_(base.expand_as(self.stack))
        self.losses.zero_()
        if self.momentum is not None:
            self.momentum.zero_()
        if self.base is not None:
            self.base.copy_(base)
        for batch in batches:
            for mine, given in zip(self.batch, batch, strict=True):
                if mine is not None:
                    mine.copy_(given)
            self._again()
        torch.sub(self.stack, base, out=stack)
        return self.losses / len(batches)


class Recordings:
    """Steps that were recorded, by what they depend on. One is recorded when it is wanted for the second time."""

    def __init__(self, layout: Layout, record: Recorder | None):
        self.layout, self.record = layout, record
        self._kept: OrderedDict[tuple, Recorded | None] = OrderedDict()

    def find(
        self, step: Step, data: Data, batches: Sequence[Batch], sgd: LocalSGD
    ) -> Recorded | None:
        """What plays these steps, if there is something. Where a step cannot be recorded, nothing is any more."""
        shapes = {
            (positions.shape, None if drawn is None else drawn.shape)
            for positions, drawn in batches
        }
        if self.record is None or len(shapes) > 1:
            return None
        alike = replace(sgd, steps=1, epochs=0, batch_size=1)  # these stand in the batches
        key = (shapes.pop(), alike, data.inputs.data_ptr(), data.targets.data_ptr())
        seen, found = key in self._kept, self._kept.pop(key, None)
        if seen and found is None:
            try:
                found = Recorded(step, self.layout, data, batches[0], sgd, self.record)
            except RuntimeError:  # what waits for the device cannot be recorded; the plain step says what else is wrong
                self.forget()
                return None
        self._kept[key] = found
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return found

    def clear(self) -> None:
        """Give back the memory of all that was recorded."""
        self._kept.clear()

    def forget(self) -> None:
        """Likewise, and record nothing more."""
        self.record = None
        self.clear()


def recorder(device: torch.device) -> Recorder | None:
    """CUDA graphs of one pool of memory; None where there are none."""
    if device.type != "cuda":
        return None
    pool = torch.cuda.graph_pool_handle()

    def record(step: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(device):
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(WARM_UP):
                    step()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                step()
        return graph.replay

    return record
