"""Dense floats: the null objects that everything else is compared with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..layout import Layout
from . import half
from .base import Codec, Context, expect
from .frame import CodecId, Section
from .update import Dense, Update


@dataclass(frozen=True)
class Identity(Codec):
    """Every coordinate as float32: loses nothing."""

    name: ClassVar[str] = "identity"
    id: ClassVar[CodecId] = CodecId.IDENTITY
    linear: ClassVar[bool] = True

    def contraction(self, numel: int) -> float:
        return 1.0

    def variance(self, numel: int) -> float:
        return 0.0

    def pack(self, x: Tensor, seed: int, context: Context) -> Section:
        return Section(x.numel(), x.to(torch.float32).cpu().numpy().astype("<f4", copy=False).tobytes())

    def unpack(self, section: Section, layout: Layout, seed: int) -> Update:
        expect(section.count == layout.numel and len(section.body) == 4 * layout.numel, "a dense section has another length")
        values = np.frombuffer(section.body, "<f4")
        expect(bool(np.isfinite(values).all()), "a dense section holds NaN or infinity")
        return Dense(values)

    def merge_sections(self, sections: Sequence[Section]) -> Section:
        expect(all(len(s.body) == 4 * s.count == 4 * sections[0].count for s in sections), "a dense section has another length")
        with np.errstate(over="ignore", invalid="ignore"):
            total = np.sum([np.frombuffer(s.body, "<f4") for s in sections], axis=0, dtype=np.float32)
        expect(bool(np.isfinite(total).all()), "the sum of the frames is not finite")
        return Section(total.size, total.astype("<f4", copy=False).tobytes())


@dataclass(frozen=True)
class Half(Codec):
    """Every coordinate as float16 with one power of two for all: half the bytes (codecs/half.py)."""

    name: ClassVar[str] = "fp16"
    id: ClassVar[CodecId] = CodecId.FP16
    linear: ClassVar[bool] = False

    def contraction(self, numel: int) -> float:
        return 1 - 2.0**-21

    def pack(self, x: Tensor, seed: int, context: Context) -> Section:
        return Section(x.numel(), half.pack(x.to(torch.float32).cpu().numpy()) if x.numel() else b"")

    def unpack(self, section: Section, layout: Layout, seed: int) -> Update:
        expect(section.count == layout.numel, "a dense section has another length")
        return Dense(half.unpack(section.body, layout.numel) if layout.numel else np.empty(0, np.float32))
