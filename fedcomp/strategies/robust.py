"""Base classes of robust aggregation rules, which replace the mean of updates and tolerate f Byzantine clients in a round.

The input vectors of a rule are the updates that were accepted in a round, decoded from any codec. With the memories `ef21` and `laq`, the
input vectors also include the server's estimates of the updates of absent clients. All vectors have the same weight, and a client that
sends no update counts as a zero vector. If a rule ignores an update, the update still counts as accepted, so the client does not send it
again.

If rounds have too few clients for the rule, the run ends with an error before round 1. A client whose frame (encoded update) cannot be read
is rejected and counts as one of the f Byzantine clients, so the rule then tolerates only f − 1 among the accepted updates. A round with too
few accepted updates does not update the model: its clients are rejected at the stage `aggregate`, and their memories roll back.

RAM. Besides the updates of m clients, a rule stores two arrays: a block of the updates' values, float32 [m, BLOCK], and a part of this
block, float64 [m, CHUNK]. Sparse and low-bit updates stay compressed in RAM. Updates of the codecs `qsgd`, `terngrad`, `natural`,
`adaptive` and `fp16` are dense, and a sketch with density 1 becomes dense when a rule first reads it.

Rounding. Distances are computed from inner products. These are summed in float64, CHUNK coordinates at a time, so they do not depend on
BLOCK. The error of a squared distance is about 10⁻¹⁶ times the sum of the squared lengths of the two vectors.

The options `mix` and `buckets` replace the input vectors by averages of several vectors. Averages differ less from each other.

Nearest-neighbour mixing. Allouah, Farhadkhani, Guerraoui, Gupta, Pinot, Stephan: Fixing by mixing: A recipe for optimal Byzantine ML under
heterogeneity. AISTATS 2023, algorithm 2. The m input vectors xᵢ are replaced by

    yᵢ = the mean of the m − f vectors that are nearest to xᵢ (one of them is xᵢ), with m > 2f.

If two vectors are equally near to xᵢ, the vector of the client with the smaller id counts as nearer.

Bucketing. Karimireddy, He, Jaggi: Byzantine-robust learning on heterogeneous datasets via bucketing. ICLR 2022, algorithm 1. Each round
divides the m input vectors randomly into k = ⌈m / s⌉ buckets of at most s vectors, where s is the option `buckets`. The input vectors are
replaced by

    y_j = the mean of the vectors in bucket j, for j = 1..k.

At most f of the y_j contain a Byzantine vector. With both `mix` and `buckets`, the y_j are mixed. Mixing and bucketing are linear: Y = A X,
where the rows of X [m, numel] and Y [k, numel] are the old and the new vectors. This file calls the matrix A [k, m] `mixture`.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from .. import seeds, spec
from ..codecs import Update
from ..errors import ConfigError
from ..kernels.sums import mean_of_ranks
from .base import AcceptedUpdate, Aggregation, PhaseResult, RoundStrategy, RoundUpdates, quorum_size

BLOCK = 1 << 17  # coordinates that are read at a time; for speed, a multiple of hadamard.BLOCK
CHUNK = 1 << 13  # coordinates per inner product; a divisor of BLOCK
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class RobustOptions:
    f: int = 1  # largest number of Byzantine clients in a round
    mix: bool = False  # before the rule, average each update with its nearest neighbours
    # s: before the rule, average random groups (buckets) of s updates; 1 = no buckets
    buckets: int = 1

    def __post_init__(self) -> None:
        spec.check_ranges(self, f=(0, math.inf), buckets=(1, math.inf))


class Robust(RoundStrategy):
    """Base class of aggregation rules that tolerate up to f arbitrary vectors among the clients' updates."""

    options: RobustOptions
    Options: ClassVar[type] = RobustOptions
    supports_weights: ClassVar[bool] = False  # a Byzantine client could report a large weight

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._proven: frozenset[int] = frozenset()  # clients proven to be Byzantine in this round
        if not (clients := self.cohort_size):
            return
        if clients < self.min_cohort:
            raise ConfigError(
                f"--strategy {self.name} needs {self._needed()}, but a round has {clients}; "
                "give a larger --participation, more --clients, or a smaller f"
            )
        if (quorum := quorum_size(self.config.quorum, clients)) < self.min_cohort:
            raise ConfigError(
                f"--strategy {self.name} needs {self._needed()}, but with --quorum {self.config.quorum:g} a round ends "
                f"after {quorum} answers; give a larger --quorum, or a smaller f"
            )

    @property
    def f(self) -> int:
        """Number of arbitrary vectors to tolerate: the option f, minus the number of clients rejected as Byzantine in this round."""
        return max(0, self.options.f - len(self._proven))

    def min_vectors(self) -> int:
        """Return the smallest number of input vectors with which the rule tolerates f arbitrary vectors."""
        return 2 * self.f + 1

    @property
    def min_cohort(self) -> int:
        """Smallest number of clients in a round with which the rule, mixing and bucketing tolerate f arbitrary vectors."""
        vectors = max(self.min_vectors(), 2 * self.f + 1 if self.options.mix else 1)
        return (vectors - 1) * self.options.buckets + 1

    def on_phase_end(self, result: PhaseResult) -> Mapping[int, str]:
        self._proven = result.proven_byzantine
        return {}

    def reject(self, accepted: Sequence[AcceptedUpdate]) -> Mapping[int, str]:
        if len(accepted) >= self.min_cohort:
            return {}
        reason = f"strategy '{self.name}' needs {self._needed()}; {len(accepted)} were accepted"
        return {a.client: reason for a in accepted}

    def mixture(self, round: int, vectors: int, products: np.ndarray | None) -> np.ndarray | None:
        """Return the matrix of bucketing and mixing, float64 [k, vectors], or None if neither is used.

        `products`: the inner products of the vectors, [vectors, vectors], or None without mixing.
        """
        mixed = None
        if self.options.buckets > 1:
            mixed = buckets(vectors, self.options.buckets, self.config.seed, round)
        if self.options.mix and products is not None:
            bucket_products = products if mixed is None else mixed @ products @ mixed.T
            near = nearest(squared_distances(bucket_products), self.f)
            mixed = near if mixed is None else near @ mixed
        return mixed

    def _needed(self) -> str:
        o, n_proven = self.options, self.options.f - self.f
        excluded = f" (Byzantine clients excluded so far: {n_proven})" if n_proven else ""
        return f"{self.min_cohort} clients in a round for f={o.f}{excluded}" + (
            f" and buckets={o.buckets}" if o.buckets > 1 else ""
        )


