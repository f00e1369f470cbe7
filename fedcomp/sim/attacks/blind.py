"""Attacks by Byzantine clients that do not know the honest updates. They replace their own update x:

    inverted     x ← −s·x
    rescaled     x ← r·x,  log₁₀ r uniform in [−d, d]
    random-sign  xᵢ ← ±xᵢ, a fair coin for each coordinate
    constant     x ← c·1
    gaussian     xᵢ ~ N(0, σ²)

The first three attacks are from Bernstein, Zhao, Azizzadenesheli, Anandkumar, "signSGD with majority vote is communication efficient and
fault tolerant", ICLR 2019, section 3.3 (blind multiplicative adversaries). The attack `constant` is the same-value attack of Li, Xu, Chen,
Giannakis, Ling, "RSA: Byzantine-robust stochastic aggregation methods", AAAI 2019. The attack `gaussian` is from Blanchard, El Mhamdi,
Guerraoui, Stainer, "Machine learning with adversaries", NeurIPS 2017, section 5.1, with σ = 200.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from .base import Attack, Generators, UpdateContext

FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Inverted(Attack):
    scale: float = 1.0  # s

    name: ClassVar[str] = "inverted"
    source: ClassVar[str] = "Bernstein 2019"

    def updates(self, x: Tensor, context: UpdateContext, generators: Generators) -> Tensor:
        return x.mul_(-self.scale)


@dataclass(frozen=True)
class Rescaled(Attack):
    decades: float = 3.0  # d

    name: ClassVar[str] = "rescaled"
    source: ClassVar[str] = "Bernstein 2019"
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {"decades": (0, 30)}

    def updates(self, x: Tensor, context: UpdateContext, generators: Generators) -> Tensor:
        factors = [10 ** g.uniform(-self.decades, self.decades) for g in generators]
        return x.mul_(torch.tensor(factors, dtype=x.dtype, device=x.device)[:, None])


@dataclass(frozen=True)
class RandomSign(Attack):
    name: ClassVar[str] = "random-sign"
    source: ClassVar[str] = "Bernstein 2019"

    def updates(self, x: Tensor, context: UpdateContext, generators: Generators) -> Tensor:
        for row, generator in zip(x, generators, strict=True):
            coins = torch.from_numpy(generator.integers(0, 2, row.numel(), np.int8))
            row.mul_(coins.to(x.device) * 2.0 - 1.0)
        return x


@dataclass(frozen=True)
class Constant(Attack):
    value: float = 1.0  # c

    name: ClassVar[str] = "constant"
    source: ClassVar[str] = "Li 2019"
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {"value": (-FLOAT32_MAX, FLOAT32_MAX)}

    def updates(self, x: Tensor, context: UpdateContext, generators: Generators) -> Tensor:
        return x.fill_(self.value)


@dataclass(frozen=True)
class Gaussian(Attack):
    sigma: float = 200.0  # σ

    name: ClassVar[str] = "gaussian"
    source: ClassVar[str] = "Blanchard 2017"
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {"sigma": (0, FLOAT32_MAX)}

    def updates(self, x: Tensor, context: UpdateContext, generators: Generators) -> Tensor:
        for row, generator in zip(x, generators, strict=True):
            drawn = torch.from_numpy(generator.standard_normal(row.numel(), np.float32))
            row.copy_(drawn).mul_(self.sigma)
        return x
