"""Products of two codecs: the first sparsifies, the second quantizes, as in `topk:density=1%+qsgd:levels=4`.

Basu et al., "Qsparse-local-SGD: distributed SGD with quantization, sparsification, and local computations", NeurIPS 2019.

The first codec selects coordinates, and the second codec encodes the vector of their values. If the first codec has an option `values`, the
precision of its values, this option has no effect. Both codecs get the same seed, but use different random streams.

The contraction factor of the product is δ₁·δ₂. Here, δ₁ is the contraction factor of the first codec. The factor δ₂ is that of the second
codec for vectors of k coordinates, where k is the largest number of coordinates that the first codec selects. An unbiased codec with a
variance bound ω ≤ 1 has a contraction factor of at least 1 − ω (lemma 1 of the paper). If both codecs are unbiased with the variance bounds
ω₁ and ω₂, the product is unbiased with the variance bound (1 + ω₁)(1 + ω₂) − 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError
from ..kernels import Chosen, Rows, split_runs
from ..layout import Layout
from .base import Codec, Context, expect, or_raise
from .frame import PRODUCT, ProductId, read_section, read_varint, varint, with_length
from .matrices import MatrixCodec
from .selection import DensityCodec, Selective, Unpacked, take


@dataclass(frozen=True)
class Pair(Codec):
    """Base class of codecs that join two codecs by +: `first` selects coordinates, and `second` encodes them."""

    first: Selective
    second: Codec

    def __post_init__(self) -> None:
        if not isinstance(self.first, Selective) or isinstance(self.first, Pair):
            fix = f"topk:density=1%+{self.second.name}"
            if isinstance(self.second, Selective):
                fix = f"{self.second.name}+{self.first.name}"
            raise SpecError(
                f"a product starts with a codec that selects coordinates, but '{self.first.name}' does not; give {fix}"
            )
        object.__setattr__(self, "source", f"{self.first.source}; {self.second.source}")
        object.__setattr__(self, "portable", self.first.portable and self.second.portable)

    def __str__(self) -> str:
        return f"{self.first}+{self.second}"

    @property
    def density(self) -> float:
        return self.first.density


@dataclass(frozen=True)
class Product(Pair, Selective):
    """A codec in which `first` selects coordinates and `second` encodes the values of these coordinates."""

    id = PRODUCT

    def __post_init__(self) -> None:
        super().__post_init__()
        problem = ""
        if isinstance(self.second, Selective):
            problem = "selects coordinates again"
        elif self.second.shares_seed:
            problem = "needs all clients to send the same coordinates"
        elif isinstance(self.second, MatrixCodec):
            problem = "needs matrices"
        if problem:
            raise SpecError(
                f"the second codec of a product encodes the selected values, but '{self.second.name}' {problem}; "
                f"give another codec, such as {self.first.name}+fp16"
            )
        object.__setattr__(self, "name", f"{self.first.name}+{self.second.name}")
        object.__setattr__(self, "id", ProductId(self.first.id, self.second.id))
        object.__setattr__(self, "seeded", self.first.seeded or self.second.seeded)
        object.__setattr__(self, "draws", self.first.draws)

    def contraction(self, numel: int) -> float | None:
        first = self.first.contraction(numel)
        second = contraction(self.second, self.max_count(numel))
        return None if first is None or second is None else first * second

    def variance(self, numel: int) -> float | None:
        first, second = self.first.variance(numel), self.second.variance(self.max_count(numel))
        return None if first is None or second is None else (1 + first) * (1 + second) - 1

    def longest_section(self, numel: int) -> int | None:
        k = self.max_count(numel)
        first, second = self.first.longest_section(numel), self.second.longest_section(k)
        if first is None or second is None or not isinstance(self.first, DensityCodec):
            return None
        return first - self.first.value_bytes(k) + len(varint(second)) + second

    def choose(self, rows: Rows, seeds: Sequence[int]) -> tuple[Chosen, Tensor]:
        return self.first.choose(rows, seeds)

    def max_count(self, numel: int) -> int:
        return self.first.max_count(numel)

    def draw_positions(self, numel: int, count: int, seed: int) -> np.ndarray:
        return self.first.draw_positions(numel, count, seed)

    def pack_values(
        self, values: np.ndarray, counts: np.ndarray, seeds: Sequence[int], context: Context
    ) -> list[tuple[int, bytes]]:
        packed = []
        for run, seed in zip(split_runs(values, counts), seeds, strict=True):
            own = replace(context, layout=Layout.flat(run.size))
            (section,) = self.second._encode_rows([torch.from_numpy(run)], [seed], own)
            packed.append((0, b"".join(with_length(section))))
        return packed

    def unpack_values(self, flag: int, data: memoryview, count: int, seed: int) -> Unpacked:
        expect(flag == 0, f"the values have the unknown format {flag}")
        length, start = read_varint(data)
        section, _ = take(data[start:], length)
        sections, layout = [read_section(section, count)], Layout.flat(count)
        update = or_raise(self.second._decode_rows(sections, layout, [seed])[0])
        return np.array(update.block(0, count), np.float32), start + length


def contraction(codec: Codec, numel: int) -> float | None:
    """Return the contraction factor that a codec declares, or 1 − ω if it only declares a variance bound ω ≤ 1, or else None."""
    declared, omega = codec.contraction(numel), codec.variance(numel)
    return 1 - omega if declared is None and omega is not None and omega <= 1 else declared
