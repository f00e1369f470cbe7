"""Training engines. A `ClientEngine` trains one client at a time, and an `Engine` trains the clients of a cohort."""

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .. import seeds
from ..layout import Layout
from ..schedules import RATE, OptionSchedule
from ..tasks.base import Task, predictions
from ..tasks.data import Batch, Examples
from ..tasks.user_errors import client_error
from .cpu_convolutions import NOT_CONTIGUOUS, fused, set_memory_format, supports_channels_last
from .local_sgd import NO_TRACES, Descent, LocalSGD, Tensors, Traces, plan_augmentation
from .optimizers import make_optimizer
from .parameter_memory import Freed, allocate, free_parameters


class Job(NamedTuple):
    """The local training of one client in a round."""

    round: int
    client: int  # id of the client, or number of the data partition; used in random seeds
    batches: Sequence[np.ndarray]  # for each step, the indices of its examples in the data
    buffers: dict[str, Tensor] | None = None  # model buffers after the client's previous round
    traces: Traces = NO_TRACES  # momentum and other vectors [numel], which training changes
    rows: np.ndarray | None = None  # indices of all examples of the client, for a train_fn
    # State of the optimizer or the train_fn after the client's previous round.
    state: dict[str, Any] | None = None


class JobResult(NamedTuple):
    """The results of a local training job, except for the update."""

    loss: float  # batch loss before each step, averaged over the steps
    # Copies of the buffers that differ from their initial values.
    buffers: dict[str, Tensor] | None = None
    # State of the optimizer or the train_fn, if the client keeps this state between rounds.
    state: dict[str, Any] | None = None
    metrics: Mapping[str, float] = {}  # further numbers that the train_fn returned
    examples: int | None = None  # weight of the update in an average, from a train_fn


class LocalUpdate(NamedTuple):
    """The update of one client, and the loss and further results of its training."""

    update: Tensor  # float32 [numel]: weights after the last step minus weights before the first
    result: JobResult


class ClientEngine(ABC):
    """Base class of engines that train one client at a time. The object `model` is moved to `device` and reused for all clients."""

    def __init__(self, task: Task, model: nn.Module, layout: Layout, device: torch.device | str):
        self.task, self.layout, self.device = task, layout, torch.device(device)
        self.model = model.to(self.device)
        self.initial_buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    @abstractmethod
    def train_job(
        self, start: Tensor, data: Examples, job: Job, sgd: LocalSGD, seed: int, out: Tensor
    ) -> JobResult:
        """Train the client of `job` from the weights `start` (float32 [numel]), and write the update into `out` (float32 [numel]).

        `job.batches` has indices into `data`. `data` and `start` must be on the engine's device. Buffers that are missing in `job.buffers`
        start with their initial values. Random draws of the model, such as dropout, depend only on the seed, the round and the client. The
        states of torch's global generators do not change.
        """

    def try_job(
        self, start: Tensor, data: Examples, job: Job, sgd: LocalSGD, seed: int, out: Tensor
    ) -> JobResult | Exception:
        """Call `train_job` and return its result, or the exception if training fails.

        If the user's code forks this process, exceptions in the fork are raised, so that the fork ends instead of continuing the run.
        """
        process = os.getpid()
        try:
            return self.train_job(start, data, job, sgd, seed, out)
        except (Exception, SystemExit) as error:
            if os.getpid() != process:
                raise
            return client_error(error)

    def train(
        self,
        start: Tensor,
        data: Examples,
        batches: Sequence[np.ndarray],
        sgd: LocalSGD,
        *,
        seed: int = 0,
        round: int = 0,
        client: int = 0,
        **fields: Any,
    ) -> LocalUpdate:
        """Train a client on the given batches with `train_job`. `fields` sets further fields of the `Job`."""
        job, update = Job(round, client, batches, **fields), torch.empty_like(start)
        return LocalUpdate(update, self.train_job(start, data, job, sgd, seed, update))

    def free_weights(self) -> None:
        """Free memory that the engine needs only during training. Engines without such memory do nothing."""

    def load_buffers(self, buffers: dict[str, Tensor] | None) -> None:
        """Load a client's buffers into the model. Buffers that are missing in `buffers` get their initial values."""
        for name, buffer in self.model.named_buffers():
            buffer.copy_((buffers or {}).get(name, self.initial_buffers[name]))

    def changed_buffers(self) -> dict[str, Tensor] | None:
        """Return copies of the buffers that differ from their initial values, or None if no buffer differs."""
        changed = {
            name: buffer.clone()
            for name, buffer in self.model.named_buffers()
            if not torch.equal(buffer, self.initial_buffers[name])
        }
        return changed or None


