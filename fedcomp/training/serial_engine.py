"""Training of one client at a time, by SGD or by any optimizer of torch."""

import copy
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import seeds
from ..layout import Layout
from ..schedules import RATE, OptionSchedule
from ..tasks.base import Task, predictions
from ..tasks.data import Batch, Examples
from .batches import plan_augmentation
from .channels import NOT_CONTIGUOUS, channels_may_be_last, set_memory_format
from .devices import seeded_torch
from .engine import ClientEngine, Job, JobResult, LocalUpdate
from .local_sgd import LocalSGD, Tensors, descend, proximal_anchors
from .optimizers import make_optimizer
from .pooled_convolution import fused
from .traces import Traces

LossFunction = Callable[[Batch], Tensor]  # returns the mean loss of a batch


class SGDSteps:
    """Steps of SGD by `descend`, on parameters that are views of one vector."""

    def __init__(
        self,
        layout: Layout,
        parameters: list[nn.Parameter],
        sgd: LocalSGD,
        traces: Traces,
        anchors: Tensors,
    ):
        self.layout, self.sgd = layout, sgd
        self.parameters: list[Tensor] = [*parameters]
        self.traces, self.anchors = traces, anchors
        self.momenta: Tensors | None = traces.momentum_views(layout, parameters)

    def step(self, batch: Batch, loss_of: LossFunction) -> Tensor:
        """Take a step on a batch. Return its loss before the step, without a gradient."""
        loss = loss_of(batch)
        gradients: Tensors = torch.autograd.grad(
            loss, self.parameters, allow_unused=True, materialize_grads=True
        )
        with torch.no_grad():
            if self.sgd.clip:
                gradients = _clipped(gradients, self.sgd.clip)
            self.traces.add_gradients(self.layout, gradients)
            corrected = self.traces.corrected(self.layout, gradients)
            self.momenta = descend(self.parameters, corrected, self.momenta, self.sgd, self.anchors)
        return loss.detach()

    def finish(self) -> dict[str, Any] | None:
        """Store the momentum after the last step. Return None: there is no other state."""
        self.traces.store_momentum(self.layout, self.momenta)
        return None


class OptimizerSteps:
    """Steps of a torch optimizer: the task's own, or that of --optimizer.

    Gradients are accumulated over `sgd.accumulate` pieces of a batch, then clipped. `n_steps` is the number of steps in the round. `state`
    is the optimizer's state after the client's last round; learning rates and other settings are always those of this round.
    """

    def __init__(
        self,
        task: Task,
        layout: Layout,
        parameters: list[nn.Parameter],
        sgd: LocalSGD,
        traces: Traces,
        anchors: Tensors,
        state: dict[str, Any] | None,
        n_steps: int,
    ):
        self.layout, self.parameters, self.sgd = layout, parameters, sgd
        self.traces, self.anchors = traces, anchors
        self.optimizer = make_optimizer(task, parameters, sgd)
        if state:
            groups = self.optimizer.state_dict()["param_groups"]
            own = {"state": copy.deepcopy(state), "param_groups": groups}
            self.optimizer.load_state_dict(own)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.schedule = OptionSchedule(
            "--step-schedule", sgd.step_schedule, RATE, 1.0, horizon=n_steps
        )
        device = parameters[0].device.type
        self.scaler = torch.amp.GradScaler(device, enabled=sgd.precision == "float16")
        self.steps_taken = 0

    def step(self, batch: Batch, loss_of: LossFunction) -> Tensor:
        """Take a step on a batch. Return its mean loss before the step, without a gradient."""
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
        """Clip the gradients, then add the terms of FedProx and of the strategy."""
        if self.sgd.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.sgd.clip)
        if not (self.anchors or self.traces):
            return
        gradients: Tensors = [
            torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters
        ]
        self.traces.add_gradients(self.layout, gradients)
        gradients = self.traces.corrected(self.layout, gradients)
        if self.anchors:
            distances = torch._foreach_sub([*self.parameters], self.anchors)
            gradients = torch._foreach_add(gradients, distances, alpha=self.sgd.proximal)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def finish(self) -> dict[str, Any] | None:
        """Release the gradients. Return the optimizer's state if the client keeps it."""
        self.optimizer.zero_grad()
        return self.optimizer.state_dict()["state"] if self.sgd.keeps_state else None


