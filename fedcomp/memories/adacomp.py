"""AdaComp, adaptive residual gradient compression: the number of sent coordinates adapts to the values of each update.

Chen et al., "AdaComp: adaptive residual gradient compression for data-parallel distributed training", AAAI 2018, algorithm 2. The vector is
divided into bins of T consecutive coordinates. With the residual e and the update x, a client computes:

    G = e + x
    H = G + x
    send sign(G_i)·s at each coordinate i where |H_i| is at least the largest |G_j| in the bin of i
    e ← G − (accepted update)

Each bin has a largest |G_j|. The scale s is the mean of these largest values over all bins. The paper uses T = 50 for convolutions, T = 500
for dense layers, and a scale s for each layer. With `@layer` in --uplink, each tensor has its own scale s. Without `@layer`, the model has
one scale s, and a bin can span several tensors. AdaComp itself selects the coordinates to send, so the codec's option `density` has no
effect. A coordinate i with G_i = 0 is never sent.
"""

import math
from dataclasses import dataclass

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
    bin: int = 500  # T: number of consecutive coordinates in a bin

    def __post_init__(self) -> None:
        spec.check_ranges(self, bin=(1, math.inf))


class AdaComp(VectorMemory):
    """Error feedback that adapts the number of sent coordinates to each update. During a pending proposal, `residual` is G."""

    name = "adacomp"
    source = "Chen et al. 2018"
    Options = AdaCompOptions
    selects_coordinates = True

    def _update_vectors(self, vectors: Vectors, x: Tensor, context: Context) -> Updated:
        g = vectors["residual"] + x
        spans = codecs.spans(self.codec, self.layout or Layout.flat(self.numel))
        filled = [span for span in spans if span.stop > span.start]
        send = [select(g[span], x[span], self.options.bin) for span in filled]
        return {"residual": g}, torch.cat([*send, g[:0]])


def select(g: Tensor, x: Tensor, size: int) -> Tensor:
    """Return the vector to send, which is 0 at coordinates that are not selected. `g` [n]: residual plus update; `x` [n]: the update.

    `size`: the number of coordinates in a bin.
    """
    n = g.numel()
    size = min(size, n)
    g, x = (F.pad(v, (0, -n % size)).view(-1, size) for v in (g, x))
    maxima = g.abs().amax(1)
    (scale,) = kernels.means(maxima, np.array([maxima.numel()])).astype(np.float32).tolist()
    selected = ((g + x).abs_() >= maxima[:, None]) & (g != 0)
    scales = torch.tensor(scale, dtype=torch.float32, device=g.device).copysign(g)
    return scales.where(selected, 0).flatten()[:n]
