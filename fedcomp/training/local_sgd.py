"""The options of local training, the batches of a client, and the steps of SGD.

Local SGD is from McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of deep networks from decentralized
data", AISTATS 2017. By default, momentum starts from zero in every round, as in Yu, Jin, Yang, "On the linear speedup analysis of
communication efficient momentum SGD", ICML 2019.

    g ← clip(∇L_B(w)) + c + λw + ρ(w − w_start);  u ← μu + g;  w ← w − ηu

After the last step of the round, the update is w − w_start. Here, w are the weights (w_start at the start of the round), L_B is the mean
loss of a batch B, λ is the weight decay, u is the momentum vector with the coefficient μ, and η is the learning rate. The proximal term of
FedProx, with the weight ρ (`proximal`), keeps clients near the global model (Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated
optimization in heterogeneous networks", MLSys 2020). The gradient correction c is 0, unless a strategy such as SCAFFOLD sets it.

With `keep_momentum`, a client keeps u between rounds, but u restarts from zero at coordinates whose update the server accepted. This
momentum masking is from Sattler, Wiedemann, Müller, Samek, "Sparse binary compression", IJCNN 2019.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import seeds
from ..config import RunConfig
from ..errors import ConfigError, DataError, ProtocolError
from ..layout import Layout
from ..local_optimizer import SGD
from ..local_optimizer import read as read_optimizer
from ..schedules import MAX_COUNT, MAX_FLOAT
from ..tasks.base import Task

Tensors = list[Tensor] | tuple[Tensor, ...]  # argument types of the functions torch._foreach_*


@dataclass(frozen=True)
class LocalSGD:
    """The options of local training. Momentum and weight decay work as in torch.optim.SGD, clipping as in clip_grad_norm_."""

    steps: int = 5
    epochs: int = 0  # number of passes over the client's data, used instead of `steps`; 0 = off
    batch_size: int = 20  # examples in a step; with `accumulate`, in all pieces together
    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0  # maximum L2 norm of the gradient, before weight decay and momentum; 0 = off
    keep_momentum: bool = False  # keep momentum between rounds, with momentum masking
    augment: bool = False  # augment examples with the task's `augment`
    # Precision of the forward and backward passes: float32, bfloat16 or float16. Weights stay float32.
    precision: str = "float32"
    proximal: float = 0.0  # weight ρ of FedProx's proximal term; 0 = off
    optimizer: str = SGD  # name and options of a torch optimizer
    optimizer_state: str = "fresh"  # "fresh": reset the state in every round; "kept": keep it
    accumulate: int = 1  # number of pieces into which a batch is split to save memory
    step_schedule: str | None = (
        None  # learning rate schedule over the local steps, such as "cosine"
    )
    lr_multiple: float = 1.0  # the server's factor for the learning rate, already included in `lr`

    def __post_init__(self) -> None:
        if self.keep_momentum and not self.momentum:
            raise ConfigError(
                "--keep-momentum has no effect without momentum; give --momentum 0.9 as well"
            )

    @classmethod
    def from_config(cls, config: RunConfig) -> "LocalSGD":
        """Return the options of local training in `config`. Options in `--optimizer sgd:…` replace --momentum and --weight-decay."""
        optimizer = read_optimizer(config.optimizer)
        replaced = dict(optimizer.options) if optimizer.is_plain_sgd else {}
        return cls(
            config.local_steps,
            config.local_epochs,
            config.batch_size * config.accumulate,
            config.learning_rate,
            replaced.get("momentum", config.momentum),
            replaced.get("weight_decay", config.weight_decay),
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
    def uses_descend(self) -> bool:
        """Whether the class `Descent` computes the local steps; otherwise a torch optimizer computes them."""
        return (
            read_optimizer(self.optimizer).is_plain_sgd
            and self.accumulate == 1
            and not self.step_schedule
            and self.precision != "float16"
        )

    def for_round(self, lr: float = 1.0, steps: int = 0, batch_size: int = 0) -> "LocalSGD":
        """Return these options with the changes that the server assigned for a round.

        `lr` multiplies the learning rate. `steps` and `batch_size` (without `accumulate`) replace the options of these names, unless they
        are 0; `steps` also replaces `epochs`. Raises ProtocolError if `lr` is not positive and finite, or if a value exceeds the limits of
        a run.
        """
        if not 0 < lr < math.inf:
            raise ProtocolError(
                f"the server asks for {lr} times the learning rate; expected a positive, finite factor"
            )
        if self.lr * lr > MAX_FLOAT:
            raise ProtocolError(
                f"the server asks for the learning rate {self.lr * lr:g}; expected at most {MAX_FLOAT:g}"
            )
        for unit, count in (("steps", steps), ("examples in a batch", batch_size)):
            if not 0 <= count <= MAX_COUNT:
                raise ProtocolError(
                    f"the server asks for {count} {unit}; expected 1 to {MAX_COUNT}"
                )
        return replace(
            self,
            lr=self.lr * lr,
            lr_multiple=self.lr_multiple * lr,
            steps=steps or self.steps,
            epochs=0 if steps else self.epochs,
            batch_size=batch_size * self.accumulate or self.batch_size,
        )


class Traces(NamedTuple):
    """The vectors, besides the weights, that local steps use: float32 [numel], or [clients, numel] for a stack of clients."""

    # Momentum before the first step. `Descent.finish` overwrites it with the momentum after the last step.
    momentum: Tensor | None = None
    sums: Tensor | None = None  # sums of clipped gradients
    squares: Tensor | None = None  # sums of the squares of clipped gradients
    correction: Tensor | None = None  # constant that is added to every clipped gradient

    def __bool__(self) -> bool:
        return any(vector is not None for vector in self)

    @property
    def moments(self) -> tuple[Tensor, Tensor] | None:
        """The pair (`sums`, `squares`), or None if the run's error feedback does not need these sums."""
        return None if self.sums is None or self.squares is None else (self.sums, self.squares)

    @classmethod
    def for_round(
        cls,
        sgd: LocalSGD,
        needs_moments: bool,
        start: Tensor,
        momentum: Tensor | None,
        correction: Tensor | None = None,
    ) -> "Traces":
        """Return the `Traces` of a round that starts from the weights `start` [numel].

        `momentum` is the momentum after the client's previous round, or None in its first round. The `Traces` contain a copy of it.
        """
        if not sgd.keep_momentum:
            momentum = None
        elif momentum is None:
            momentum = torch.zeros_like(start)
        else:
            momentum = momentum.to(start.device, copy=True)
        sums, squares = (torch.zeros_like(start) if needs_moments else None for _ in range(2))
        correction = None if correction is None else correction.to(start.device)
        return cls(momentum, sums, squares, correction)

    @classmethod
    def stack(cls, traces: Sequence["Traces"]) -> "Traces":
        """Stack the `Traces` of several clients, which must have the same fields."""
        kinds = zip(*traces, strict=True)
        return cls(*(None if vectors[0] is None else torch.stack(vectors) for vectors in kinds))

    def map(self, function: Callable[[Any], Any]) -> "Traces":
        """Apply `function` to each vector, and return the results as `Traces`."""
        return Traces(*(None if vector is None else function(vector) for vector in self))

    def copy_from(self, source: "Traces") -> None:
        """Copy the vectors that training changes (all but the correction) from `source`, which may be on another device."""
        for old, new in zip(self[:3], source[:3], strict=True):
            if old is not None and new is not None and old is not new:
                old.copy_(new)


