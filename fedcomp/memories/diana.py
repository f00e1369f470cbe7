"""Compressed differences to a learned shift, for unbiased codecs.

Mishchenko, Gorbunov, Takáč, Richtárik: Distributed learning with compressed gradient differences. 2019, algorithm 1.

    send C(x − h);  h ← h + α·C(x − h) on both sides, α ≤ 1/(1 + ω);  the server takes x to be h + C(x − h), which is unbiased

Block by block is `@layer`: ω is then that of the worst tensor. The server keeps h of each client, not their mean, so that one client can
start anew without the others; clients that are not asked do not count, so that the mean over the cohort stays unbiased.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..codecs import Codec, LayerWise
from ..errors import ConfigError
from .base import Counterpart
from .shift import Shift, Shifts


@dataclass(frozen=True)
class Options:
    alpha: float | None = (
        None  # step of the shift; None = the largest that the codec bears, 1/(1 + ω)
    )


class Diana(Shift):
    """Sends the difference to a shift that follows the client's updates."""

    name: ClassVar[str] = "diana"
    source: ClassVar[str] = "Mishchenko et al. 2019"
    Options: ClassVar[type] = Options
    counterpart: ClassVar[type[Counterpart]] = Shifts

    def check_codec(self) -> None:
        bound = self._bound(self.codec)
        if bound is None:
            raise ConfigError(
                f"memory 'diana' needs an unbiased codec, and {self.codec} is biased; use --uplink qsgd, or --memory ef21"
            )
        if not 0 < self.step <= bound:
            raise ConfigError(
                f"option 'alpha' of memory 'diana' is {self.step:g}; {self.codec} bears more than 0 and at most {bound:g}"
            )

    @property
    def step(self) -> float:
        """α, the same at every density: the server knows of one."""
        return self._bound(self._made_with) if self.options.alpha is None else self.options.alpha

    def _bound(self, codec: Codec) -> float | None:
        if isinstance(codec, LayerWise) and self.layout is not None:
            omegas = [codec.inner.variance(e.numel) for e in self.layout if e.numel]
            omega = None if None in omegas else max(omegas, default=0.0)
        else:
            omega = codec.variance(self.numel)
        return None if omega is None else 1 / (1 + omega)
