"""Error accumulation: what was not sent is added to the next update.

Seide, Fu, Droppo, Li, Yu: 1-bit stochastic gradient descent. Interspeech 2014. Stich, Cordonnier, Jaggi: Sparsified
SGD with memory. NeurIPS 2018. Karimireddy, Rebjock, Stich, Jaggi: Error feedback fixes SignSGD. ICML 2019.

    a = x + e;  send C(a);  e ← a − C(a) when it was accepted, e ← a when it was not

so that at every moment Σ accepted + e = Σ inputs, to rounding. The subtraction waits for the news: until then
`residual` holds a, and a rollback has nothing to undo.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import ClassVar

import torch

from ..codecs import Codec, Context
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
                f"{{memory}} residual diverges with {self.codec}, which does not contract; use {{memory}} none, "
                f"or {{uplink}} {_contracting(self.codec, self.numel)}"
            )

    @classmethod
    def _propose(
        cls, memories: Sequence["Residual"], x: Rows, seeds: Sequence[int], context: Context
    ) -> list[bytes | NonFiniteError]:
        like = x[0].to(torch.float32)
        for memory in memories:
            memory.residual = memory._kept(like)["residual"]
        return cls._encode(memories, x, seeds, context, [memory.residual for memory in memories])


def _contracting(codec: Codec, numel: int) -> str:
    """Return the codec with an option changed so that it contracts; stc where there is no such option."""
    changed = (str(other) for other in _biased(codec) if other.contraction(numel) is not None)
    return next(changed, "stc")


def _biased(codec: Codec) -> Iterator[Codec]:
    """Yield the codec without the scaling that makes it, or a codec inside it, unbiased."""
    options = {f.name for f in fields(codec)}
    for option, value in (("damped", True), ("scaled", False)):
        if option in options:
            yield replace(codec, **{option: value})
    for part in [p for p in ("inner", "first", "second") if p in options]:
        yield from (replace(codec, **{part: other}) for other in _biased(getattr(codec, part)))
