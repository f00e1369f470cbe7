"""Atoms drawn with the probabilities of least variance.

Wang, Sievert, Charles, Liu, Wright, Papailiopoulos: ATOMO: Communication-efficient learning via atomic sparsification. NeurIPS 2018,
algorithm 1; with entries for atoms, Wangni, Wang, Liu, Zhang: Gradient sparsification for communication-efficient distributed
optimization. NeurIPS 2018.

    x = Σ λᵢ aᵢ, atoms aᵢ orthonormal, λᵢ > 0;   C(x) = Σ (λᵢ / pᵢ) aᵢ over the drawn i
    pᵢ = min(1, λᵢ / τ) with Σ pᵢ = s, the budget:  Σ λᵢ²/pᵢ, and so the variance, is the least

The atoms are u vᵀ of the singular value decomposition of each matrix, or the coordinates. With k atoms, p = s/k would have the variance
(k/s − 1)‖x‖²; that of the least is no larger.

Unlike the paper, which draws every atom by itself, so that frames have s atoms in the mean, atoms are drawn together (Madow, 1949): cut a
line into pieces of the lengths pᵢ and take those that hold 0, 1, 2, … plus one uniform number. Each atom has its pᵢ still, atoms are
orthogonal, so mean and variance are the same; a frame has ⌊s⌋ or ⌈s⌉ atoms. Probabilities are whole multiples of 2⁻³², rounded up,
and no smaller than it takes for λᵢ/pᵢ to fit float32; they stand in λᵢ/pᵢ as they are. A matrix whose factors would be no shorter is
sent as it is, and so are vectors beside matrices. The decomposition is what costs: seconds for sides of thousands.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError
from ..kernels import philox
from ..kernels import positions as wire
from ..layout import Layout
from .base import Context, expect
from .frame import EMPTY, Section
from .matrices import FLOAT, LARGEST, MOST, MatrixCodec, shaped
from .selection import FLAG_SHIFT, FORM, take
from .update import Sparse, Update

ONE = 2**32  # the probability 1
NO_ATOM = 2.0**-40  # singular values that are smaller, relative to the largest, are rounding
SINGULAR, ENTRIES = 0, 1  # flag of the first byte


@dataclass(frozen=True)
class Atomo(MatrixCodec):
    """A few singular triplets or entries, drawn and scaled so that the mean is the update."""

    budget: float = (
        3.0  # atoms sent of each matrix, or of the vector; below 1: a share of those there are
    )
    atoms: Literal["singular", "entries"] = "singular"

    name: ClassVar[str] = "atomo"
    id: ClassVar[int] = 20
    source: ClassVar[str] = "Wang et al. 2018"

    def __post_init__(self) -> None:
        if not self.budget > 0:
            raise SpecError(
                f"budget is {self.budget:g}; give a number of atoms, or a share below 1, such as 1%"
            )

    def variance(self, numel: int) -> float:
        atoms = numel if self.atoms == "entries" else math.isqrt(numel)
        return max(0.0, atoms / self._budget(atoms) - 1)

    def needs_layout(self) -> bool:
        return self.atoms == "singular"

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        if self.atoms == "entries":
            return self._pack_entries(x.to(torch.float32).cpu().numpy(), seed)
        count, body = super()._encode_row(x, seed, context)
        return Section(count, bytes([SINGULAR]) + body) if count else EMPTY

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        if not section.count:
            return Sparse(layout.numel, np.empty(0, np.int64), np.empty(0, np.float32))
        first, data = take(memoryview(section.body), 1)
        if first[0] == SINGULAR:
            return super()._decode_row(Section(section.count, data), layout, seed)
        expect(first[0] >> FLAG_SHIFT == ENTRIES, "a section holds atoms of no known kind")
        mine, code = take(data, FLOAT.itemsize * section.count)
        (values,) = shaped(mine, [(section.count,)])
        expect(bool(values.all()), "a section holds an entry that is zero")
        return Sparse(
            layout.numel, wire.unpack(code, section.count, first[0] & FORM, layout.numel), values
        )

    def factor(
        self, matrix: Tensor, tensor: int, seed: int, context: Context
    ) -> tuple[Tensor, Tensor] | None:
        numbers, budget = sum(matrix.shape), self._budget(min(matrix.shape))
        if math.ceil(min(budget, *matrix.shape)) * numbers >= matrix.numel():
            return None
        u, sizes, v = torch.linalg.svd(matrix, full_matrices=False)
        sizes = sizes.cpu().numpy()
        sizes[sizes < NO_ATOM * sizes[0]] = 0
        shares = probabilities(sizes, budget)
        scaled = np.divide(sizes * ONE, shares, out=np.zeros_like(sizes), where=shares > 0)
        most = -(-int(shares.sum()) // ONE)
        if most > MOST or most * numbers >= matrix.numel() or scaled.sum() > LARGEST:
            return None
        drawn = torch.from_numpy(draw(shares, seed, tensor)).to(matrix.device)
        return u[:, drawn], v[drawn].T * torch.from_numpy(scaled).to(matrix.device)[drawn]

    def _pack_entries(self, x: np.ndarray, seed: int) -> Section:
        shares = probabilities(np.abs(x, dtype=np.float64), self._budget(x.size))
        positions = draw(shares, seed)
        if not positions.size:
            return EMPTY
        values = (x[positions] * np.float64(ONE) / shares[positions]).astype(FLOAT)
        form, code = wire.pack(positions, x.size)
        return Section(
            positions.size, bytes([form | ENTRIES << FLAG_SHIFT]) + values.tobytes() + code
        )

    def _budget(self, atoms: int) -> float:
        return self.budget if self.budget >= 1 else max(1.0, self.budget * atoms)


def probabilities(sizes: np.ndarray, budget: float) -> np.ndarray:
    """The probabilities of atoms of these sizes ≥ 0, float64 [k], that have the least variance at so many in the mean: int64 [k] of 2³²."""
    left, certain, tau = budget, sizes < 0, 0.0
    while (rest := float(sizes[~certain].sum())) and left > 0:
        tau = rest / left
        more = ~certain & (sizes >= tau)
        if not more.any():
            break
        certain |= more
        left = budget - np.count_nonzero(certain)
    p = (
        np.divide(sizes, tau, out=np.zeros_like(sizes), where=~certain)
        if tau
        else np.zeros_like(sizes)
    )
    p[certain] = 1.0
    return np.ceil(np.minimum(1.0, np.maximum(p, sizes / LARGEST)) * ONE).astype(np.int64)


def draw(shares: np.ndarray, seed: int, stream: int = 0) -> np.ndarray:
    """Indices of atoms, int64, ascending, each drawn with its share of 2³²; in all ⌊Σ shares / 2³²⌋ or one more."""
    ends = np.cumsum(shares)
    first = int(philox.words(seed, 1, stream=stream)[0])
    return np.searchsorted(ends, np.arange(first, ends[-1] if ends.size else 0, ONE), side="right")
