"""Sparsify, then quantize: `topk:density=1%+qsgd:levels=4`.

Basu, Data, Karakus, Diggavi: Qsparse-local-SGD: distributed SGD with quantization, sparsification, and local computations. NeurIPS 2019.

    C = b ∘ a:  a chooses coordinates, b codes the vector of their values as it would code a model's

a's own way to send values has no effect. Both halves have one seed, and words of their own from it. What b loses adds to what a loses:
C contracts with δ = δₐ·δᵦ(k), k the most that a sends, and an unbiased b with ωᵦ ≤ 1 has δᵦ ≥ 1 − ωᵦ (lemma 1 of the paper; for lemma 2 see
`damped` of qsgd). Where both are unbiased, so is C, with ω = (1 + ωₐ)(1 + ωᵦ(k)) − 1.

    values   length of the section of b (LEB128), that section: its count (LEB128) and its body; around them codecs/selection.py
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError
from ..kernels import Chosen, Rows
from ..layout import Layout
from .base import Codec, Context, expect, or_raise
from .frame import PRODUCT, ProductId, read_section, read_varint, varint
from .matrices import MatrixCodec
from .selection import Selective, Share, runs, take


@dataclass(frozen=True)
class Product(Selective):
    """Coordinates of the first codec, values of the second."""

    first: Selective
    second: Codec
    id: ClassVar[int] = PRODUCT

    def __post_init__(self) -> None:
        if not isinstance(self.first, Selective) or isinstance(self.first, Product):
            fix = (
                f"{self.second.name}+{self.first.name}"
                if isinstance(self.second, Selective)
                else f"topk:density=1%+{self.second.name}"
            )
            raise SpecError(
                f"a product begins with a codec that selects, and '{self.first.name}' does not; write {fix}"
            )
        if isinstance(self.second, Selective | MatrixCodec) or self.second.shares_seed:
            adds = (
                "adds up coordinates of different clients"
                if self.second.shares_seed
                else "needs matrices"
            )
            does = "selects again" if isinstance(self.second, Selective) else adds
            raise SpecError(
                f"a product ends with a codec of every value that is selected, and '{self.second.name}' {does}; "
                f"put another behind {self.first.name}, such as {self.first.name}+fp16"
            )
        for fact, value in {
            "name": f"{self.first.name}+{self.second.name}",
            "id": ProductId(self.first.id, self.second.id),
            "source": f"{self.first.source}; {self.second.source}",
            "seeded": self.first.seeded or self.second.seeded,
            "portable": self.first.portable and self.second.portable,
            "draws": self.first.draws,
        }.items():
            object.__setattr__(self, fact, value)

    def __str__(self) -> str:
        return f"{self.first}+{self.second}"

    def contraction(self, numel: int) -> float | None:
        chosen, coded = self.first.contraction(numel), contraction(self.second, self.most(numel))
        return None if chosen is None or coded is None else chosen * coded

    def variance(self, numel: int) -> float | None:
        chosen, coded = self.first.variance(numel), self.second.variance(self.most(numel))
        return None if chosen is None or coded is None else (1 + chosen) * (1 + coded) - 1

    @property
    def density(self) -> float:
        return self.first.density

    def longest_section(self, numel: int) -> int | None:
        k = self.most(numel)
        around, coded = self.first.longest_section(numel), self.second.longest_section(k)
        if around is None or coded is None or not isinstance(self.first, Share):
            return None
        return around - self.first.value_bytes(k) + len(varint(coded)) + coded

    def select(self, rows: Rows, seeds: Sequence[int]) -> Chosen:
        return self.first.select(rows, seeds)

    def choose(self, rows: Rows, seeds: Sequence[int]) -> tuple[Chosen, Tensor]:
        return self.first.choose(rows, seeds)

    def most(self, numel: int) -> int:
        return self.first.most(numel)

    def implied(self, numel: int, count: int, seed: int) -> np.ndarray:
        return self.first.implied(numel, count, seed)

    def pack_values(
        self, values: np.ndarray, counts: np.ndarray, seeds: Sequence[int], context: Context
    ) -> list[tuple[int, bytes]]:
        packed = []
        for run, seed in zip(runs(values, counts), seeds, strict=True):
            own = replace(context, layout=Layout.flat(run.size))
            (section,) = self.second._encode_rows([torch.from_numpy(run)], [seed], own)
            head = varint(section.count)
            packed.append((0, varint(len(head) + len(section.body)) + head + section.body))
        return packed

    def unpack_values(
        self, flag: int, data: memoryview, count: int, seed: int
    ) -> tuple[np.ndarray, int]:
        expect(flag == 0, "a section of a product has an unknown flag")
        length, start = read_varint(data)
        section, _ = take(data[start:], length)
        sections, layout = [read_section(section, count)], Layout.flat(count)
        update = or_raise(self.second._decode_rows(sections, layout, [seed])[0])
        return np.array(update.block(0, count), np.float32), start + length


def contraction(c: Codec, numel: int) -> float | None:
    """δ of a codec, also of an unbiased one that loses less than it is given."""
    declared, omega = c.contraction(numel), c.variance(numel)
    return 1 - omega if declared is None and omega is not None and omega <= 1 else declared
