"""Local training of one client in a round: by SGD, or by any optimizer of torch.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-efficient learning of deep networks from decentralized
data. AISTATS 2017; with momentum from zero in every round: Yu, Jin, Yang: On the linear speedup analysis of communication
efficient momentum SGD. ICML 2019.

    g ← clip(∇L_B(w)) + λw + ρ(w − w_start);  u ← μu + g;  w ← w − ηu;  after H steps the update is w − w_start

ρ is `proximal`, the proximal term of FedProx, which keeps clients near the global model: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith:
Federated optimization in heterogeneous networks. MLSys 2020.

With `keep_momentum`, a client keeps u between rounds. Coordinates whose update was sent and accepted start from zero, the momentum
masking of Sattler, Wiedemann, Müller, Samek: Sparse binary compression. IJCNN 2019.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .. import seeds
from ..config import RunConfig
from ..errors import ConfigError, ProtocolError
from ..layout import Layout
from ..local_optimizer import SGD
from ..local_optimizer import read as read_optimizer
from ..schedules import MAX_COUNT, MAX_FLOAT, RATE, OptionSchedule
from ..tasks.base import Task, predictions
from ..tasks.data import Batch, Examples
from .channels import NOT_CONTIGUOUS, channels_may_be_last
from .pooled_convolution import fused


@dataclass(frozen=True)
class LocalSGD:
    """The options of local training. Momentum and weight decay are those of torch.optim.SGD, clipping is that of clip_grad_norm_."""

    steps: int = 5
    epochs: int = 0  # passes over the client's data, instead of steps; 0 = off
    batch_size: int = 20
    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0  # largest L2 norm of the gradient, before weight decay and momentum; 0 = off
    keep_momentum: bool = False  # between rounds, except for coordinates that were sent
    augment: bool = False  # change examples by the task's augmentation
    precision: str = (
        "float32"  # or bfloat16, float16: autocast of forward and backward; weights stay float32
    )
    proximal: float = 0.0  # ρ; added after clipping, like weight decay
    optimizer: str = SGD  # spec string of a torch optimizer
    optimizer_state: str = "fresh"  # "fresh" in each round, or "kept" by the client
    accumulate: int = 1  # number of batches whose gradients are averaged in a step
    step_schedule: str | None = None  # multiple of the learning rate by step, such as "cosine"
    lr_multiple: float = 1.0  # the server's multiple of the learning rate in this round

    def __post_init__(self) -> None:
        if self.keep_momentum and not self.momentum:
            raise ConfigError(
                "--keep-momentum keeps nothing without momentum; give --momentum 0.9 as well"
            )

    @classmethod
    def from_config(cls, config: RunConfig) -> "LocalSGD":
        """Return the options of a run. Options in `--optimizer sgd:…` replace the flags of the same name."""
        optimizer = read_optimizer(config.optimizer)
        own = dict(optimizer.options) if optimizer.plain_sgd else {}
        return cls(
            config.local_steps,
            config.local_epochs,
            config.batch_size * config.accumulate,
            config.learning_rate,
            own.get("momentum", config.momentum),
            own.get("weight_decay", config.weight_decay),
            config.clip,
            config.keep_momentum,
            config.augment,
            config.precision,
            config.proximal,
            config.optimizer,
            config.optimizer_state,
            config.accumulate,
            config.step_schedule,
        )

    @property
    def plain(self) -> bool:
        """Whether steps are made by `descend`, which also trains several clients at once."""
        return (
            read_optimizer(self.optimizer).plain_sgd
            and self.accumulate == 1
            and not self.step_schedule
            and self.precision != "float16"
        )

    @property
    def keeps_state(self) -> bool:
        """Whether a client keeps the state of its torch optimizer between rounds."""
        return self.optimizer_state == "kept"

    def for_round(self, lr: float = 1.0, steps: int = 0, batch_size: int = 0) -> "LocalSGD":
        """Return these options with an assignment's changes for a round.

        `lr` is a multiple of the learning rate. `steps` and `batch_size` of 0 change nothing; other steps replace epochs, too. Raises
        ProtocolError unless the multiple is positive and finite, or if a value is above the limits of a run.
        """
        if not 0 < lr < math.inf:
            raise ProtocolError(
                f"the learning rate is to be taken {lr} times; give a multiple above 0"
            )
        if self.lr * lr > MAX_FLOAT:
            raise ProtocolError(
                f"the server asks for a learning rate of {self.lr * lr:g}; give at most {MAX_FLOAT:g}"
            )
        for what, count in (("steps", steps), ("examples in a step", batch_size)):
            if not 0 <= count <= MAX_COUNT:
                raise ProtocolError(f"the server asks for {count} {what}; give 1 to {MAX_COUNT}")
        return replace(
            self,
            lr=self.lr * lr,
            lr_multiple=self.lr_multiple * lr,
            steps=steps or self.steps,
            epochs=0 if steps else self.epochs,
            batch_size=batch_size or self.batch_size,
        )


@dataclass(frozen=True)
class Traces:
    """Vectors that steps update or use besides the weights: float32 [n], or [m, n] for a stack of clients. Updated in place."""

    momentum: Tensor | None = None  # before the first step, then after the last one
    moments: tuple[Tensor, Tensor] | None = None  # sums of clipped gradients, and of their squares
    pull: Tensor | None = None  # constant, added to every clipped gradient

    def __bool__(self) -> bool:
        return self.momentum is not None or self.moments is not None or self.pull is not None

    @classmethod
    def begin(
        cls,
        sgd: LocalSGD,
        needs_moments: bool,
        start: Tensor,
        momentum: Tensor | None,
        pull: Tensor | None = None,
    ) -> "Traces":
        """Return the traces of a round from `start` [n]. `momentum` is that after the client's last round; it is copied."""
        if not sgd.keep_momentum and not needs_moments and pull is None:
            return NO_TRACES
        kept = (
            (torch.zeros_like(start) if momentum is None else momentum.to(start.device, copy=True))
            if sgd.keep_momentum
            else None
        )
        moments = (torch.zeros_like(start), torch.zeros_like(start)) if needs_moments else None
        return cls(kept, moments, None if pull is None else pull.to(start.device))

    @classmethod
    def stack(cls, traces: Sequence["Traces"]) -> "Traces":
        """Stack the traces of clients, which all have the same vectors."""
        first = traces[0]
        momentum = None if first.momentum is None else torch.stack([t.momentum for t in traces])
        moments = (
            None
            if first.moments is None
            else tuple(
                torch.stack(column) for column in zip(*(t.moments for t in traces), strict=True)
            )
        )
        return cls(
            momentum, moments, None if first.pull is None else torch.stack([t.pull for t in traces])
        )

    def rows(self, index: Tensor | int) -> "Traces":
        """Return a copy of some rows of a stack, or of one row."""
        momentum = None if self.momentum is None else self.momentum[index].clone()
        moments = self.moments and (self.moments[0][index].clone(), self.moments[1][index].clone())
        return Traces(momentum, moments, None if self.pull is None else self.pull[index])

    def take(self, stack: "Traces", row: int) -> None:
        """Copy a row of a stack into these traces."""
        if self.momentum is not None:
            self.momentum.copy_(stack.momentum[row])
        for mine, whole in zip(self.moments or (), stack.moments or (), strict=True):
            mine.copy_(whole[row])

    def put(self, index: Tensor, rows: "Traces") -> None:
        """Write rows back into a stack."""
        if self.momentum is not None:
            self.momentum[index] = rows.momentum
        for whole, part in zip(self.moments or (), rows.moments or (), strict=True):
            whole[index] = part

    def momenta(self, layout: Layout, weights: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the momentum before the first step, one tensor for each weight, in its precision."""
        if self.momentum is None:
            return None
        return [
            view.to(weight.dtype)
            for view, weight in zip(layout.views(self.momentum).values(), weights, strict=True)
        ]

    def pulled(self, layout: Layout, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the gradients plus the pull."""
        if self.pull is None:
            return gradients
        return [
            gradient + view.to(gradient.dtype)
            for gradient, view in zip(gradients, layout.views(self.pull).values(), strict=True)
        ]

    def step(self, layout: Layout, gradients: Sequence[Tensor]) -> None:
        """Add the gradients of a step to the moments."""
        if self.moments is not None:
            sums, squares = (layout.views(moment).values() for moment in self.moments)
            for total, square, gradient in zip(sums, squares, gradients, strict=True):
                total.add_(gradient)
                square.addcmul_(gradient.to(torch.float32), gradient.to(torch.float32))

    def end(self, layout: Layout, momenta: Sequence[Tensor] | None) -> None:
        """Store the momentum after the last step."""
        if self.momentum is not None and momenta is not None:
            for view, momentum in zip(layout.views(self.momentum).values(), momenta, strict=True):
                view.copy_(momentum)


NO_TRACES = Traces()


class Job(NamedTuple):
    """The local training of one client in a round."""

    round: int
    client: int  # logical id, or the number of a part of the data; random draws depend on it
    batches: Sequence[np.ndarray]  # positions in the data, one array for each step
    buffers: dict[str, Tensor] | None = None  # those of the client after its last round
    traces: Traces = NO_TRACES  # float32 [n], changed in place
    rows: np.ndarray | None = None  # positions of all examples of the client, for a train_fn
    state: dict[str, Any] | None = None  # of the optimizer or the user's loop after the last round


@dataclass(frozen=True)
class LocalUpdate:
    """The update of one client, and the other results of its training."""

    update: Tensor  # float32 [n]: the weights after the last step minus those before the first
    loss: float  # mean over the steps of the loss before the step
    buffers: dict[str, Tensor] | None  # copies of the buffers that training changed, or None
    state: dict[str, Any] | None = (
        None  # of the optimizer or the user's loop, if the client keeps it
    )
    metrics: Mapping[str, float] = field(default_factory=dict)  # further numbers of the user's loop
    examples: int | None = None  # number that the user's loop reports; None: all of the client


class ClientEngine(ABC):
    """Trains one client at a time, in one model that stays in memory."""

    device: torch.device

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
        buffers: dict[str, Tensor] | None = None,
        traces: Traces = NO_TRACES,
        rows: np.ndarray | None = None,
        state: dict[str, Any] | None = None,
    ) -> LocalUpdate:
        """Call `train_job` with a Job of these fields."""
        job = Job(round, client, batches, buffers, traces, rows, state)
        return self.train_job(start, data, job, sgd, seed)

    @abstractmethod
    def train_job(
        self,
        start: Tensor,
        data: Examples,
        job: Job,
        sgd: LocalSGD,
        seed: int,
        into: Tensor | None = None,
    ) -> LocalUpdate:
        """Train a client from `start` (float32 [n]) on `data`, both on the engine's device.

        The update is written into `into` (float32 [n]) if it is given. Buffers that the job does not have are those of the initial
        model. Random draws of the model depend on the seed, the round and the client only; torch's generators are left unchanged.
        """


