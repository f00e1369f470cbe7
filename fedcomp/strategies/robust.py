"""Rules that withstand f Byzantine clients in a round, in place of the mean.

A rule reads updates of any codec in blocks of coordinates (blocks.py). Every client counts once: an update without a frame is zero, and an
update that a rule leaves out counts as accepted, so that its client does not send it again. f counts Byzantine clients among the vectors
that a rule is given: the updates accepted in a round and, with a memory whose absent clients count (`ef21`, `laq`), theirs as well.

A rule needs a number of vectors that depends on f. Cohorts that are too small are refused before round 1. A client whose frame cannot be
read is rejected and counts towards f, and the rule then reckons with one fewer. A round with too few accepted updates moves nothing: its
clients are rejected at the stage `aggregate` and keep what they sent.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from .. import spec
from ..codecs import Update
from ..errors import ConfigError
from ..kernels.order import mean_of_ranks
from .base import AcceptedUpdate, Aggregation, PhaseResult, RoundStrategy, RoundUpdates
from .blocks import CHUNK, UpdateMatrix, squared_distances
from .mixing import buckets, nearest
from .round_completion import quorum_size


@dataclass(frozen=True)
class Options:
    f: int = 1  # Byzantine clients of a round
    mix: bool = False  # nearest-neighbour mixing before the rule (mixing.py)
    buckets: int = 1  # updates averaged in a bucket, before mixing; 1 = none

    def __post_init__(self) -> None:
        spec.check_ranges(self, f=(0, math.inf), buckets=(1, math.inf))


class Robust(RoundStrategy):
    """A rule for vectors of which at most f are arbitrary."""

    options: Options
    Options: ClassVar[type] = Options
    supports_weights: ClassVar[bool] = False  # a Byzantine client would name the largest weight

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._proven: frozenset[int] = frozenset()  # to be Byzantine, in this round
        if self.cohort_size:
            self._check_cohort(self.cohort_size)

    @property
    def f(self) -> int:
        """The Byzantine clients to reckon with: without those proven in this round, which are left out."""
        return max(0, self.options.f - len(self._proven))

    @abstractmethod
    def needs(self) -> int:
        """Return the smallest number of vectors of which f may be arbitrary."""

    @property
    def min_cohort(self) -> int:
        """The smallest number of clients of a round, which fill the buckets that the rule needs."""
        vectors = max(self.needs(), 2 * self.f + 1 if self.options.mix else 1)
        return (vectors - 1) * self.options.buckets + 1

    def _check_cohort(self, clients: int) -> None:
        """Raise ConfigError if no round of cohorts of so many clients could move the model."""
        if clients < self.min_cohort:
            raise ConfigError(
                f"--strategy {self.name} needs {self._needed()}, and a cohort has {clients}; "
                "give a larger --participation, more --clients, or a smaller f"
            )
        if (enough := quorum_size(self.config.quorum, clients)) < self.min_cohort:
            raise ConfigError(
                f"--strategy {self.name} needs {self._needed()}, and with --quorum {self.config.quorum:g} a round closes "
                f"at {enough}; give a larger --quorum, or a smaller f"
            )

    def on_phase_end(self, result: PhaseResult) -> Mapping[int, str]:
        self._proven = result.proven_byzantine
        return {}

    def reject(self, accepted: Sequence[AcceptedUpdate]) -> Mapping[int, str]:
        if len(accepted) >= self.min_cohort:
            return {}
        why = f"strategy '{self.name}' needs {self._needed()}; {len(accepted)} could be used"
        return {a.client: why for a in accepted}

    def mixture(self, round: int, vectors: int, products: np.ndarray | None) -> np.ndarray | None:
        """Return A [k, vectors], float64, to multiply the vectors by before the rule; None: none.

        `products`: inner products of the vectors, for mixing.
        """
        mixed = None
        if self.options.buckets > 1:
            mixed = buckets(vectors, self.options.buckets, self.config.seed, round)
        if self.options.mix:
            of_buckets = products if mixed is None else mixed @ products @ mixed.T
            near = nearest(squared_distances(of_buckets), self.f)
            mixed = near if mixed is None else near @ mixed
        return mixed

    def _needed(self) -> str:
        o, out = self.options, self.options.f - self.f
        found = f" of whom {out} are out" if out else ""
        return f"{self.min_cohort} clients in a round for f={o.f}{found}" + (
            f" and buckets={o.buckets}" if o.buckets > 1 else ""
        )


class ByCoordinate(Robust):
    """A rule for each coordinate by itself: the mean of some ranks. The same bits in any block and any order of the vectors.

    With vectors mixed, it is the same to rounding.
    """

    @abstractmethod
    def ranks(self, vectors: int) -> tuple[int, int]:
        """Return the first rank of so many, 0 for the smallest value, and the one after the last."""

    def aggregate(self, updates: RoundUpdates, into: Tensor) -> Aggregation:
        rows, out = UpdateMatrix([a.update for a in updates.accepted], into.numel()), into.numpy()
        products = rows.products() if self.options.mix else None
        mixture = self.mixture(updates.round, len(rows), products)
        for span, values in rows.blocks():
            vectors = values if mixture is None else _mixed(mixture, values)
            out[span] = mean_of_ranks(vectors, *self.ranks(len(vectors)))
        return Aggregation()


class ByDistance(Robust):
    """A rule that weighs vectors by their distances: it reads them once for these, and again to add them."""

    @abstractmethod
    def weigh(self, products: np.ndarray) -> np.ndarray:
        """Return the weight of every vector, float64 [k], from the inner products of all. Those of `kept` come last."""

    def kept(self) -> Sequence[Update | None]:
        """Return vectors of the server that the rule weighs with the others, unmixed."""
        return ()

    def aggregate(self, updates: RoundUpdates, into: Tensor) -> Aggregation:
        sent, own = [a.update for a in updates.accepted], self.kept()
        rows = UpdateMatrix([*sent, *own], into.numel())
        products, m = rows.products(), len(sent)
        mixture = self.mixture(updates.round, m, products[:m, :m])
        if mixture is None:
            rows.combine(self.weigh(products), into)
            return Aggregation()
        whole = np.zeros((len(mixture) + len(own), len(rows)))
        whole[: len(mixture), :m], whole[len(mixture) :, m:] = mixture, np.eye(len(own))
        rows.combine(self.weigh(whole @ products @ whole.T) @ whole, into)
        return Aggregation()


def _mixed(mixture: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return A x for a block x [m, width], float32 [k, width], summed in float64."""
    out = np.empty((len(mixture), values.shape[1]), np.float32)
    for start in range(0, values.shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        out[:, part] = mixture @ values[:, part].astype(np.float64)
    return out
