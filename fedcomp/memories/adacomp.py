"""Adaptive residual gradient compression: how many coordinates are sent follows from their values.

Chen, Choi, Brand, Agrawal, Zhang, Gopalakrishnan: AdaComp: adaptive residual gradient compression for data-parallel distributed training.
AAAI 2018, algorithm 2.

    G = e + x;  H = G + x;  in each bin of T coordinates those with |H_i| ≥ max|G| of the bin are sent, as sign(G_i)·s,
    s = the mean over the bins of max|G|;  e ← G − what arrived of it

The paper has T = 50 for convolutions, 500 for dense layers, and a scale s for each layer, as here with an uplink `@layer`; else bins run
through the whole model, and s is one. The uplink's codec carries what was chosen, and its own density has no effect. Where G is zero,
nothing is sent.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .. import kernels
from ..codecs import Codec, Context
from ..codecs.frame import LAYER
from ..errors import SpecError
from ..layout import Layout
from .vectors import Stacks, Vectors, at_full_density


@dataclass(frozen=True)
class Options:
    bin: int = 500  # coordinates that are compared with one another

    def __post_init__(self) -> None:
        if self.bin < 1:
            raise SpecError(f"bin is {self.bin}; give at least one coordinate, such as 500")


class AdaComp(Vectors):
    """Error feedback whose choice adapts; `residual` is e, and G while a proposal waits."""

    name: ClassVar[str] = "adacomp"
    source: ClassVar[str] = "Chen et al. 2018"
    Options: ClassVar[type] = Options
    chooses: ClassVar[bool] = True

    def __init__(self, codec: Codec, numel: int, layout: Layout | None = None, options: Any = None):
        super().__init__(at_full_density(codec, self.name), numel, layout, options)

    def _move(self, kept: Stacks, x: Tensor, context: Context) -> tuple[Stacks, Tensor]:
        g = kept["residual"] + x
        layered = self.codec.scope == LAYER and self.layout is not None
        spans = [entry.span for entry in self.layout] if layered else [slice(0, self.numel)]
        send = [
            choose(g[:, span], x[:, span], self.options.bin)
            for span in spans
            if span.stop > span.start
        ]
        return {"residual": g}, torch.cat([*send, g[:, :0]], dim=1)


def choose(g: Tensor, x: Tensor, size: int) -> Tensor:
    """What is sent of G [m, n], n ≥ 1, by bins of `size` coordinates, the last one as long as it is."""
    m, n = g.shape
    size = min(size, n)
    g, x = (F.pad(rows, (0, -n % size)).view(m, -1, size) for rows in (g, x))
    maxima = g.abs().amax(2)
    scale = kernels.means(maxima.flatten(), np.full(m, maxima.shape[1])).astype(np.float32)
    chosen = ((g + x).abs_() >= maxima[:, :, None]) & (g != 0)
    return (
        torch.copysign(torch.from_numpy(scale).to(g.device)[:, None, None], g)
        .where(chosen, 0)
        .view(m, -1)[:, :n]
    )
