"""The attack inner product manipulation: make the inner product of the mean of all updates and the mean of the honest updates negative.

Xie, Koyejo, Gupta, "Fall of empires: breaking Byzantine-tolerant SGD by inner product manipulation", UAI 2019, section 4:

    x = −ε·μ

Every attacker sends x, where μ is the mean of the honest updates. With a small ε, the vectors x are hard to distinguish from honest
updates; a large ε reverses the mean of all updates. With ε = 1, the attack is also called sign flipping.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import Attack, Generators, UpdateContext


@dataclass(frozen=True)
class InnerProduct(Attack):
    epsilon: float = 2.0  # ε

    name: ClassVar[str] = "ipm"
    source: ClassVar[str] = "Xie 2019"
    uses_honest_updates: ClassVar[bool] = True

    def updates(self, x: Tensor, context: UpdateContext, generators: Generators) -> Tensor:
        return (context.honest_updates.mean(0) * -self.epsilon).expand_as(x).clone()
