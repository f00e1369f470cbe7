"""Coordinate-wise median and trimmed mean of the clients' updates.

Yin, Chen, Ramchandran, Bartlett: Byzantine-robust distributed learning: Towards optimal statistical rates. ICML 2018, algorithm 1,
options I and II.

    Median:         y_i = the median of the clients' values of coordinate i; for an even number of clients, the mean of the middle two.
    Trimmed mean:   y_i = the mean of the clients' values without the f largest and the f smallest.

At most f of the n clients are Byzantine. Both rules need n > 2f. Then y_i lies within the range of the honest clients' values. The paper
trims a fraction β ≥ f/n of the values on each side.

With a sparse uplink codec, few clients send the same coordinate. If fewer than half of the clients send a coordinate, its median is 0. The
sent values are then lost, because the clients' memories count them as accepted. For this reason, the default uplink codec is dense. Sparse
codecs work with the option `mix`, which averages each update with its nearest neighbours before the median.

The table shows the test accuracy in % on the task `digits` for four uplink codecs, with 10 clients, 50 rounds, --partition dirichlet:0.3,
--downlink fp16, f=2 and one seed. In the row "mixed", the option `mix` is true.

    Uplink           stc 1 %   stc 10 %   eden:bits=1,damped=true   fp16
    average            91.1      92.8             92.5              93.1
    median              8.6      34.7             91.9              90.6
    median, mixed      92.8      93.3             93.6              93.6
    trimmed-mean       20.0      87.8             92.5              91.7
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from ..codecs.eden import Eden
from .robust import ByCoordinate


class Median(ByCoordinate):
    """The median of each coordinate of the updates."""

    name: ClassVar[str] = "median"

    @classmethod
    def defaults(cls, options: Any) -> Mapping[str, str]:
        return {} if options.mix else {"uplink": str(Eden(bits=1, damped=True))}

    def ranks(self, vectors: int) -> tuple[int, int]:
        return (vectors - 1) // 2, vectors // 2 + 1


class TrimmedMean(Median):
    """The mean of each coordinate of the updates, without the f largest and the f smallest values of the coordinate."""

    name: ClassVar[str] = "trimmed-mean"

    def ranks(self, vectors: int) -> tuple[int, int]:
        return self.f, vectors - self.f
