"""Local SGD: what one client does with the global model in a round.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-efficient learning of deep networks from decentralized
data. AISTATS 2017; with momentum from zero in every round: Yu, Jin, Yang: On the linear speedup analysis of communication
efficient momentum SGD. ICML 2019.

    g ← clip(∇L_B(w)) + λw + ρ(w − w_start);  u ← μu + g;  w ← w − ηu;  after H steps the update is w − w_start

ρ is `proximal`: the term of Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated optimization in heterogeneous networks (FedProx).
MLSys 2020, which holds clients near the model that they were given.

With `keep_momentum`, u outlives the round and is zero where the last update was sent and taken: the momentum masking of Sattler,
Wiedemann, Müller, Samek: Sparse binary compression. IJCNN 2019.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .. import seeds
from ..config import RunConfig
from ..errors import ConfigError, ProtocolError
from ..layout import Layout
from ..schedules import LARGEST, MOST
from ..tasks.base import Data, Task
from .channels import may_be_last
from .pooled_convolution import fused


@dataclass(frozen=True)
class LocalSGD:
    """The options of a client's round. Momentum, weight decay and clipping as in torch.optim.SGD and clip_grad_norm_."""

    steps: int = 5
    epochs: int = 0  # passes over the client's data in place of steps; 0 = off
    batch_size: int = 20
    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0  # largest L2 norm of a gradient, before weight decay and momentum; 0 = off
    keep_momentum: bool = False  # from one round to the next, but for what was sent
    augment: bool = False  # the examples, in the task's way
    precision: str = "float32"  # or bfloat16: of forward and backward, by autocast; weights and updates are float32
    proximal: float = 0.0  # ρ, pull towards the weights before the first step; after clipping, as weight decay's towards 0

    def __post_init__(self) -> None:
        if self.keep_momentum and not self.momentum:
            raise ConfigError(
                "--keep-momentum keeps nothing without momentum; give --momentum 0.9 as well"
            )

    @classmethod
    def from_config(cls, config: RunConfig) -> "LocalSGD":
        return cls(
            config.local_steps,
            config.local_epochs,
            config.batch_size,
            config.lr,
            config.momentum,
            config.weight_decay,
            config.clip,
            config.keep_momentum,
            config.augment,
            config.precision,
            config.proximal,
        )

    def as_told(self, lr: float = 1.0, steps: int = 0, batch_size: int = 0) -> "LocalSGD":
        """These options as an assignment changes them for a round: a multiple of the learning rate; steps, in place of epochs too, and
        examples in a step, where they are not 0.

        Raises ProtocolError for a multiple that is not above 0 and finite, and for a rate, steps or examples above what a run may have.
        """
        if not 0 < lr < math.inf:
            raise ProtocolError(
                f"the learning rate is to be taken {lr} times; give a multiple above 0"
            )
        if self.lr * lr > LARGEST:
            raise ProtocolError(
                f"the server asks for a learning rate of {self.lr * lr:g}; give at most {LARGEST:g}"
            )
        for what, count in (("steps", steps), ("examples in a step", batch_size)):
            if not 0 <= count <= MOST:
                raise ProtocolError(f"the server asks for {count} {what}; give 1 to {MOST}")
        return replace(
            self,
            lr=self.lr * lr,
            steps=steps or self.steps,
            epochs=0 if steps else self.epochs,
            batch_size=batch_size or self.batch_size,
        )


