"""Deep gradient compression (DGC): error feedback with momentum. Momentum is applied before the codec selects coordinates.

Lin, Han, Mao, Wang and Dally, "Deep gradient compression: reducing the communication bandwidth for distributed training", ICLR 2018. A
client computes, with its update x, the codec C and the momentum factor m:

    x ← x · min(1, clip / (√N ‖x‖))     clipping, where N (option `nodes`) is the number of clients in a round
    u ← m·u + x                         the velocity
    v ← v + u                           the sum of unsent velocities
    send C(v)
    set u and v to zero where C(v) was accepted

The paper calls this momentum correction: not the update x but the velocity u is added to v, so a coordinate that is sent late has the same
momentum as without compression. The paper's momentum factor masking sets the velocity of a sent coordinate to zero, because this velocity
is outdated. As in the paper, v is also set to zero at sent coordinates. If a codec quantizes the sent values, the quantization error is
therefore lost, and a run shows a warning. The default codec is `topk`, which sends exact values. As in momentum SGD, the momentum can make
sent vectors up to 1/(1 − m) times as large as the updates x. The run option `density_warmup` implements the warm-up of the paper, in which
clients send more coordinates in the first rounds.
"""

import math
from dataclasses import dataclass

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
    clip: float = 0.0  # clip each update to the L2 norm clip/√N; 0 = no clipping
    nodes: int = 1  # N: number of clients in a round, for `clip`

    def __post_init__(self) -> None:
        super().__post_init__()
        spec.check_ranges(self, clip=(0, math.inf), nodes=(1, math.inf))


def _keeps_values(codec: Codec) -> bool:
    """Return whether a codec sends values unscaled and with at least the precision of bfloat16."""
    inner = codec.unscoped
    if isinstance(inner, Product):
        return not getattr(inner.first, "scaled", False) and _keeps_values(inner.second)
    if isinstance(inner, RandomK):
        return not inner.scaled
    if isinstance(inner, TopK | Threshold):
        return inner.values not in ("2bit", "tau")
    return isinstance(inner, Identity | Half | BFloat16)


class DGC(VectorMemory):
    """Error feedback with momentum. `residual` is v, the sum of the velocities that were not sent."""

    name = "dgc"
    source = "Lin et al. 2018"
    Options = DGCOptions
    default_uplink = "topk:density=1/100"
    vectors = ("residual", "velocity")
    velocity: Tensor | None = None  # u

    @property
    def warning(self) -> str:
        if _keeps_values(self.codec):
            return ""
        return (
            f"memory 'dgc' loses the quantization error of sent coordinates, and {self.codec} quantizes; "
            "use --uplink topk, or --memory residual"
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
