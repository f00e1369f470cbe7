"""Dense floats: the null objects that everything else is compared with."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

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

    def unpack(self, section: Section, numel: int) -> Update:
        expect(section.count == numel and len(section.body) == 4 * numel, "a dense section has another length")
        values = np.frombuffer(section.body, "<f4")
        expect(bool(np.isfinite(values).all()), "a dense section holds NaN or infinity")
        return Dense(values)


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

    def unpack(self, section: Section, numel: int) -> Update:
        expect(section.count == numel, "a dense section has another length")
        return Dense(half.unpack(section.body, numel) if numel else np.empty(0, np.float32))
