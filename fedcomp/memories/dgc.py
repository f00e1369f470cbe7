"""DGC, deep gradient compression: momentum and accumulation before selection.

Lin, Han, Mao, Wang, Dally: Deep gradient compression: reducing the communication bandwidth for distributed training. ICLR 2018.

    x ← x · min(1, clip / (√N ‖x‖));  u ← m·u + x;  v ← v + u;  send C(v);  u and v become zero where C(v) was accepted

x is the update, C the codec, and N the number of clients in a round (option `nodes`). Momentum correction: v accumulates u, so a delayed
coordinate gets the same momentum as without compression. Momentum factor masking: the momentum of a sent coordinate is stale and becomes
zero. As in the paper, the accumulated v becomes zero at sent coordinates, even if the codec changed their values. The default uplink is
`topk`, which keeps the values, and a run warns about codecs that change them. With a codec that sends every coordinate, u and v are zero
after each accepted update. Sent updates are up to 1/(1 − m) times as large as x, like the steps of momentum SGD. The option
`density_warmup` of a run is the paper's warm-up.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .. import spec
from ..codecs import Codec, Context, Update
from ..codecs.identity import BFloat16, Half, Identity
from ..codecs.product import Product
from ..codecs.randomk import RandomK
from ..codecs.threshold import Threshold
from ..codecs.topk import TopK
from ..kernels.sums import norm2
from .base import MomentumOptions, Updated, VectorMemory, Vectors, mask


@dataclass(frozen=True)
class DGCOptions(MomentumOptions):
    clip: float = 0.0  # largest L2 norm of the sum of N updates; 0 = no clipping
    nodes: int = 1  # N, number of clients in a round

    def __post_init__(self) -> None:
        super().__post_init__()
        spec.check_ranges(self, clip=(0, math.inf), nodes=(1, math.inf))


def _keeps_values(codec: Codec) -> bool:
    """Return whether a codec sends values unchanged, except for rounding to bfloat16 or a higher precision."""
    inner = codec.unscoped
    if isinstance(inner, Product):
        return not getattr(inner.first, "scaled", False) and _keeps_values(inner.second)
    if isinstance(inner, RandomK):
        return not inner.scaled
    if isinstance(inner, Threshold):
        return inner.values != "tau"
    return isinstance(inner, TopK | Identity | Half | BFloat16)


class DGC(VectorMemory):
    """Momentum and accumulation. `residual` is v."""

    name: ClassVar[str] = "dgc"
    source: ClassVar[str] = "Lin et al. 2018"
    Options: ClassVar[type] = DGCOptions
    default_uplink: ClassVar[str] = "topk:density=1/100"
    vectors: ClassVar[tuple[str, ...]] = ("residual", "velocity")
    velocity: Tensor | None = None  # u

    @property
    def gain(self) -> float:
        return 1 / (1 - self.options.momentum)

    @property
    def warning(self) -> str:
        if _keeps_values(self.codec):
            return ""
        return (
            f"memory 'dgc' keeps no error of coordinates that are sent, and {self.codec} changes their values, so this error is "
            "lost; use --uplink topk, or --memory residual"
        )

    def _update_vectors(self, vectors: Vectors, x: Tensor, context: Context) -> Updated:
        o = self.options
        if o.clip and (norm := norm2(x)):
            x = x * min(1.0, o.clip / math.sqrt(o.nodes) / norm)
        u = (vectors["velocity"] * o.momentum).add_(x)
        v = vectors["residual"] + u
        return {"velocity": u, "residual": v}, v

    def _on_accepted(self, update: Update, dropped: Update | None) -> None:
        mask((self.velocity, self.residual), update.positions, dropped)
