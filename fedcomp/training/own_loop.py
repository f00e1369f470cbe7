"""Training by the user's own training loop: the `train_fn` of a task."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import seeds
from ..errors import NonFiniteError, ProtocolError, TaskError
from ..layout import Layout
from ..messages import MAX_EXAMPLES, check_metric_names
from ..tasks.base import Task
from ..tasks.data import Examples
from . import nested_state
from .engine import ClientEngine, Job, JobResult, SerialEngine, seeded_torch
from .local_sgd import LocalSGD


@dataclass
class LocalRound:
    """The round, options and state that a client's `train_fn` receives.

    `lr`, `steps`, `epochs`, `batch_size` and `precision` are options of the run. The server may change some of them for a round. A
    `train_fn` may ignore the options. `state` is empty in the first round of a client, and is kept until the client's next round. It may
    contain tensors, numbers, strings, and lists and dicts of them, for example the `state_dict()` of an optimizer.

        def train(model, data, local_round):  # Task(…, train_fn=train)
            optimizer = torch.optim.AdamW(model.parameters(), lr=local_round.lr)
            if "optimizer" in local_round.state:
                optimizer.load_state_dict(local_round.state["optimizer"])
            ...
            local_round.state["optimizer"] = optimizer.state_dict()
            return {"loss": mean_loss}
    """

    round: int  # from 1
    client: int  # id of the client, from 0
    lr: float  # learning rate
    steps: int  # local steps in the round
    epochs: int  # passes over the client's data; 0: train `steps` steps
    batch_size: int  # examples in a batch
    precision: str  # float32, bfloat16 or float16
    device: torch.device  # device of the model; move batches of the data to this device
    seed: int  # torch's global generators have this seed, which differs by client and round
    state: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, sgd: LocalSGD, device: torch.device, seed: int) -> "LocalRound":
        """Return the argument `local_round` of `train_fn`, with a copy of the client's state."""
        batch_size = sgd.batch_size // sgd.accumulate
        options = sgd.lr, sgd.steps, sgd.epochs, batch_size, sgd.precision
        return cls(job.round, job.client, *options, device, seed, copy.deepcopy(job.state or {}))


class OwnLoopEngine(ClientEngine):
    """An engine that trains one client at a time by the task's `train_fn`.

    If `train_fn` freezes, converts or replaces parameters, the engine restores them for the next client.
    """

    def __init__(self, task: Task, model: nn.Module, layout: Layout, device: torch.device | str):
        super().__init__(task, model, layout, device)
        self.parameters = [
            (module, name, parameter, parameter.data)
            for module in self.model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad
        ]

    def _restore_parameters(self) -> None:
        for module, name, parameter, data in self.parameters:
            if getattr(module, name) is not parameter:
                setattr(module, name, parameter)
            parameter.data = data
            parameter.requires_grad_(True)

    def _check_parameters(self) -> None:
        for module, name, _, data in self.parameters:
            after = getattr(module, name, None)
            if not isinstance(after, nn.Parameter) or after.shape != data.shape:
                found = f"of the shape {[*after.shape]}" if isinstance(after, Tensor) else "missing"
                raise TaskError(
                    f"task '{self.task.name}': after train_fn, the parameter '{name}' of {type(module).__name__} is {found}; keep the "
                    f"parameter with its shape {[*data.shape]}"
                )

    def train_job(
        self, start: Tensor, data: Examples, job: Job, sgd: LocalSGD, seed: int, out: Tensor
    ) -> JobResult:
        """Train by the task's `train_fn` on the client's examples. For the arguments, see `ClientEngine.train_job`.

        The update is the change of the trainable parameters. Raises TaskError if `train_fn` changes the shape of a parameter or does not
        return a dict with a loss, or if `local_round.state` contains values that cannot be stored. Raises NonFiniteError if the loss is NaN
        or infinite but the update is finite. (If the update is not finite, its encoding raises an error later.)
        """
        assert self.task.train_fn is not None
        rows = np.concatenate(job.batches) if job.rows is None else job.rows
        self._restore_parameters()
        self.layout.scatter(start, self.model)
        self.load_buffers(job.buffers)
        before = self.layout.gather(self.model)
        client_seed = seeds.key(seed, "dropout", job.round, job.client)
        local_round = LocalRound.of(job, sgd, self.device, client_seed)
        self.model.train()
        self.model.zero_grad()  # remove the gradients of the previous client
        with seeded_torch(client_seed, self.device), torch.enable_grad():
            returned = self.task.train_fn(self.model, data.subset(rows), local_round)
        self._check_parameters()
        numbers = numbers_of(self.task, "train_fn", returned)
        torch.sub(self.layout.gather(self.model), before, out=out)
        examples = numbers.pop("examples", len(rows))
        if not 1 <= examples <= MAX_EXAMPLES:
            raise TaskError(
                f"task '{self.task.name}': train_fn returned {examples:g} as 'examples'; return a number from 1 to {MAX_EXAMPLES:g}"
            )
        loss, state = numbers.pop("loss"), local_round.state or None
        if not math.isfinite(loss) and out.isfinite().all():
            raise NonFiniteError(
                f"task '{self.task.name}': train_fn returned the loss {loss:g}; return a finite loss, or lower the learning rate"
            )
        nested_state.check(state)
        return JobResult(loss, self.changed_buffers(), state, numbers, int(examples))


def numbers_of(task: Task, function: str, returned: Any) -> dict[str, float]:
    """Convert the dict that `train_fn` or `evaluate_fn` returned to a dict of floats.

    Raises TaskError if "loss" is missing, if a value is not a number, or if the names are too many or too long.
    """
    if not isinstance(returned, Mapping) or "loss" not in returned:
        got = type(returned).__name__
        if isinstance(returned, Mapping):
            got = f"a dict with the keys [{', '.join(map(str, returned))}]"
        raise TaskError(
            f"task '{task.name}': {function} returned {got}; return a dict with at least 'loss'"
        )
    numbers: dict[str, float] = {}
    for name, value in returned.items():
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if not isinstance(number, Real):
            raise TaskError(
                f"task '{task.name}': {function} returned a {type(number).__name__} for '{name}'; return a number"
            )
        numbers[str(name)] = float(number)
    try:
        check_metric_names(numbers)
    except ProtocolError as error:
        raise TaskError(f"task '{task.name}': {function}: {error}") from error
    return numbers


def client_engine(
    task: Task, model: nn.Module, layout: Layout, device: torch.device | str
) -> ClientEngine:
    """Return an engine that trains clients by the task's `train_fn` if there is one, else by an optimizer."""
    engine = OwnLoopEngine if task.train_fn is not None else SerialEngine
    return engine(task, model, layout, device)