NO_TRACES = Traces()


class Descent:
    """Steps of SGD that change the weights of one client, or of a stack of clients, in place.

    `weights` has a tensor for each parameter in `layout`, in the model's precision. For a stack, each tensor has a first axis of clients.
    `base` [numel] are the weights before the first step.
    """

    def __init__(
        self, layout: Layout, weights: Sequence[Tensor], sgd: LocalSGD, traces: Traces, base: Tensor
    ):
        def views(vector: Tensor | None) -> Tensors | None:
            """Split a vector [numel] into tensors with the shapes and precisions of `weights`."""
            if vector is None:
                return None
            tensors = layout.views(vector).values()
            return [view.to(weight.dtype) for view, weight in zip(tensors, weights, strict=True)]

        self.layout, self.sgd, self.traces = layout, sgd, traces
        self.weights, self.momenta = list(weights), views(traces.momentum)
        self.correction = views(traces.correction)
        self.anchors = views(base) if sgd.proximal else None

    @torch.no_grad()  # under vmap in torch 2.4, the weights require gradients
    def step(self, gradients: Tensors) -> None:
        """Take a step with gradients that are already clipped."""
        gradients = self.adjusted(gradients, self.sgd.weight_decay)
        if self.sgd.momentum and self.momenta is not None:
            gradients = torch._foreach_add(gradients, self.momenta, alpha=self.sgd.momentum)
        torch._foreach_add_(self.weights, gradients, alpha=-self.sgd.lr)
        if self.sgd.momentum:
            self.momenta = gradients

    def adjusted(self, gradients: Tensors, weight_decay: float = 0.0) -> Tensors:
        """Return clipped gradients plus correction, weight decay and proximal term.

        Also add the clipped gradients to `traces.sums`, and their squares to `traces.squares`.
        """
        if self.traces.moments is not None:
            sums, squares = (self.layout.views(moment).values() for moment in self.traces.moments)
            for total, square, gradient in zip(sums, squares, gradients, strict=True):
                total.add_(gradient)
                square.addcmul_(gradient.to(torch.float32), gradient.to(torch.float32))
        if self.correction is not None:
            gradients = torch._foreach_add(gradients, self.correction)
        if weight_decay:
            gradients = torch._foreach_add(gradients, self.weights, alpha=weight_decay)
        if self.anchors is not None:
            distances = torch._foreach_sub(self.weights, self.anchors)
            gradients = torch._foreach_add(gradients, distances, alpha=self.sgd.proximal)
        return gradients

    def finish(self) -> None:
        """Store the momentum after the last step, if the client keeps it."""
        if self.traces.momentum is not None and self.momenta is not None:
            views = self.layout.views(self.traces.momentum).values()
            for view, momentum in zip(views, self.momenta, strict=True):
                view.copy_(momentum)