class ByCoordinate(Robust):
    """A rule that sorts the values of each coordinate, and averages the values in a range of ranks."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        sparse = getattr(self.uplink, "density", 1.0) < 0.5 and not self.uplink.shares_seed
        if sparse and not self.options.mix:
            self.warn(
                f"--strategy {self.name} loses values that only a few clients send, and with --uplink {self.uplink} each client "
                f"sends different coordinates; give --strategy {self.name}:mix=true, or --uplink eden:bits=1,damped=true"
            )

    @abstractmethod
    def ranks(self, vectors: int) -> tuple[int, int]:
        """Return the range of ranks (start, stop) to average; rank 0 is the smallest value."""

    def aggregate(self, updates: RoundUpdates, into: Tensor) -> Aggregation:
        rows, out = UpdateMatrix([a.update for a in updates.accepted], into.numel()), into.numpy()
        products = rows.products() if self.options.mix else None
        mixture = self.mixture(updates.round, len(rows), products)
        for span, values in rows.blocks():
            vectors = values if mixture is None else _mixed(mixture, values)
            out[span] = mean_of_ranks(vectors, *self.ranks(len(vectors)))
        return Aggregation()


class ByDistance(Robust):
    """A rule that computes a weighted sum of the vectors, with weights that depend on the distances between the vectors."""

    @abstractmethod
    def vector_weights(self, products: np.ndarray) -> np.ndarray:
        """Return the weights of k vectors, float64 [k], given their inner products [k, k]. The vectors of `server_vectors` come last."""

    def server_vectors(self) -> Sequence[Update | None]:
        """Return further vectors for `vector_weights`, which are not bucketed or mixed."""
        return ()

    def aggregate(self, updates: RoundUpdates, into: Tensor) -> Aggregation:
        sent, own = [a.update for a in updates.accepted], self.server_vectors()
        rows = UpdateMatrix([*sent, *own], into.numel())
        products, m = rows.products(), len(sent)
        mixture = self.mixture(updates.round, m, products[:m, :m])
        if mixture is None:
            rows.combine(self.vector_weights(products), into)
            return Aggregation()
        whole = np.zeros((len(mixture) + len(own), len(rows)))
        whole[: len(mixture), :m], whole[len(mixture) :, m:] = mixture, np.eye(len(own))
        rows.combine(self.vector_weights(whole @ products @ whole.T) @ whole, into)
        return Aggregation()


def _mixed(mixture: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the matrix product of `mixture` [k, m] and a block of values [m, width], float32 [k, width], summed in float64."""
    out = np.empty((len(mixture), values.shape[1]), np.float32)
    for start in range(0, values.shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        out[:, part] = mixture @ values[:, part].astype(np.float64)
    return out


def buckets(vectors: int, size: int, seed: int, round: int) -> np.ndarray:
    """Return the matrix of bucketing, [buckets, vectors]. A bucket has at most `size` vectors."""
    order = seeds.generator(seed, "buckets", round).permutation(vectors)
    matrix = np.zeros((-(-vectors // size), vectors))
    for j, row in enumerate(matrix):
        members = order[j * size : (j + 1) * size]
        row[members] = 1 / len(members)
    return matrix


def nearest(distances: np.ndarray, f: int) -> np.ndarray:
    """Return the matrix of mixing, [m, m], given the squared distances [m, m]. Row i averages the m − f vectors nearest to vector i."""
    m = len(distances)
    matrix = np.zeros((m, m))
    for i, row in enumerate(distances):
        row = np.where(np.arange(m) == i, -1.0, row)  # row i always includes vector i
        matrix[i, np.argsort(row, kind="stable")[: m - f]] = 1 / (m - f)
    return matrix


class UpdateMatrix:
    """Updates as the rows of a matrix [m, numel]. None is a row of zeros, NaN becomes 0, and ±infinity becomes the largest float32."""

    block: ClassVar[int] = BLOCK

    def __init__(self, updates: Sequence[Update | None], numel: int):
        self.updates, self.numel = list(updates), numel

    def __len__(self) -> int:
        return len(self.updates)

    def blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield pairs of a slice of coordinates, and all rows' values there, float32 [m, width]. The next pair overwrites the values."""
        buffer = np.empty(len(self) * min(self.block, self.numel), np.float32)
        for start in range(0, self.numel, self.block):
            stop = min(start + self.block, self.numel)
            values = buffer[: len(self) * (stop - start)].reshape(len(self), stop - start)
            for row, update in zip(values, self.updates, strict=True):
                row[:] = _finite(update.block(start, stop)) if update is not None else 0
            yield slice(start, stop), values

    def products(self) -> np.ndarray:
        """Return the inner products of all pairs of rows: a symmetric matrix, float64 [m, m]."""
        total = np.zeros((len(self), len(self)))
        for _, values in self.blocks():
            for start in range(0, values.shape[1], CHUNK):
                part = values[:, start : start + CHUNK]
                # Skip columns of zeros, which most columns of sparse updates are.
                part = part[:, part.any(axis=0)].astype(np.float64)
                total += part @ part.T
        return (total + total.T) / 2

    def combine(self, weights: np.ndarray, into: Tensor) -> None:
        """Write the weighted sum of the rows to `into`, float32 [numel]. Sums are in float64. Rows with weight 0 are not read."""
        pairs = list(zip(weights.tolist(), self.updates, strict=True))
        out = into.numpy()
        for start in range(0, self.numel, self.block):
            stop = min(start + self.block, self.numel)
            total = np.zeros(stop - start)
            for weight, update in pairs:
                if weight and update is not None:
                    total += weight * _finite(update.block(start, stop)).astype(np.float64)
            out[start:stop] = total.clip(-LARGEST, LARGEST, out=total)


def _finite(values: np.ndarray) -> np.ndarray:
    return values if np.isfinite(values).all() else np.nan_to_num(values)


def squared_distances(products: np.ndarray) -> np.ndarray:
    """Return the squared distances ‖xᵢ − xⱼ‖² of m vectors, float64 [m, m], given their inner products [m, m]."""
    squares = products.diagonal()
    distances = (squares[:, None] + squares[None] - 2 * products).clip(0)
    np.fill_diagonal(distances, 0)
    return distances


def distances_to_mean(products: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the distances ‖xᵢ − Σ wⱼ xⱼ‖ of m vectors to their weighted mean, float64 [m], given their inner products [m, m]."""
    projections = products @ weights
    return np.sqrt((products.diagonal() - 2 * projections + weights @ projections).clip(0))
