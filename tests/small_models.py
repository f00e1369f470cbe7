"""Models with unusual parameters for tests of the layout and of both engines, and a call of the batched engine."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedcomp.layout import Layout
from fedcomp.sim.batched import BatchedEngine
from fedcomp.tasks.base import Task
from fedcomp.tasks.data import Data
from fedcomp.training.engine import Job
from fedcomp.training.local_sgd import LocalSGD, Traces


def small_task(
    make: Callable[[], nn.Module], data: Data | Callable[[], Data], **options
) -> tuple[Task, nn.Module, Layout, Tensor]:
    """Return a task with the model `make()`, the model, its layout and its initial weights."""
    torch.manual_seed(0)
    model = make()
    layout = Layout.of(model)
    return Task("small", make, data, data, **options), model, layout, layout.gather(model)


def train_together(
    engine: BatchedEngine,
    start: Tensor,
    data: Data,
    plans: Sequence[Sequence[np.ndarray]],
    sgd: LocalSGD,
    *,
    traces: Sequence[Traces] = (),
    round: int = 1,
) -> tuple[Tensor, Tensor]:
    """Train a client on each plan of batches. Return the updates and the losses."""
    own = traces or [Traces()] * len(plans)
    jobs = [
        Job(round, client, plan, traces=kept)
        for client, (plan, kept) in enumerate(zip(plans, own, strict=True))
    ]
    return engine.train_together(start, data, jobs, sgd, 0)


class Tied(nn.Module):
    """Two layers share their weight, another layer is frozen, and one parameter is never used."""

    def __init__(self):
        super().__init__()
        self.encoder, self.frozen, self.decoder = (
            nn.Linear(12, 12),
            nn.Linear(12, 12),
            nn.Linear(12, 12),
        )
        self.frozen.requires_grad_(False)
        self.decoder.weight = self.encoder.weight
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.decoder(torch.relu(self.frozen(torch.tanh(self.encoder(x)))))


class Coarse(nn.Module):
    """A bfloat16 layer followed by a float32 layer."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(12, 16).to(torch.bfloat16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.body(x.to(torch.bfloat16)).relu().float())


class Scalar(nn.Module):
    """A layer, and a parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.tensor(0.5)), nn.Linear(12, 4)

    def forward(self, x):
        return self.scale * self.linear(x)
