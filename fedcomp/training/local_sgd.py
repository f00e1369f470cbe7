"""The options of local training, and a step of SGD.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-efficient learning of deep networks from decentralized
data. AISTATS 2017; with momentum from zero in every round: Yu, Jin, Yang: On the linear speedup analysis of communication
efficient momentum SGD. ICML 2019.

    g ← clip(∇L_B(w)) + λw + ρ(w − w_start);  u ← μu + g;  w ← w − ηu;  after H steps the update is w − w_start

ρ is `proximal`, the proximal term of FedProx, which keeps clients near the global model: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith:
Federated optimization in heterogeneous networks. MLSys 2020.

With `keep_momentum`, a client keeps u between rounds. Coordinates whose update was sent and accepted start from zero, the momentum
masking of Sattler, Wiedemann, Müller, Samek: Sparse binary compression. IJCNN 2019.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..config import RunConfig
from ..errors import ConfigError, ProtocolError
from ..layout import Layout
from ..local_optimizer import SGD
from ..local_optimizer import read as read_optimizer
from ..schedules import MAX_COUNT, MAX_FLOAT

Tensors = list[Tensor] | tuple[Tensor, ...]  # as the functions torch._foreach_* require


@dataclass(frozen=True)
class LocalSGD:
    """The options of local training. Momentum and weight decay are those of torch.optim.SGD, clipping that of clip_grad_norm_."""

    steps: int = 5
    epochs: int = 0  # passes over the client's data, instead of steps; 0 = off
    batch_size: int = 20
    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0  # maximum L2 norm of the gradient, before weight decay and momentum; 0 = off
    keep_momentum: bool = False  # between rounds, except for coordinates that were sent
    augment: bool = False  # augment examples as the task defines
    # float32, bfloat16 or float16: precision of forward and backward passes; weights stay float32
    precision: str = "float32"
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
        own = dict(optimizer.options) if optimizer.is_plain_sgd else {}
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
    def uses_descend(self) -> bool:
        """Whether steps are those of `descend`, which can also train a stack of clients."""
        return (
            read_optimizer(self.optimizer).is_plain_sgd
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

        `lr` is a multiple of the learning rate. `steps` and `batch_size` of 0 change nothing; other steps also replace epochs. Raises
        ProtocolError unless the multiple is positive and finite, or if a value exceeds the limits of a run.
        """
        if not 0 < lr < math.inf:
            raise ProtocolError(
                f"the server asks for {lr} times the learning rate; give a multiple above 0"
            )
        if self.lr * lr > MAX_FLOAT:
            raise ProtocolError(
                f"the server asks for a learning rate of {self.lr * lr:g}; give at most {MAX_FLOAT:g}"
            )
        for unit, count in (("steps", steps), ("examples in a step", batch_size)):
            if not 0 <= count <= MAX_COUNT:
                raise ProtocolError(f"the server asks for {count} {unit}; give 1 to {MAX_COUNT}")
        return replace(
            self,
            lr=self.lr * lr,
            lr_multiple=self.lr_multiple * lr,
            steps=steps or self.steps,
            epochs=0 if steps else self.epochs,
            batch_size=batch_size or self.batch_size,
        )


@torch.no_grad()  # in torch 2.4, weights require gradients under vmap
def descend(
    weights: Tensors,
    gradients: Tensors,
    momenta: Tensors | None,
    sgd: LocalSGD,
    anchors: Tensors = (),
) -> Tensors | None:
    """Take a step of SGD on `weights`, in place, with gradients that are already clipped. Return the momenta, None without momentum.

    `anchors`: the weights before the first step, for the proximal term.
    """
    if sgd.weight_decay:
        gradients = torch._foreach_add(gradients, weights, alpha=sgd.weight_decay)
    if sgd.proximal:
        distances = torch._foreach_sub(weights, anchors)
        gradients = torch._foreach_add(gradients, distances, alpha=sgd.proximal)
    if sgd.momentum and momenta is not None:
        gradients = torch._foreach_add(gradients, momenta, alpha=sgd.momentum)
    torch._foreach_add_(weights, gradients, alpha=-sgd.lr)
    return gradients if sgd.momentum else None


def proximal_anchors(
    layout: Layout, base: Tensor, weights: Iterable[Tensor], sgd: LocalSGD
) -> list[Tensor]:
    """Return the weights before the first step, one tensor for each weight in its precision; empty without a proximal term."""
    if not sgd.proximal:
        return []
    views = layout.views(base).values()
    return [view.to(weight.dtype) for view, weight in zip(views, weights, strict=True)]