class SerialEngine(ClientEngine):
    """Trains one client at a time by SGD or a torch optimizer.

    Moves `model` to `device` and makes its float32 parameters views of one vector. On a CPU, the weights of convolutions are separate
    tensors in the channels_last format, with which training takes three quarters of the time, if the model works in that format.
    """

    def __init__(self, task: Task, model: nn.Module, layout: Layout, device: torch.device | str):
        super().__init__(task, model, layout, device)
        self.weights = layout.gather(self.model)
        parameters = dict(self.model.named_parameters())
        self.parameters = [parameters[e.name] for e in layout]
        self.has_low_precision = any(p.dtype != torch.float32 for p in self.parameters)
        self.channels_last = self.device.type == "cpu" and channels_may_be_last(self.model)
        self.fused = fused(self.model) if self.device.type == "cpu" else self.model
        self._arrange()

    def _arrange(self) -> None:
        """Make parameters views of `weights`, except those that need a memory layout or a precision of their own."""
        separate = _with_own_layout(self.model, self.device, self.channels_last)
        # Parameters that are no views, each with its slice of `weights`. They are copied before and after training.
        self.copied: list[tuple[nn.Parameter, Tensor]] = []
        set_memory_format(self.model, self.channels_last)
        for parameter, view in zip(
            self.parameters, self.layout.views(self.weights).values(), strict=True
        ):
            if parameter.dtype == torch.float32 and parameter not in separate:
                parameter.data = view
            else:
                self.copied.append((parameter, view))

    def train_job(
        self,
        start: Tensor,
        data: Examples,
        job: Job,
        sgd: LocalSGD,
        seed: int,
        out: Tensor | None = None,
    ) -> LocalUpdate:
        """Train by SGD or a torch optimizer on the batches of the job; see `ClientEngine.train_job`.

        A parameter that the loss does not depend on has a zero gradient. The weights of a tensor with lower precision than float32 are
        rounded before the first step, and the update is the difference from the rounded weights.
        """
        base = self._load(start, job.buffers)
        self.model.train()
        steps = self._steps(job, sgd, base)
        try:
            with seeded_torch(seeds.key(seed, "dropout", job.round, job.client), self.device):
                losses = [
                    steps.step(batch, lambda piece: self._loss(piece, sgd))
                    for batch in self._batches(data, job, sgd, seed)
                ]
        except RuntimeError as error:
            if not self.channels_last or NOT_CONTIGUOUS not in str(error):
                raise
            self.channels_last = False  # the model needs contiguous activations
            self._arrange()
            return self.train_job(start, data, job, sgd, seed, out)
        state = steps.finish()
        for parameter, view in self.copied:
            view.copy_(parameter.detach())
        update = torch.sub(self.weights, base, out=out)
        loss = torch.stack(losses).mean(dtype=torch.float32).item()
        return LocalUpdate(update, JobResult(loss, self.changed_buffers(), state))

    def _steps(self, job: Job, sgd: LocalSGD, base: Tensor) -> SGDSteps | OptimizerSteps:
        """Return the steps of a job that starts from the weights `base` [n]."""
        anchors = proximal_anchors(self.layout, base, self.parameters, sgd)
        if sgd.uses_descend and self.task.optimizer is None:
            return SGDSteps(self.layout, self.parameters, sgd, job.traces, anchors)
        return OptimizerSteps(
            self.task,
            self.layout,
            self.parameters,
            sgd,
            job.traces,
            anchors,
            job.state,
            len(job.batches),
        )

    def _batches(self, data: Examples, job: Job, sgd: LocalSGD, seed: int) -> Iterable[Batch]:
        """Yield the batches of a job, augmented if the options require it."""
        index = torch.from_numpy(np.concatenate(job.batches)).to(self.device)
        sizes = [len(batch) for batch in job.batches]
        drawn = plan_augmentation(self.task, sgd, job.batches, seed, job.round, job.client)
        augmentations: Iterable[Tensor | None] = (
            repeat(None) if drawn is None else torch.from_numpy(drawn).to(self.device).split(sizes)
        )
        for rows, augmentation in zip(index.split(sizes), augmentations, strict=False):
            batch = data.batch(rows)
            if augmentation is not None and self.task.augment is not None:
                assert isinstance(batch.inputs, Tensor)  # tasks/check.py requires it
                inputs = self.task.augment.apply(batch.inputs, augmentation)
                batch = Batch(inputs, batch.targets)
            yield batch

    def _loss(self, batch: Batch, sgd: LocalSGD) -> Tensor:
        """Return the loss of a batch. The forward pass uses the precision of `sgd`, the loss float32."""
        if sgd.precision == "float32":
            outputs = self.task.outputs(self.fused, batch)
        else:
            with torch.autocast(self.device.type, getattr(torch, sgd.precision)):
                outputs = self.task.outputs(self.fused, batch)
                if not self.task.returns_loss(outputs):
                    outputs = _as_float32(predictions(outputs))
        return self.task.loss_of(outputs, batch.targets)

    def _load(self, start: Tensor, buffers: dict[str, Tensor] | None) -> Tensor:
        """Load weights and buffers. Return the loaded weights: `start`, rounded in tensors of lower precision."""
        self.weights.copy_(start)
        self.load_buffers(buffers)
        with torch.no_grad():
            for parameter, view in self.copied:
                parameter.copy_(view)
                view.copy_(parameter)
        return self.weights.clone() if self.has_low_precision else start


def _with_own_layout(
    model: nn.Module, device: torch.device, channels_last: bool
) -> set[nn.Parameter]:
    """Return the parameters that need a memory layout of their own: for cuDNN, or channels_last."""
    cudnn = (
        {p for m in model.modules() if isinstance(m, nn.RNNBase) for p in m.parameters()}
        if device.type == "cuda"
        else set()
    )
    return cudnn | {p for p in model.parameters() if channels_last and p.dim() == 4}


def _as_float32(outputs: Any) -> Any:
    """Return the outputs of a model under autocast in float32, so that the loss is computed in float32."""
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
    if type(outputs) in (tuple, list):
        return type(outputs)(map(_as_float32, outputs))
    return outputs


def _clipped(gradients: Tensors, limit: float) -> Tensors:
    """Scale gradients so that their joint L2 norm is at most `limit`."""
    norm = torch.stack([n.float() for n in torch._foreach_norm(gradients)]).norm()
    return torch._foreach_mul(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
