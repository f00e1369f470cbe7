"""The attack label flip: the attackers train like honest clients, but on data with wrong targets y.

    y ← y_max − y

Here, y_max is the largest target in the data, which is the number of classes − 1 if every class occurs.

The attack is from Fang, Cao, Jia, Gong, "Local model poisoning attacks to Byzantine-robust federated learning", USENIX Security 2020,
section 4.1. The same attack on centralized training is from Biggio, Nelson, Laskov, "Support vector machines under adversarial label
noise", ACML 2011. Negative targets, which the loss ignores, stay unchanged.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from ...errors import ConfigError
from ...tasks.data import Data, Examples
from .base import Attack


@dataclass(frozen=True)
class LabelFlip(Attack):
    name: ClassVar[str] = "label-flip"
    source: ClassVar[str] = "Fang 2020"

    def data(self, data: Examples) -> Examples:
        if not isinstance(data, Data):
            raise ConfigError(
                "attack 'label-flip' needs data in memory, but this task reads its data batch by batch; use the attack 'inverted'"
            )
        if data.targets.is_floating_point() or data.targets.is_complex():
            raise ConfigError(
                "attack 'label-flip' flips classes, but the targets of this task are not whole numbers; use the attack 'inverted'"
            )
        last = data.targets.max()
        return replace(data, targets=(last - data.targets).where(data.targets >= 0, data.targets))