def plan_changes(
    task: Task, sgd: LocalSGD, batches: Sequence[np.ndarray], seed: int, round: int, client: int
) -> np.ndarray | None:
    """Return the random numbers of augmentation for the examples of all batches, [examples, ...], or None without augmentation.

    They depend on the seed, the round and the client only.
    """
    return (
        task.augment.drawn(batches, seed, round, client) if sgd.augment and task.augment else None
    )


@torch.no_grad()  # under vmap, torch 2.4 gives weights that require gradients
def descend(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor] | None,
    sgd: LocalSGD,
    start: Sequence[Tensor] = (),
) -> Sequence[Tensor] | None:
    """Take a step of SGD on `weights`, in place, with gradients that are already clipped. Return the momenta, None without momentum.

    `start`: the weights before the first step, for the proximal term.
    """
    if sgd.weight_decay:
        gradients = torch._foreach_add(gradients, weights, alpha=sgd.weight_decay)
    if sgd.proximal:
        gradients = torch._foreach_add(
            gradients, torch._foreach_sub(weights, start), alpha=sgd.proximal
        )
    if sgd.momentum and momenta is not None:
        gradients = torch._foreach_add(gradients, momenta, alpha=sgd.momentum)
    torch._foreach_add_(weights, gradients, alpha=-sgd.lr)
    return gradients if sgd.momentum else None