@dataclass(frozen=True)
class Traces:
    """What is followed through the steps besides the weights: float32 [n], or [m, n] for a stack of clients; changed in place."""

    momentum: Tensor | None = (
        None  # where the first step starts from, then where the last one left it
    )
    moments: tuple[Tensor, Tensor] | None = (
        None  # to which each step adds its clipped gradient, and the square of it
    )
    pull: Tensor | None = None  # added to every clipped gradient; stays as it is

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
        """Those of a round from `start` [n]. `momentum` is what the client's last round left; it is copied."""
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
        """Those of a cohort, of whom all follow the same."""
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
        """A copy of a stack's rows, or of one of them."""
        momentum = None if self.momentum is None else self.momentum[index].clone()
        moments = self.moments and (self.moments[0][index].clone(), self.moments[1][index].clone())
        return Traces(momentum, moments, None if self.pull is None else self.pull[index])

    def take(self, stack: "Traces", row: int) -> None:
        """Become what a row of a stack is."""
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
        """The momentum before the first step, tensor by tensor, in the precision of the weights."""
        if self.momentum is None:
            return None
        return [
            view.to(weight.dtype)
            for view, weight in zip(layout.views(self.momentum).values(), weights, strict=True)
        ]

    def pulled(self, layout: Layout, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Gradients with the pull."""
        if self.pull is None:
            return gradients
        return [
            gradient + view.to(gradient.dtype)
            for gradient, view in zip(gradients, layout.views(self.pull).values(), strict=True)
        ]

    def step(self, layout: Layout, gradients: Sequence[Tensor]) -> None:
        """Hear of a step's gradients."""
        if self.moments is not None:
            sums, squares = (layout.views(moment).values() for moment in self.moments)
            for total, square, gradient in zip(sums, squares, gradients, strict=True):
                total.add_(gradient)
                square.addcmul_(gradient.to(torch.float32), gradient.to(torch.float32))

    def end(self, layout: Layout, momenta: Sequence[Tensor] | None) -> None:
        """Hear of the momentum after the last step."""
        if self.momentum is not None and momenta is not None:
            for view, momentum in zip(layout.views(self.momentum).values(), momenta, strict=True):
                view.copy_(momentum)


NO_TRACES = Traces()


@dataclass(frozen=True)
class Trained:
    update: Tensor  # float32 [n]: the weights after the last step minus those before the first
    loss: float  # mean over the steps of the loss before the step
    buffers: (
        dict[str, Tensor] | None
    )  # copies of the buffers that training changed; None when there are none


def plan_changes(
    task: Task, sgd: LocalSGD, batches: Sequence[np.ndarray], seed: int, round: int, who: int
) -> np.ndarray | None:
    """What augmentation draws for the examples of `batches`, one batch after the other: [examples, ...]; None where it is off.

    Drawn from (seed, "augment", round, who) alone.
    """
    return task.augment.drawn(batches, seed, round, who) if sgd.augment and task.augment else None


@torch.no_grad()  # under vmap, torch 2.4 gives weights that require gradients
def descend(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor] | None,
    sgd: LocalSGD,
    start: Sequence[Tensor] = (),
) -> Sequence[Tensor] | None:
    """One step of SGD on `weights`, in place; clipping is the caller's. Returns the momenta for the next step, None without momentum.

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
    """The weights before the first step [n] as `descend` wants them, tensor by tensor in the precision of `weights`; () if it does not."""
    if not sgd.proximal:
        return []
    return [
        view.to(weight.dtype)
        for view, weight in zip(layout.views(base).values(), weights, strict=True)
    ]


class SerialEngine:
    """Trains one client after the other in one resident model.

    Takes `model` over: moves it to `device` and turns its float32 parameters into views of one vector. On a CPU the weights of
    convolutions are kept apart from it, channels last, which takes three quarters of the time, unless the model cannot bear it.
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
        convolutions = [m for m in self.model.modules() if isinstance(m, nn.Conv2d)]
        self.channels_last = (
            self.device.type == "cpu" and bool(convolutions) and all(map(may_be_last, convolutions))
        )
        self.fused = fused(self.model) if self.device.type == "cpu" else self.model
        self._arrange()
        self.initial_buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def _arrange(self) -> None:
        """Lay the parameters out."""
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

    def train(
        self,
        start: Tensor,
        data: Data,
        batches: Sequence[np.ndarray],
        sgd: LocalSGD,
        *,
        seed: int = 0,
        round: int = 0,
        who: int = 0,
        buffers: dict[str, Tensor] | None = None,
        traces: Traces = NO_TRACES,
        into: Tensor | None = None,
    ) -> Trained:
        """Local SGD from `start` (float32 [n]) over the batches of `data`, both on the engine's device.

        What the model draws comes from (seed, "dropout", round, who), what augmentation draws from plan_changes; torch's own generators
        are left as they were. `buffers` is what the client's last round returned; what it does not name is as in the initial model. A
        parameter that the loss does not reach has a zero gradient. In a tensor of another precision than float32, the update counts from
        `start` as rounded. The update is written `into` a tensor (float32 [n]) where one is given.
        """
        given = (start, data, batches, sgd, seed, round, who, buffers, traces, into)
        try:
            return self._train(*given)
        except RuntimeError as error:
            if not self.channels_last or "view size is not compatible" not in str(error):
                raise
            self.channels_last = False  # the model takes its activations for contiguous ones
            self._arrange()
            return self._train(*given)

    def _train(
        self,
        start: Tensor,
        data: Data,
        batches: Sequence[np.ndarray],
        sgd: LocalSGD,
        seed: int,
        round: int,
        who: int,
        buffers: dict[str, Tensor] | None,
        traces: Traces,
        into: Tensor | None,
    ) -> Trained:
        base = self._load(start, buffers)
        self.model.train()
        index = torch.from_numpy(np.concatenate(batches)).to(self.device)
        sizes = [len(batch) for batch in batches]
        drawn = plan_changes(self.task, sgd, batches, seed, round, who)
        changes = (
            repeat(None) if drawn is None else torch.from_numpy(drawn).to(self.device).split(sizes)
        )
        losses = []
        momenta = traces.momenta(self.layout, self.parameters)
        start = anchors(self.layout, base, self.parameters, sgd)
        with _drawing_from(seeds.key(seed, "dropout", round, who), self.device):
            for rows, change in zip(index.split(sizes), changes, strict=False):
                inputs = data.inputs.index_select(0, rows)
                inputs = inputs if change is None else self.task.augment.apply(inputs, change)
                loss = self.task.loss(
                    self._outputs(inputs, sgd), data.targets.index_select(0, rows)
                )
                losses.append(loss.detach())
                gradients = torch.autograd.grad(
                    loss, self.parameters, allow_unused=True, materialize_grads=True
                )
                with torch.no_grad():
                    gradients = _clipped(gradients, sgd.clip) if sgd.clip else gradients
                    traces.step(self.layout, gradients)
                    momenta = descend(
                        self.parameters,
                        traces.pulled(self.layout, gradients),
                        momenta,
                        sgd,
                        start,
                    )
        traces.end(self.layout, momenta)
        for parameter, view in self.apart:
            view.copy_(parameter.detach())
        update = torch.sub(self.weights, base, out=into)
        return Trained(
            update, torch.stack(losses).mean(dtype=torch.float32).item(), self._changed_buffers()
        )

    def _outputs(self, inputs: Tensor, sgd: LocalSGD) -> Any:
        """Return what the model gives, in float32."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=sgd.precision == "bfloat16"):
            outputs = self.fused(inputs)
        return _full(outputs) if sgd.precision == "bfloat16" else outputs

    def _load(self, start: Tensor, buffers: dict[str, Tensor] | None) -> Tensor:
        """Puts weights and buffers in place. Returns the weights as they are then: `start`, rounded where the model is coarser."""
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
    """Parameters that are wanted in an order of their own: by cuDNN, or channels last."""
    cudnn = (
        {p for m in model.modules() if isinstance(m, nn.RNNBase) for p in m.parameters()}
        if device.type == "cuda"
        else set()
    )
    return cudnn | {p for p in model.parameters() if channels_last and p.dim() == 4}


def _full(outputs: Any) -> Any:
    """What a model gave under autocast, in float32, so that the loss is."""
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.dtype == torch.bfloat16 else outputs
    if isinstance(outputs, tuple | list):
        return type(outputs)(map(_full, outputs))
    return outputs


def _clipped(gradients: Sequence[Tensor], limit: float) -> Sequence[Tensor]:
    norm = torch.stack([n.float() for n in torch._foreach_norm(gradients)]).norm()
    return torch._foreach_mul(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))


@contextmanager
def _drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """torch's global generators, seeded for a while: a thirtieth of what torch.random.fork_rng costs."""
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


