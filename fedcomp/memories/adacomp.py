"""AdaComp, adaptive residual gradient compression: the values determine how many coordinates are sent.

Chen, Choi, Brand, Agrawal, Zhang, Gopalakrishnan: AdaComp: adaptive residual gradient compression for data-parallel distributed training.
AAAI 2018, algorithm 2.

    G = e + x (residual and update);  H = G + x;  coordinate i is sent as sign(G_i)·s if |H_i| ≥ max|G| over its bin of T coordinates,
    where s is the mean of max|G| over the bins;  e ← G − the accepted update

The paper uses T = 50 for convolutions, 500 for dense layers, and a scale s for each layer. With `@layer` in --uplink, each tensor has its
own scale s; otherwise, bins can span several tensors, and the model has one scale s. The uplink codec encodes the selected coordinates; the
density of the codec has no effect. Zeros of G are never sent.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .. import codecs, kernels, spec
from ..codecs import Context
from ..layout import Layout
from .base import Updated, VectorMemory, Vectors


@dataclass(frozen=True)
class AdaCompOptions:
    bin: int = 500  # T: number of coordinates in a bin

    def __post_init__(self) -> None:
        spec.check_ranges(self, bin=(1, math.inf))


class AdaComp(VectorMemory):
    """Error feedback in which the values determine how many coordinates are sent. `residual` is e, or G while a proposal is pending."""

    name: ClassVar[str] = "adacomp"
    source: ClassVar[str] = "Chen et al. 2018"
    Options: ClassVar[type] = AdaCompOptions
    selects_coordinates: ClassVar[bool] = True

    def _update_vectors(self, vectors: Vectors, x: Tensor, context: Context) -> Updated:
        g = vectors["residual"] + x
        spans = codecs.spans(self.codec, self.layout or Layout.flat(self.numel))
        filled = [span for span in spans if span.stop > span.start]
        send = [select(g[span], x[span], self.options.bin) for span in filled]
        return {"residual": g}, torch.cat([*send, g[:0]])


def select(g: Tensor, x: Tensor, size: int) -> Tensor:
    """Return the vector to send for G [n], n ≥ 1, with bins of `size` coordinates; the last bin may be smaller."""
    n = g.numel()
    size = min(size, n)
    g, x = (F.pad(v, (0, -n % size)).view(-1, size) for v in (g, x))
    maxima = g.abs().amax(1)
    (scale,) = kernels.means(maxima, np.array([maxima.numel()])).astype(np.float32).tolist()
    selected = ((g + x).abs_() >= maxima[:, None]) & (g != 0)
    scales = torch.tensor(scale, dtype=torch.float32, device=g.device).copysign(g)
    return scales.where(selected, 0).flatten()[:n]