def anchors(layout: Layout, base: Tensor, weights: Sequence[Tensor], sgd: LocalSGD) -> list[Tensor]:
    """Return the weights before the first step, one tensor for each weight in its precision; empty without a proximal term."""
    if not sgd.proximal:
        return []
    return [
        view.to(weight.dtype)
        for view, weight in zip(layout.views(base).values(), weights, strict=True)
    ]


class PlainSteps:
    """Steps of SGD by `descend`, on parameters that are views of one vector."""

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[Tensor],
        sgd: LocalSGD,
        traces: Traces,
        anchor: Sequence[Tensor],
    ):
        self.layout, self.parameters, self.sgd = layout, parameters, sgd
        self.traces, self.anchor = traces, anchor
        self.momenta: Sequence[Tensor] | None = traces.momenta(layout, parameters)

    def step(self, batch: Batch, loss_of: Callable[[Batch], Tensor]) -> Tensor:
        """Take a step on a batch. Return its loss before the step, without a gradient."""
        loss = loss_of(batch)
        gradients = torch.autograd.grad(
            loss, self.parameters, allow_unused=True, materialize_grads=True
        )
        with torch.no_grad():
            if self.sgd.clip:
                gradients = _clipped(gradients, self.sgd.clip)
            self.traces.step(self.layout, gradients)
            pulled = self.traces.pulled(self.layout, gradients)
            self.momenta = descend(self.parameters, pulled, self.momenta, self.sgd, self.anchor)
        return loss.detach()

    def end(self) -> None:
        self.traces.end(self.layout, self.momenta)


