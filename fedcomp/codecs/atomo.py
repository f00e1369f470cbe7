"""ATOMO decomposes a vector into a sum of basis vectors (atoms) and sends a random sample of the atoms.

Wang et al., "ATOMO: communication-efficient learning via atomic sparsification", NeurIPS 2018, algorithm 1. The variant atoms=entries is
also described by Wangni et al., "Gradient sparsification for communication-efficient distributed optimization", NeurIPS 2018.

A vector x is a sum of k orthonormal atoms aᵢ with coefficients λᵢ > 0, and is decoded as C(x):

    x = Σ λᵢ aᵢ;
    C(x) = Σ (λᵢ / pᵢ) aᵢ, summed over the atoms that are drawn;
    pᵢ = min(1, λᵢ / τ) is the probability of drawing atom i, with τ such that Σ pᵢ equals the option `budget`.

Of all probabilities with the sum `budget`, these pᵢ minimize the variance of C(x). The variance is at most (k/budget − 1)‖x‖², which would
be the variance for the equal probabilities pᵢ = budget/k.

With atoms=singular, each matrix of the model is decomposed separately. Its atoms are the matrices u vᵀ for the left and right singular
vectors u and v, and λᵢ are its singular values. With atoms=entries, each coordinate of the vector is an atom.

The paper draws every atom independently, so the number of drawn atoms varies around the budget. Here, atoms are drawn by systematic
sampling (Madow, 1949): divide a line into intervals of the lengths pᵢ, and take the intervals that contain r, r + 1, r + 2, … for one
uniform random number r in [0, 1). Because the atoms are orthogonal, C(x) has the same mean and variance as if the atoms were drawn
independently. The number of drawn atoms is the budget, rounded up or down.

Probabilities are rounded up to multiples of 2⁻³², and increased further where a sent value λᵢ/pᵢ would otherwise exceed the range of
float32. With atoms=singular, tensors with fewer than two dimensions are sent as float32 values, and so are some matrices
(codecs/matrices.py). The singular value decomposition takes seconds for a matrix with thousands of rows and columns.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError
from ..kernels import philox
from ..kernels import positions as positions_format
from ..layout import Layout
from . import floats
from .base import Context, expect
from .frame import EMPTY, Section
from .levels import LARGEST
from .matrices import FLOAT, MAX_RANK, MatrixCodec
from .selection import FLAG_SHIFT, FORM, take
from .update import Sparse, Update

ONE = 2**32  # The probability 1 in units of 2⁻³²
# Singular values below this fraction of the largest singular value are rounding errors, and are set to 0.
NEGLIGIBLE = 2.0**-40
# The first byte of the body contains one of these flags, for atoms=singular or atoms=entries.
SINGULAR, ENTRIES = 0, 1


@dataclass(frozen=True)
class Atomo(MatrixCodec):
    """A codec that sends a random sample of a vector's atoms, scaled so that the decoded vector is unbiased."""

    # Mean number of atoms that are sent for each matrix, or for the whole vector if atoms=entries. If it is below 1, it is a fraction of
    # the number of atoms.
    budget: float = 3.0
    atoms: Literal["singular", "entries"] = "singular"

    name = "atomo"
    id = 20
    source = "Wang et al. 2018"

    def __post_init__(self) -> None:
        if not self.budget > 0:
            raise SpecError(
                f"budget is {self.budget:g}; give a number of atoms, or a fraction below 1, such as 1%"
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
            return Sparse.zero(layout.numel)
        first, data = take(memoryview(section.body), 1)
        if first[0] == SINGULAR:
            return super()._decode_row(Section(section.count, data), layout, seed)
        flag = first[0] >> FLAG_SHIFT
        expect(flag == ENTRIES, f"the values have the unknown format {flag}")
        values, used = floats.unpack(data, section.count, floats.FP32)
        expect(bool(values.all()), "a value is 0, but atomo sends only nonzero values")
        positions = positions_format.unpack(
            data[used:], section.count, first[0] & FORM, layout.numel
        )
        return Sparse(layout.numel, positions, values)

    def factor(
        self, matrix: Tensor, tensor: int, seed: int, context: Context
    ) -> tuple[Tensor, Tensor] | None:
        numbers, budget = sum(matrix.shape), self._budget(min(matrix.shape))
        if math.ceil(min(budget, *matrix.shape)) * numbers >= matrix.numel():
            return None
        u, singular, v = torch.linalg.svd(matrix, full_matrices=False)
        sizes = singular.cpu().numpy()
        sizes[sizes < NEGLIGIBLE * sizes[0]] = 0
        p = probabilities(sizes, budget)
        scaled = np.divide(sizes * ONE, p, out=np.zeros_like(sizes), where=p > 0)
        max_atoms = -(-int(p.sum()) // ONE)
        too_many = max_atoms > MAX_RANK or max_atoms * numbers >= matrix.numel()
        if too_many or scaled.sum() > LARGEST:
            return None
        drawn = torch.from_numpy(draw(p, seed, tensor)).to(matrix.device)
        return u[:, drawn], v[drawn].T * torch.from_numpy(scaled).to(matrix.device)[drawn]

    def _pack_entries(self, x: np.ndarray, seed: int) -> Section:
        p = probabilities(np.abs(x, dtype=np.float64), self._budget(x.size))
        positions = draw(p, seed)
        if not positions.size:
            return EMPTY
        values = (x[positions] * np.float64(ONE) / p[positions]).astype(FLOAT)
        form, code = positions_format.pack(positions, x.size)
        head = bytes([form | ENTRIES << FLAG_SHIFT])
        return Section(positions.size, head + values.tobytes() + code)

    def _budget(self, atoms: int) -> float:
        return self.budget if self.budget >= 1 else max(1.0, self.budget * atoms)


def probabilities(sizes: np.ndarray, budget: float) -> np.ndarray:
    """Return the probabilities of drawing the atoms that minimize the variance, as int64 [k] in units of 2⁻³².

    `sizes`: the coefficient λ ≥ 0 of each of the k atoms, as float64 [k]. `budget`: the mean number of atoms to draw.
    """
    remaining, certain, tau = budget, sizes < 0, 0.0
    while (total := float(sizes[~certain].sum())) and remaining > 0:
        tau = total / remaining
        more = ~certain & (sizes >= tau)
        if not more.any():
            break
        certain |= more
        remaining = budget - np.count_nonzero(certain)
    p = sizes / tau if tau else np.zeros_like(sizes)
    p[certain] = 1.0
    return np.ceil(np.minimum(1.0, np.maximum(p, sizes / LARGEST)) * ONE).astype(np.int64)


def draw(p: np.ndarray, seed: int, stream: int = 0) -> np.ndarray:
    """Draw a random sample of atoms and return their indices, as int64, ascending.

    `p`: the probability of each atom, in units of 2⁻³². The number of drawn atoms is the sum of the probabilities, rounded up or down.
    """
    ends = np.cumsum(p)
    first = int(philox.words(seed, 1, stream=stream)[0])
    return np.searchsorted(ends, np.arange(first, ends[-1] if ends.size else 0, ONE), side="right")
