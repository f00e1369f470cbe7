"""Factors of low rank by one step of power iteration.

Vogels, Karimireddy, Jaggi: PowerSGD: Practical low-rank gradient compression for distributed optimization. NeurIPS 2019, algorithm 1.

    P ← M Q;  P̂ ← an orthonormal basis of P;  Q ← Mᵀ P̂;  C(M) = P̂ Qᵀ,  for each matrix M [rows, columns], Q [columns, rank]

Q starts from independent normals, or from what `announced` holds for the matrix: a memory's last Q. Tensors that are no matrices, and
matrices that are no larger than their factors, are sent as they are. The error is M minus a projection of it, so it is never longer than
M. From normals, with Z an orthonormal basis of the span of Q: ‖P̂ᵀM‖² ≥ ‖MZ‖², in the mean rank/columns · ‖M‖², and
columns ≤ numel/(rank + 1) where factors are sent at all.

Unlike the paper, where P and Q are averaged over the workers one after the other, a frame holds both factors of one client's own matrix;
strategies/powersgd.py is the paper's form, in two exchanges.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, SpecError
from ..kernels import philox
from ..layout import Layout
from .base import Context
from .matrices import FLOAT, MOST, MatrixCodec, Product, cut, shape_of, shaped
from .update import Dense, Sections, Update


@dataclass(frozen=True)
class PowerSGD(MatrixCodec):
    """Two factors of low rank for each matrix, the rest as float32."""

    rank: int = 2  # columns of the factors; higher = larger frames, smaller error

    name: ClassVar[str] = "powersgd"
    id: ClassVar[int] = 21
    source: ClassVar[str] = "Vogels et al. 2019"

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MOST:
            raise SpecError(f"rank is {self.rank}; give 1 to {MOST}")

    def contraction(self, numel: int) -> float:
        return min(1.0, self.rank * (self.rank + 1) / max(numel, 1))

    def factor(
        self, matrix: Tensor, tensor: int, seed: int, context: Context
    ) -> tuple[Tensor, Tensor] | None:
        rows, columns = matrix.shape
        if not pays(self.rank, rows, columns):
            return None
        start = context.announced.get(start_name(tensor))
        if start is not None and len(start) != FLOAT.itemsize * columns * self.rank:
            raise ConfigError(
                f"a start of {len(start)} bytes was announced for a factor [{columns}, {self.rank}]; announce its floats"
            )
        right = (
            normal(seed, columns * self.rank, tensor)
            if start is None
            else np.frombuffer(start, FLOAT)
        )
        right = torch.from_numpy(right.astype(np.float64).reshape(columns, self.rank)).to(
            matrix.device
        )
        left = orthonormal(matrix @ right)
        return left, matrix.T @ left


def pays(rank: int, rows: int, columns: int) -> bool:
    """Return whether factors of this rank are fewer numbers than the matrix."""
    return rank * (rows + columns) < rows * columns


def start_name(tensor: int) -> str:
    """Under which `Context.announced` holds the Q that the iteration starts from for a tensor of the layout."""
    return f"right/{tensor}"


def orthonormal(p: Tensor) -> Tensor:
    """An orthonormal basis [rows, k] of a space that holds the columns of P [rows, k], k ≤ rows: float64, rounded to float32."""
    return torch.linalg.qr(p.to(torch.float64)).Q.to(torch.float32).to(torch.float64)


def normal(seed: int, count: int, stream: int = 0) -> np.ndarray:
    """Independent standard normals [count], float64, drawn by Box and Muller's formula."""
    u = (philox.words(seed, 2 * count, stream=stream).reshape(2, count) + 0.5) / 2**32
    return np.sqrt(-2 * np.log(u[0])) * np.cos(2 * np.pi * u[1])


class Split:
    """The tensors of a layout that are sent as factors of a rank: for the form in two exchanges, whose frames hold numbers alone.

    `left` and `right` are the shapes of the factors, `rest` those of the tensors that are sent as they are.
    """

    def __init__(self, layout: Layout, rank: int):
        shapes = [(e, shape_of(e)) for e in layout]
        self.numel = layout.numel
        self.matrices = [(e, shape) for e, shape in shapes if shape and pays(rank, *shape)]
        self.others = [e for e, shape in shapes if not (shape and pays(rank, *shape))]
        self.left = [(rows, rank) for _, (rows, _) in self.matrices]
        self.right = [(columns, rank) for _, (_, columns) in self.matrices]
        self.rest = [(e.numel,) for e in self.others]

    def of(self, x: Tensor) -> Iterator[Tensor]:
        """The matrices of a vector [numel], one after the other, float64."""
        return (x[e.span].reshape(shape).to(torch.float64) for e, shape in self.matrices)

    def update(self, left: bytes, numbers: np.ndarray) -> Update:
        """P̂ Qᵀ of the P̂ in `left` and the Q at the beginning of `numbers`, behind which stands the rest, float32."""
        found = cut(numbers, [*self.right, *self.rest])
        factors = zip(self.matrices, shaped(left, self.left), found, strict=False)
        parts: list[tuple[slice, Update]] = [(e.span, Product(p, q)) for (e, _), p, q in factors]
        parts += [
            (e.span, Dense(values))
            for e, values in zip(self.others, found[len(parts) :], strict=True)
        ]
        return Sections(
            self.numel, tuple(sorted(parts, key=lambda part: (part[0].start, part[0].stop)))
        )
