"""Error feedback: the unsent part of an update is added to the next update.

Seide, Fu, Droppo, Li and Yu, "1-bit stochastic gradient descent", Interspeech 2014. Stich, Cordonnier and Jaggi, "Sparsified SGD with
memory", NeurIPS 2018. Karimireddy, Rebjock, Stich and Jaggi, "Error feedback fixes SignSGD", ICML 2019. With the update x, the residual e
and the codec C:

    a = x + e
    send C(a)
    e ← a − C(a) if C(a) is accepted, else e ← a

After every round, the residual plus the sum of all accepted C(a) equals the sum of all updates x, up to rounding errors of float32. While a
proposal is pending, the attribute `residual` is the sum a. `commit` subtracts C(a) from it, and `rollback` does not change it.

With the option `decay`, a number β from 0 to 1, the sum is a = x + β·e. With β < 1, old errors fade, and the equality above does not hold.
SparseLoCo uses β = 0.95 (Sarfi, Thérien, Lidin, Belilovsky 2025, "Communication efficient LLM pre-training with SparseLoCo",
arXiv:2508.15706).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import spec
from ..codecs import Context
from ..errors import MismatchError, NonFiniteError
from ..kernels import Rows
from .base import VectorMemory


@dataclass(frozen=True)
class ResidualOptions:
    decay: float = 1.0  # β: factor by which the residual is multiplied in each round

    def __post_init__(self) -> None:
        spec.check_ranges(self, decay=(0.0, 1.0))


class Residual(VectorMemory):
    """Error feedback with a float32 residual [numel], stored on the device (CPU or GPU) of the last update."""

    name = "residual"
    source = "Seide et al. 2014, Stich et al. 2018"
    Options = ResidualOptions

    def _check_codec(self) -> None:
        if self.codec.contraction(self.numel) is None:
            raise MismatchError(
                f"{{memory}} residual diverges with {self.codec}, which is not contractive; use {{memory}} none, or {{uplink}} stc, "
                "or set damped=true or scaled=false if the codec has this option"
            )

    @classmethod
    def _propose(
        cls, memories: Sequence["Residual"], x: Rows, seeds: Sequence[int], context: Context
    ) -> list[bytes | NonFiniteError]:
        decay, like = memories[0].options.decay, x[0].to(torch.float32)
        residuals = [memory._vectors_on(like)["residual"] for memory in memories]
        sums = residuals if decay == 1 else [residual * decay for residual in residuals]
        proposals = cls._encode(memories, x, seeds, context, sums)
        for memory, proposal, before, total in zip(
            memories, proposals, residuals, sums, strict=True
        ):
            memory.residual = before if isinstance(proposal, NonFiniteError) else total
        return proposals