class TorchSteps:
    """Steps of a torch optimizer: the task's own, or that of --optimizer.

    Gradients are accumulated over `sgd.accumulate` pieces of a batch, then clipped. `count` is the number of steps. `state` is the
    optimizer's state after the client's last round; learning rates and other settings are always those of this round.
    """

    def __init__(
        self,
        task: Task,
        layout: Layout,
        parameters: Sequence[Tensor],
        sgd: LocalSGD,
        traces: Traces,
        anchor: Sequence[Tensor],
        state: dict[str, Any] | None,
        count: int,
    ):
        self.layout, self.parameters, self.sgd = layout, parameters, sgd
        self.traces, self.anchor = traces, anchor
        if task.optimizer is not None:
            self.optimizer = task.optimizer(parameters)
            for group in self.optimizer.param_groups:
                group["lr"] *= sgd.lr_multiple
        else:
            self.optimizer = read_optimizer(sgd.optimizer).make(
                parameters, sgd.lr, sgd.momentum, sgd.weight_decay
            )
        if state:
            groups = self.optimizer.state_dict()["param_groups"]
            own = {"state": copy.deepcopy(state), "param_groups": groups}
            self.optimizer.load_state_dict(own)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.schedule = OptionSchedule(
            "--step-schedule", sgd.step_schedule, RATE, 1.0, horizon=count
        )
        device = parameters[0].device.type
        self.scaler = torch.amp.GradScaler(device, enabled=sgd.precision == "float16")
        self.taken = 0

    def step(self, batch: Batch, loss_of: Callable[[Batch], Tensor]) -> Tensor:
        """Take a step on a batch. Return its mean loss before the step, without a gradient."""
        self.taken += 1
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * self.schedule.at(self.taken)
        self.optimizer.zero_grad()
        whole, total = len(batch), 0.0
        for piece in batch.split(-(-whole // self.sgd.accumulate)):
            loss = loss_of(piece) * (len(piece) / whole)
            self.scaler.scale(loss).backward()
            total = total + loss.detach()
        self.scaler.unscale_(self.optimizer)
        self._change_gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return total

    @torch.no_grad()
    def _change_gradients(self) -> None:
        """Clip the gradients, then add the terms of FedProx and of the strategy."""
        if self.sgd.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.sgd.clip)
        if not (self.anchor or self.traces):
            return
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self.parameters]
        self.traces.step(self.layout, gradients)
        pulled = self.traces.pulled(self.layout, gradients)
        if self.anchor:
            away = torch._foreach_sub(self.parameters, self.anchor)
            pulled = torch._foreach_add(pulled, away, alpha=self.sgd.proximal)
        for parameter, gradient in zip(self.parameters, pulled, strict=True):
            parameter.grad = gradient

    def end(self) -> None:
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any] | None:
        """Return the optimizer's state if the client keeps it."""
        return self.optimizer.state_dict()["state"] if self.sgd.keeps_state else None


