"""Server optimizers, which turn the averaged update of a round into a step of the model.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: Adaptive federated optimization. ICLR 2021, algorithm 2. A round updates the
model x by x ← x + η·step, where η is `--server-lr`. The optimizers compute the step from the averaged update Δ of the round:

    `sgd`:    m ← μm + Δ;                 step = m, or Δ + μm if nesterov=true.
    `adam`:   m ← β₁m + (1 − β₁)Δ;        v ← β₂v + (1 − β₂)Δ²;                    step = m / (√v + τ).
    `yogi`:   m as for `adam`;            v ← v − (1 − β₂)·Δ²·sign(v − Δ²);        step = m / (√v + τ).

As in the paper, the first moment m starts from 0, the second moment v starts from τ², and there is no bias correction. A round that does
not update the model leaves m and v unchanged. With nesterov=true, μ = 0.9, η = 0.7 and many local steps, `sgd` is the outer optimizer of
DiLoCo (Douillard et al., arXiv:2311.08105, 2023). The downlink codec compresses the step, which can be dense even if Δ is sparse.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import spec
from ..errors import NonFiniteError, SpecError
from ..kernels import all_finite
from ..memories.base import Changes, ReadValue, ReadVector

FIRST, SECOND = "optimizer-m", "optimizer-v"  # names of the moments m and v in a checkpoint


@dataclass(frozen=True)
class SGDOptions:
    momentum: float = 0.0  # μ: factor of the momentum
    nesterov: bool = False  # use Nesterov momentum

    def __post_init__(self) -> None:
        spec.check_decays(self, "momentum")
        if self.nesterov and not self.momentum:
            raise SpecError("nesterov=true has no effect without momentum; give momentum=0.9")


@dataclass(frozen=True)
class AdaptiveOptions:
    beta1: float = 0.9  # β₁: decay of the first moment
    beta2: float = 0.99  # β₂: decay of the second moment
    tau: float = 1e-3  # τ: added to √v, so that steps stay finite

    def __post_init__(self) -> None:
        spec.check_decays(self, "beta1", "beta2")
        spec.check_ranges(self, tau=(1e-18, 1e18))  # τ² must fit in float32


class Optimizer(ABC):
    """Base class of server optimizers. The state consists of float32 vectors [numel] on the CPU."""

    name: ClassVar[str]
    Options: ClassVar[type]
    # Whether the norm of a step is independent of the norm of the update
    scale_free: ClassVar[bool] = False

    def __init__(self, options: SGDOptions | AdaptiveOptions):
        self.options = options
        self.state: dict[str, Tensor] = {}
        self._next: dict[str, Tensor] = {}

    @property
    def is_identity(self) -> bool:
        """Whether every step equals the averaged update."""
        return False

    @abstractmethod
    def step(self, update: Tensor) -> Tensor:
        """Return the step for an averaged update [numel], which the method may modify. `commit` stores the new state."""

    def commit(self) -> None:
        """Store the state that the last `step` computed. Call this method when the model has been updated with this step."""
        if self._next:
            self.state, self._next = self._next, {}

    def take_changes(self) -> Changes:
        return dict(self.state), {}

    def restore(self, vector: ReadVector, value: ReadValue) -> None:
        self.state = {
            name: previous for name in (FIRST, SECOND) if (previous := vector(name)) is not None
        }
        self._next = {}


class SGD(Optimizer):
    """SGD: the step is the averaged update, plus momentum if the option `momentum` is not 0."""

    name: ClassVar[str] = "sgd"
    Options: ClassVar[type] = SGDOptions
    options: SGDOptions

    @property
    def is_identity(self) -> bool:
        return not self.options.momentum

    def step(self, update: Tensor) -> Tensor:
        if self.is_identity:
            return update
        mu, previous = self.options.momentum, self.state.get(FIRST)
        m = update.clone() if previous is None else torch.add(update, previous, alpha=mu)
        self._next = {FIRST: m}
        return update.add_(m, alpha=mu) if self.options.nesterov else m.clone()


class Adam(Optimizer):
    """Adam: steps of about the same length in every coordinate."""

    name: ClassVar[str] = "adam"
    Options: ClassVar[type] = AdaptiveOptions
    options: AdaptiveOptions
    scale_free: ClassVar[bool] = True

    def step(self, update: Tensor) -> Tensor:
        o = self.options
        m = update * (1 - o.beta1)
        if FIRST in self.state:
            m.add_(self.state[FIRST], alpha=o.beta1)
        v = self.second_moment(self.state.get(SECOND, torch.tensor(o.tau**2)), update * update)
        if not all_finite(v.numpy()):  # an infinite v would make all later steps 0
            raise NonFiniteError(
                f"--server-optimizer {self.name}: the squares of the averaged update exceed the range of float32; lower --lr"
            )
        self._next = {FIRST: m, SECOND: v}
        return m / v.sqrt().add_(o.tau)

    def second_moment(self, v: Tensor, squares: Tensor) -> Tensor:
        """Return the new second moment, given the old one `v` and the squared update."""
        return v * self.options.beta2 + squares * (1 - self.options.beta2)


class Yogi(Adam):
    """Yogi: Adam, except that the second moment changes by at most the square of the averaged update in a round."""

    name: ClassVar[str] = "yogi"

    def second_moment(self, v: Tensor, squares: Tensor) -> Tensor:
        return v - (v - squares).sign_().mul_(squares).mul_(1 - self.options.beta2)


OPTIMIZERS: dict[str, type[Optimizer]] = {cls.name: cls for cls in (SGD, Adam, Yogi)}


def optimizer(text: str) -> Optimizer:
    """Create a server optimizer from a spec string such as `sgd:momentum=0.9,nesterov=true`. Raises SpecError."""
    with spec.error_context(text):
        cls, options = spec.choose(spec.parse_part(text, "optimizer"), OPTIMIZERS, "optimizer")
    return cls(options)
