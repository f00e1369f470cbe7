"""Training by the user's own loop: the `train_fn` of a task."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import seeds
from ..errors import ProtocolError, TaskError
from ..layout import Layout
from ..messages import MAX_EXAMPLES, check_metric_names
from ..tasks.base import Task
from ..tasks.data import Examples
from .local_sgd import ClientEngine, Job, LocalSGD, LocalUpdate, seeded_torch


@dataclass
class LocalRound:
    """The round, options and state that a client's `train_fn` receives.

    A loop need not follow `lr`, `steps`, `epochs`, `batch_size` and `precision`; they are the run's options, with the schedules of the
    server applied. `state` is kept from one round of the client to the next: tensors, numbers, texts, and lists and dicts of them,
    such as the `state_dict()` of an optimizer.
    """

    round: int
    client: int
    lr: float
    steps: int
    epochs: int  # 0: train `steps` steps
    batch_size: int
    precision: str
    device: torch.device
    seed: int  # of this client in this round; torch's global generators start from it
    state: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        sgd: LocalSGD,
        device: torch.device,
        seed: int,
        round: int,
        client: int,
        state: dict[str, Any] | None = None,
    ) -> "LocalRound":
        """Return a client's round with the options of `sgd` and a copy of the client's state."""
        return cls(
            round,
            client,
            sgd.lr,
            sgd.steps,
            sgd.epochs,
            sgd.batch_size // sgd.accumulate,
            sgd.precision,
            device,
            seed,
            copy.deepcopy(state or {}),
        )


class OwnLoopEngine(ClientEngine):
    """Trains one client after the other by the task's `train_fn`."""

    def __init__(self, task: Task, model: nn.Module, layout: Layout, device: torch.device | str):
        self.task, self.layout, self.device = task, layout, torch.device(device)
        self.model = model.to(self.device)
        self.initial_buffers = {name: b.clone() for name, b in model.named_buffers()}

    def train_job(
        self,
        start: Tensor,
        data: Examples,
        job: Job,
        sgd: LocalSGD,
        seed: int,
        into: Tensor | None = None,
    ) -> LocalUpdate:
        """Train by the task's `train_fn` on the rows of the job; see `ClientEngine.train_job`.

        The update is the change of the trainable parameters. Raises TaskError if `train_fn` returns no dict with a loss.
        """
        rows = np.concatenate(job.batches) if job.rows is None else job.rows
        self.layout.scatter(start, self.model)
        for name, buffer in self.model.named_buffers():
            buffer.copy_((job.buffers or {}).get(name, self.initial_buffers[name]))
        before = self.layout.gather(self.model)
        own_seed = seeds.key(seed, "dropout", job.round, job.client)
        local_round = LocalRound.of(sgd, self.device, own_seed, job.round, job.client, job.state)
        self.model.train()
        self.model.zero_grad()  # of the previous client
        with seeded_torch(own_seed, self.device):
            returned = self.task.train_fn(self.model, data.subset(rows), local_round)
        numbers = numbers_of(self.task, "train_fn", returned)
        update = torch.sub(self.layout.gather(self.model), before, out=into)
        changed = {
            name: buffer.clone()
            for name, buffer in self.model.named_buffers()
            if not torch.equal(buffer, self.initial_buffers[name])
        }
        examples = numbers.pop("examples", len(rows))
        if not 1 <= examples <= MAX_EXAMPLES:
            raise TaskError(
                f"task '{self.task.name}': train_fn returned {examples:g} examples; return at least 1"
            )
        loss = numbers.pop("loss")
        return LocalUpdate(
            update, loss, changed or None, local_round.state or None, numbers, int(examples)
        )


def numbers_of(task: Task, what: str, found: Any) -> dict[str, float]:
    """Return what a function of the task returned, as floats by name. Raises TaskError where it is no dict of numbers with a loss."""
    if not isinstance(found, Mapping) or "loss" not in found:
        given = (
            f"a dict without it ({', '.join(map(str, found))})"
            if isinstance(found, Mapping)
            else type(found).__name__
        )
        raise TaskError(
            f"task '{task.name}': {what} returned {given}; return a dict with at least 'loss'"
        )
    for name, value in found.items():
        if not isinstance(value, Real) and not (isinstance(value, Tensor) and value.numel() == 1):
            raise TaskError(
                f"task '{task.name}': {what} returned a {type(value).__name__} for '{name}'; return one number"
            )
    try:
        check_metric_names([str(name) for name in found])
    except ProtocolError as error:
        raise TaskError(f"task '{task.name}': {what}: {error}") from error
    return {
        str(name): float(value.item() if isinstance(value, Tensor) else value)
        for name, value in found.items()
    }