class Evaluation(NamedTuple):
    """Loss, accuracy and metrics of a model on the test data."""

    loss: float | None  # mean over the examples
    accuracy: float | None  # likewise; None: the task has none
    metrics: Mapping[str, float]  # the task's own


def evaluate(
    task: Task,
    model: nn.Module,
    layout: Layout,
    weights: Tensor,
    data: Data,
    device: torch.device | str,
    batch: int = 0,
) -> Evaluation:
    """Evaluate `weights` [n] on `data`, which is on `device`.

    Writes the weights into `model`, moved to `device` and left in eval mode; its buffers are used as they are. A forward pass takes
    `batch` examples, by default 1,000 on a GPU and 250 on a CPU, whose caches then hold the activations. The task's metrics are called
    once, with the outputs and targets of all examples on the CPU.
    """
    model = model.to(device).eval()
    layout.scatter(weights, model)
    means = [task.loss, *([task.accuracy] if task.accuracy else [])]
    sums, kept = [0.0] * len(means), []
    pieces = -(-len(data) // (batch or (250 if torch.device(device).type == "cpu" else 1000)))
    with torch.inference_mode():
        for inputs, targets in zip(
            data.inputs.tensor_split(pieces), data.targets.tensor_split(pieces), strict=True
        ):
            outputs, share = model(inputs), len(inputs) / len(data)
            sums = [
                so_far + share * float(measure(outputs, targets))
                for so_far, measure in zip(sums, means, strict=True)
            ]
            if task.metrics:
                kept.append(outputs.cpu())
        if task.metrics:
            whole = torch.cat(kept), data.targets.cpu()
        metrics = {name: float(measure(*whole)) for name, measure in task.metrics.items()}
    loss, accuracy = sums if task.accuracy else (sums[0], None)
    return Evaluation(loss, accuracy, metrics)
