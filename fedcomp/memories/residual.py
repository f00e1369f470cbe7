"""Error accumulation: what was not sent is added to the next update.

Seide, Fu, Droppo, Li, Yu: 1-bit stochastic gradient descent. Interspeech 2014. Stich, Cordonnier, Jaggi: Sparsified
SGD with memory. NeurIPS 2018. Karimireddy, Rebjock, Stich, Jaggi: Error feedback fixes SignSGD. ICML 2019.

    a = x + e;  send C(a);  e ← a − C(a) when it was accepted, e ← a when it was not

so that at every moment Σ accepted + e = Σ inputs, to rounding. The subtraction waits for the news: until then
`residual` holds a, and a rollback has nothing to undo.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch

from ..codecs import Context
from ..errors import MismatchError, NonFiniteError
from ..kernels import Rows
from .vectors import Vectors


class Residual(Vectors):
    """Error feedback: a residual [numel] in float32, on the device of the last update."""

    name: ClassVar[str] = "residual"
    source: ClassVar[str] = "Seide et al. 2014, Stich et al. 2018"

    def _check_codec(self) -> None:
        if self.codec.contraction(self.numel) is None:
            raise MismatchError(
                f"{{memory}} residual diverges with {self.codec}, which does not contract; use {{memory}} none, or {{uplink}} stc, "
                "or the codec's option damped=true or scaled=false if it has one"
            )

    @classmethod
    def _propose(
        cls, memories: Sequence["Residual"], x: Rows, seeds: Sequence[int], context: Context
    ) -> list[bytes | NonFiniteError]:
        like = x[0].to(torch.float32)
        for memory in memories:
            memory.residual = memory._kept(like)["residual"]
        return cls._encode(memories, x, seeds, context, [memory.residual for memory in memories])