def plan_batches(
    sgd: LocalSGD, shard: np.ndarray, seed: int, round: int, client: int
) -> list[np.ndarray]:
    """Return the batches of a client in a round: for each step, an int64 array of indices into the data.

    `shard` contains the indices of the client's examples. A batch has `batch_size` examples, or all examples of a smaller shard. The
    examples are shuffled before each pass over the shard. With `steps`, a pass omits the last examples if they do not
    fill a batch. With `epochs`, the last batch of a pass has these examples. Raises DataError if the shard is empty.
    """
    if not len(shard):
        raise DataError(
            f"client {client} has no examples; give fewer --clients or another --partition"
        )
    generator = seeds.generator(seed, "batches", round, client)
    n, size, batches = len(shard), min(sgd.batch_size, len(shard)), []
    for _ in range(sgd.epochs):
        batches += np.split(shard[generator.permutation(n)], range(size, n, size))
    while not sgd.epochs and len(batches) < sgd.steps:
        whole = min(sgd.steps - len(batches), n // size)
        drawn = generator.choice(n, whole * size, replace=False)
        batches += list(shard[drawn].reshape(whole, size))
    return batches


def plan_augmentation(
    task: Task, sgd: LocalSGD, batches: Sequence[np.ndarray], seed: int, round: int, client: int
) -> np.ndarray | None:
    """Return the random numbers [examples, ...] for the augmentation of all batches, or None without augmentation."""
    if not sgd.augment or task.augment is None:
        return None
    return task.augment.draw_for(batches, seed, round, client)