class SerialEngine(ClientEngine):
    """Trains one client at a time by SGD or a torch optimizer.

    Moves `model` to `device` and makes its float32 parameters views of one vector. On a CPU, the weights of convolutions are separate
    tensors in the channels_last format, with which training takes three quarters of the time, if the model works in that format.
    """

    def __init__(self, task: Task, model: nn.Module, layout: Layout, device: torch.device | str):
        self.task = task
        self.model = model.to(device)
        self.layout = layout
        self.device = torch.device(device)
        self.weights = layout.gather(self.model)
        parameters = dict(self.model.named_parameters())
        self.parameters = [parameters[e.name] for e in layout]
        self.coarse = any(parameter.dtype != torch.float32 for parameter in self.parameters)
        self.channels_last = self.device.type == "cpu" and channels_may_be_last(self.model)
        self.fused = fused(self.model) if self.device.type == "cpu" else self.model
        self._arrange()
        self.initial_buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def _arrange(self) -> None:
        """Make parameters views of `weights`, except those that need a memory layout of their own."""
        kept = _kept_apart(self.model, self.device, self.channels_last)
        self.apart = []  # (parameter, its slice of `weights`), copied in and out
        self.model.to(
            memory_format=torch.channels_last if self.channels_last else torch.contiguous_format
        )
        for parameter, view in zip(
            self.parameters, self.layout.views(self.weights).values(), strict=True
        ):
            if parameter.dtype == torch.float32 and parameter not in kept:
                parameter.data = view
            else:
                self.apart.append((parameter, view))

    def train_job(
        self,
        start: Tensor,
        data: Examples,
        job: Job,
        sgd: LocalSGD,
        seed: int,
        into: Tensor | None = None,
    ) -> LocalUpdate:
        """Train by SGD or a torch optimizer on the batches of the job; see `ClientEngine.train_job`.

        A parameter that the loss does not depend on has a zero gradient. The weights of a tensor with lower precision than float32 are
        rounded before the first step, and the update is the difference from the rounded weights.
        """
        try:
            return self._train(start, data, job, sgd, seed, into)
        except RuntimeError as error:
            if not self.channels_last or NOT_CONTIGUOUS not in str(error):
                raise
            self.channels_last = False  # the model needs contiguous activations
            self._arrange()
            return self._train(start, data, job, sgd, seed, into)

    def _train(
        self,
        start: Tensor,
        data: Examples,
        job: Job,
        sgd: LocalSGD,
        seed: int,
        into: Tensor | None,
    ) -> LocalUpdate:
        batches = job.batches
        base = self._load(start, job.buffers)
        self.model.train()
        index = torch.from_numpy(np.concatenate(batches)).to(self.device)
        sizes = [len(batch) for batch in batches]
        drawn = plan_changes(self.task, sgd, batches, seed, job.round, job.client)
        changes = (
            repeat(None) if drawn is None else torch.from_numpy(drawn).to(self.device).split(sizes)
        )
        losses = []
        plain = sgd.plain and self.task.optimizer is None
        anchor = anchors(self.layout, base, self.parameters, sgd)
        steps = (
            PlainSteps(self.layout, self.parameters, sgd, job.traces, anchor)
            if plain
            else TorchSteps(
                self.task,
                self.layout,
                self.parameters,
                sgd,
                job.traces,
                anchor,
                job.state,
                len(batches),
            )
        )
        with seeded_torch(seeds.key(seed, "dropout", job.round, job.client), self.device):
            for rows, change in zip(index.split(sizes), changes, strict=False):
                batch = data.batch(rows)
                if change is not None:
                    batch = Batch(self.task.augment.apply(batch.inputs, change), batch.targets)
                losses.append(steps.step(batch, lambda piece: self._loss(piece, sgd)))
        steps.end()
        for parameter, view in self.apart:
            view.copy_(parameter.detach())
        update = torch.sub(self.weights, base, out=into)
        return LocalUpdate(
            update,
            torch.stack(losses).mean(dtype=torch.float32).item(),
            self._changed_buffers(),
            None if plain else steps.state(),
        )

    def _loss(self, batch: Batch, sgd: LocalSGD) -> Tensor:
        """Return the loss of a batch. The forward pass uses the precision of `sgd`, the loss float32."""
        if sgd.precision == "float32":
            outputs = self.task.outputs(self.fused, batch)
        else:
            with torch.autocast(self.device.type, getattr(torch, sgd.precision)):
                outputs = self.task.outputs(self.fused, batch)
                if not self.task.returns_loss(outputs):
                    outputs = _full(predictions(outputs))
        return self.task.loss_of(outputs, batch.targets)

    def _load(self, start: Tensor, buffers: dict[str, Tensor] | None) -> Tensor:
        """Load weights and buffers. Return the loaded weights: `start`, rounded in tensors of lower precision."""
        self.weights.copy_(start)
        for name, buffer in self.model.named_buffers():
            buffer.copy_((buffers or {}).get(name, self.initial_buffers[name]))
        with torch.no_grad():
            for parameter, view in self.apart:
                parameter.copy_(view)
                view.copy_(parameter)
        return self.weights.clone() if self.coarse else start

    def _changed_buffers(self) -> dict[str, Tensor] | None:
        changed = {
            name: b.clone()
            for name, b in self.model.named_buffers()
            if not torch.equal(b, self.initial_buffers[name])
        }
        return changed or None


def _kept_apart(model: nn.Module, device: torch.device, channels_last: bool) -> set[nn.Parameter]:
    """Return the parameters that need a memory layout of their own: for cuDNN, or channels_last."""
    cudnn = (
        {p for m in model.modules() if isinstance(m, nn.RNNBase) for p in m.parameters()}
        if device.type == "cuda"
        else set()
    )
    return cudnn | {p for p in model.parameters() if channels_last and p.dim() == 4}


def _full(outputs: Any) -> Any:
    """Return what a model gave under autocast in float32, so that the loss is."""
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
    if type(outputs) in (tuple, list):
        return type(outputs)(map(_full, outputs))
    return outputs


def _clipped(gradients: Sequence[Tensor], limit: float) -> Sequence[Tensor]:
    norm = torch.stack([n.float() for n in torch._foreach_norm(gradients)]).norm()
    return torch._foreach_mul(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))


@contextmanager
def seeded_torch(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators within a `with` block. It takes a thirtieth of the time of torch.random.fork_rng."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(
            torch.cuda.default_generators[
                torch.cuda.current_device() if device.index is None else device.index
            ]
        )
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
