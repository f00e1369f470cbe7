"""PowerSGD: low-rank factors by one step of power iteration.

Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization", NeurIPS 2019, algorithm 1.

Each matrix M [rows, columns] is decoded as C(M), which is computed from an initial matrix Q [columns, rank]:

    P ← M Q;
    P̂ ← an orthonormal basis of the columns of P;
    Q ← Mᵀ P̂;
    C(M) = P̂ Qᵀ.

The initial Q consists of independent normal random numbers. With the memory `lowrank`, the initial Q is the final Q of the client's last
accepted update, if there is one. The memory passes this Q in `Context.announced`. Tensors with fewer than two dimensions are sent as
values, and so are matrices that are not larger than their factors.

The error M − C(M) is an orthogonal projection of M, so its norm is at most ‖M‖. If the initial Q is random, the contraction factor is at
least rank·(rank + 1)/numel for a matrix with numel entries.

In the paper, the workers average P and then average Q. Here, each client sends both factors of its own matrix in one frame. The strategy
`powersgd` (strategies/powersgd.py) implements the paper's algorithm with two exchanges of messages per round.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .. import spec
from ..errors import ConfigError
from ..kernels import philox
from ..layout import Entry, Layout
from .base import Context
from .matrices import FLOAT, MAX_RANK, LowRankUpdate, MatrixCodec, as_arrays, read_arrays, shape_of
from .update import Dense, Sections, Update


@dataclass(frozen=True)
class PowerSGD(MatrixCodec):
    """A codec that sends each matrix as two low-rank factors, and all other tensors uncompressed as float32."""

    # Number of columns of the factors. A higher rank gives larger frames and a smaller error.
    rank: int = 2

    name = "powersgd"
    id = 21
    source = "Vogels et al. 2019"

    def __post_init__(self) -> None:
        spec.check_ranges(self, rank=(1, MAX_RANK))

    def contraction(self, numel: int) -> float:
        return min(1.0, self.rank * (self.rank + 1) / max(numel, 1))

    def factor(
        self, matrix: Tensor, tensor: int, seed: int, context: Context
    ) -> tuple[Tensor, Tensor] | None:
        rows, columns = matrix.shape
        if not factors_are_smaller(self.rank, rows, columns):
            return None
        start = context.announced.get(start_name(tensor))
        if start is not None and len(start) != FLOAT.itemsize * columns * self.rank:
            raise ConfigError(
                f"the factor announced as '{start_name(tensor)}' has {len(start)} bytes; announce {columns}·{self.rank} float32 numbers"
            )
        if start is None:
            numbers = normal(seed, columns * self.rank, tensor)
        else:
            numbers = np.frombuffer(start, FLOAT).astype(np.float64)
        right = torch.from_numpy(numbers.reshape(columns, self.rank)).to(matrix.device)
        left = orthonormal(matrix @ right)
        return left, matrix.T @ left


def factors_are_smaller(rank: int, rows: int, columns: int) -> bool:
    """Return whether two factors of this rank have fewer numbers than a matrix [rows, columns]."""
    return rank * (rows + columns) < rows * columns


def start_name(tensor: int) -> str:
    """Return the name of a tensor's initial Q in `Context.announced`. `tensor`: index of the tensor in the layout."""
    return f"right/{tensor}"


def orthonormal(p: Tensor) -> Tensor:
    """Return an orthonormal basis [rows, k] of a space that contains the columns of p [rows, k], float64 but rounded to float32."""
    return torch.linalg.qr(p.to(torch.float64)).Q.to(torch.float32).to(torch.float64)


def normal(seed: int, count: int, stream: int = 0) -> np.ndarray:
    """Return independent standard normal numbers [count], float64, by the Box–Muller transform."""
    u = (philox.words(seed, 2 * count, stream=stream).reshape(2, count) + 0.5) / 2**32
    return np.sqrt(-2 * np.log(u[0])) * np.cos(2 * np.pi * u[1])


class FactorLayout:
    """The tensors of a layout, divided into tensors that are sent as factors, and tensors that are sent as values.

    The strategy and the memory of PowerSGD use this class. `matrices`: tensors that are sent as factors, with their shapes as matrices.
    `others`: tensors that are sent as values.
    """

    def __init__(self, layout: Layout, rank: int):
        self.numel = layout.numel
        self.matrices: list[tuple[Entry, tuple[int, int]]] = []
        self.others: list[Entry] = []
        for e in layout:
            shape = shape_of(e)
            if shape and factors_are_smaller(rank, *shape):
                self.matrices.append((e, shape))
            else:
                self.others.append(e)
        self.left_shapes = [(rows, rank) for _, (rows, _) in self.matrices]
        self.right_shapes = [(columns, rank) for _, (_, columns) in self.matrices]
        self.other_shapes = [(e.numel,) for e in self.others]

    def matrices_of(self, x: Tensor) -> Iterator[Tensor]:
        """Return an iterator over the matrices in a vector x [numel] that are sent as factors, as float64."""
        return (x[e.span].reshape(shape).to(torch.float64) for e, shape in self.matrices)

    def update(self, left: bytes, numbers: np.ndarray) -> Update:
        """Return an update in which each matrix is P̂ Qᵀ.

        `left`: the factors P̂ of all matrices, concatenated, as the bytes of float32 numbers. `numbers`: the factors Q of all matrices,
        followed by the values of `others`, concatenated, as float32. Raises ValueError if `left` has the wrong length, or holds NaN or
        infinity.
        """
        arrays = as_arrays(numbers, [*self.right_shapes, *self.other_shapes])
        factors = zip(self.matrices, read_arrays(left, self.left_shapes), arrays, strict=False)
        parts: list[tuple[slice, Update]] = []
        parts += [(e.span, LowRankUpdate(p, q)) for (e, _), p, q in factors]
        others = zip(self.others, arrays[len(parts) :], strict=True)
        parts += [(e.span, Dense(values)) for e, values in others]
        parts.sort(key=lambda part: (part[0].start, part[0].stop))
        return Sections(self.numel, tuple(parts))