class Engine(ABC):
    """Base class of engines that train the clients of a cohort on a device.

    Except for rounding, a client's update does not depend on which other clients are trained.
    """

    device: torch.device

    @abstractmethod
    def train(
        self, start: Tensor, data: Examples, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> tuple[Tensor, list[JobResult | Exception]]:
        """Train the client of each job on `data` from the weights `start` (float32 [numel]). `data` and `start` are on the engine's device.

        Return the updates of the clients whose training succeeded (float32 [clients, numel], in the order of the jobs), and the result or
        exception of each job. The caller may change the updates in place. Raises ConfigError if no client can be trained with `sgd`.
        """

    def place_data(self, data: Examples) -> Examples:
        """Return `data`, moved to the memory from which the engine reads it, such as the memory of a GPU."""
        return data.to(self.device)

    def close(self) -> None:
        """Stop the threads and processes that the engine started."""


class SequentialJobs(Engine):
    """An engine that trains the clients of a cohort one after the other, with a `ClientEngine`.

    With `frees_memory`, the engine frees the memory of the model's weights after each call of `train`.
    """

    def __init__(self, engine: ClientEngine, *, frees_memory: bool = False):
        self.engine, self.device, self.frees_memory = engine, engine.device, frees_memory

    def train(
        self, start: Tensor, data: Examples, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> tuple[Tensor, list[JobResult | Exception]]:
        updates = torch.empty(len(jobs), len(start), device=self.device, dtype=torch.float32)
        results: list[JobResult | Exception] = []
        succeeded = 0
        for job in jobs:
            results.append(self.engine.try_job(start, data, job, sgd, seed, updates[succeeded]))
            succeeded += not isinstance(results[-1], Exception)
        if self.frees_memory:
            self.engine.free_weights()
        return updates[:succeeded], results


@contextmanager
def seeded_torch(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators of the CPU and of `device` within a `with` block. This is faster than torch.random.fork_rng."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


LossFunction = Callable[[Batch], Tensor]  # returns the mean loss of a batch


class SGDSteps:
    """The local steps of one client with plain SGD, implemented by `Descent`."""

    def __init__(self, descent: Descent):
        self.descent = descent

    def step(self, batch: Batch, loss_of: LossFunction) -> Tensor:
        """Take an SGD step on a batch. Return the detached loss of the batch before the step."""
        loss = loss_of(batch)
        gradients: Tensors = torch.autograd.grad(
            loss, self.descent.weights, allow_unused=True, materialize_grads=True
        )
        if limit := self.descent.sgd.clip:
            norm = torch.stack([n.float() for n in torch._foreach_norm(gradients)]).norm()
            gradients = torch._foreach_mul(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
        self.descent.step(gradients)
        return loss.detach()

    def finish(self) -> None:
        """Store the momentum in the job's `Traces`. Return nothing, since plain SGD has no other state."""
        self.descent.finish()


class OptimizerSteps:
    """The local steps of one client with a torch optimizer, which is set by the task or by --optimizer.

    Gradients are accumulated over `sgd.accumulate` pieces of a batch, then clipped. `n_steps` is the number of steps in the round. `state`
    is the optimizer's state after the client's previous round, without learning rates and other settings.
    """

    def __init__(self, task: Task, descent: Descent, state: dict[str, Any] | None, n_steps: int):
        self.descent, self.sgd = descent, descent.sgd
        self.parameters, sgd = descent.weights, descent.sgd
        self.optimizer = make_optimizer(task, self.parameters, sgd)
        if state:
            groups = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": copy.deepcopy(state), "param_groups": groups})
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.schedule = OptionSchedule(
            "--step-schedule", sgd.step_schedule, RATE, 1.0, horizon=n_steps
        )
        device = self.parameters[0].device.type
        self.scaler = torch.amp.GradScaler(device, enabled=sgd.precision == "float16")
        self.steps_taken = 0

    def step(self, batch: Batch, loss_of: LossFunction) -> Tensor:
        """Take an optimizer step on a batch. Return the detached mean loss of the batch before the step."""
        self.steps_taken += 1
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * self.schedule.at(self.steps_taken)
        self.optimizer.zero_grad()
        size, losses = len(batch), []
        for piece in batch.split(-(-size // self.sgd.accumulate)):
            loss = loss_of(piece) * (len(piece) / size)
            self.scaler.scale(loss).backward()
            losses.append(loss.detach())
        self.scaler.unscale_(self.optimizer)
        self._change_gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return sum(losses[1:], losses[0])

    @torch.no_grad()
    def _change_gradients(self) -> None:
        if self.sgd.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.sgd.clip)
        if self.sgd.proximal or self.descent.traces:
            gradients: Tensors = [
                torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters
            ]
            adjusted = self.descent.adjusted(gradients)
            for parameter, gradient in zip(self.parameters, adjusted, strict=True):
                parameter.grad = gradient

    def finish(self) -> dict[str, Any] | None:
        """Free the gradients. Return the optimizer's state if the client keeps it between rounds."""
        self.optimizer.zero_grad()
        kept = self.sgd.optimizer_state == "kept"
        return self.optimizer.state_dict()["state"] if kept else None


class SerialEngine(ClientEngine):
    """An engine that trains one client at a time by SGD or a torch optimizer.

    On a CPU, convolutions are computed in the channels_last format, which reduces the training time by a quarter. Models that fail in this
    format are trained in the contiguous format.
    """

    def __init__(self, task: Task, model: nn.Module, layout: Layout, device: torch.device | str):
        super().__init__(task, model, layout, device)
        parameters = dict(self.model.named_parameters())
        self.parameters = [parameters[e.name] for e in layout]
        self.sizes = [p.numel() for p in self.parameters]
        self.has_low_precision = any(p.dtype != torch.float32 for p in self.parameters)
        self.channels_last = self.device.type == "cpu" and supports_channels_last(self.model)
        self.fused = fused(self.model) if self.device.type == "cpu" else self.model
        set_memory_format(self.model, self.channels_last)
        self._freed: Freed = []

    def train_job(
        self, start: Tensor, data: Examples, job: Job, sgd: LocalSGD, seed: int, out: Tensor
    ) -> JobResult:
        """Train by SGD or a torch optimizer on the batches of the job; see `ClientEngine.train_job`.

        A parameter on which the loss does not depend has a zero gradient. If a parameter is not float32, its start weights are rounded to
        its precision, and the update is the difference from the rounded weights.
        """
        base = self._load(start, job.buffers)
        self.model.train()
        descent = Descent(self.layout, self.parameters, sgd, job.traces, base)
        steps = (
            SGDSteps(descent)
            if sgd.uses_descend and self.task.optimizer is None
            else OptimizerSteps(self.task, descent, job.state, len(job.batches))
        )
        try:
            with seeded_torch(seeds.key(seed, "dropout", job.round, job.client), self.device):
                losses = [
                    steps.step(batch, lambda piece: self._loss(piece, sgd))
                    for batch in self._batches(data, job, sgd, seed)
                ]
        except RuntimeError as error:
            if not self.channels_last or NOT_CONTIGUOUS not in str(error):
                raise
            self.channels_last = False
            set_memory_format(self.model, self.channels_last)
            return self.train_job(start, data, job, sgd, seed, out)
        state = steps.finish()
        starts, updates = self._split(base), self._split(out)
        with torch.no_grad():
            for parameter, own_start, update in zip(self.parameters, starts, updates, strict=True):
                torch.sub(parameter.float(), own_start, out=update)
        loss = torch.stack(losses).mean(dtype=torch.float32).item()
        return JobResult(loss, self.changed_buffers(), state)

    def free_weights(self) -> None:
        """Free the memory of the model's parameters until the next job, which starts from other weights."""
        self._freed = free_parameters(self.model)

    def _batches(self, data: Examples, job: Job, sgd: LocalSGD, seed: int) -> Iterable[Batch]:
        index = torch.from_numpy(np.concatenate(job.batches)).to(self.device)
        sizes = [len(batch) for batch in job.batches]
        drawn = plan_augmentation(self.task, sgd, job.batches, seed, job.round, job.client)
        augmentations: Iterable[Tensor | None] = (
            repeat(None) if drawn is None else torch.from_numpy(drawn).to(self.device).split(sizes)
        )
        for rows, augmentation in zip(index.split(sizes), augmentations, strict=False):
            batch = data.batch(rows)
            if augmentation is not None and self.task.augment is not None:
                assert isinstance(batch.inputs, Tensor)  # tasks/check.py has checked this
                inputs = self.task.augment.apply(batch.inputs, augmentation)
                batch = Batch(inputs, batch.targets)
            yield batch

    def _loss(self, batch: Batch, sgd: LocalSGD) -> Tensor:
        """Run the forward pass in `sgd.precision`, and return the loss of a batch, computed in float32."""
        if sgd.precision == "float32":
            outputs = self.task.outputs(self.fused, batch)
        else:
            with torch.autocast(self.device.type, getattr(torch, sgd.precision)):
                outputs = self.task.outputs(self.fused, batch)
                if not self.task.returns_loss(outputs):
                    outputs = _as_float32(predictions(outputs))
        return self.task.loss_of(outputs, batch.targets)

    def _load(self, start: Tensor, buffers: dict[str, Tensor] | None) -> Tensor:
        """Load weights and buffers into the model. Return `start`, rounded to the precision of each parameter."""
        if self._freed:
            allocate(self._freed)
            self._freed = []
        with torch.no_grad():
            for parameter, values in zip(self.parameters, self._split(start), strict=True):
                parameter.copy_(values)
        self.load_buffers(buffers)
        return self.layout.gather(self.model) if self.has_low_precision else start

    def _split(self, vector: Tensor) -> list[Tensor]:
        """Split a vector [numel] into views with the shapes of the parameters."""
        parts = zip(self.parameters, vector.split(self.sizes), strict=True)
        return [part.view(parameter.shape) for parameter, part in parts]


def _as_float32(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
    if type(outputs) in (tuple, list):
        return type(outputs)(map(_as_float32, outputs))
    return outputs
