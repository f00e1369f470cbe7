"""A codec applied to parts of the vector: tensor by tensor, `stc:density=1%@layer`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from ..errors import ConfigError, FrameError
from ..kernels import Rows
from ..layout import Layout
from . import frame
from .base import SEEDS, Codec, Context
from .frame import Section
from .update import Update


@dataclass(frozen=True)
class Scoped(Codec):
    """A codec applied to parts of the vector. Its facts are those of the codec."""

    inner: Codec
    facts: ClassVar[tuple[str, ...]] = tuple(
        "name id source linear portable seeded shares_seed".split()
    )

    def __post_init__(self) -> None:
        for fact in self.facts:
            object.__setattr__(self, fact, getattr(self.inner, fact))

    @property
    def unscoped(self) -> Codec:
        return self.inner

    @property
    def density(self) -> float:
        return self.inner.density


@dataclass(frozen=True)
class LayerWise(Scoped):
    """A codec applied tensor by tensor. Its frames have a section per tensor of the layout."""

    scope: ClassVar[int] = frame.LAYER
    facts: ClassVar[tuple[str, ...]] = (*Scoped.facts, "whole")

    def __str__(self) -> str:
        return f"{self.inner}@layer"

    def contraction(self, numel: int) -> float | None:
        whole = self.inner.contraction(numel)
        # k of the whole can be a third up, that of a tensor down.
        return whole / 2 if whole and hasattr(self.inner, "density") else whole

    def variance(self, numel: int) -> float | None:
        whole = self.inner.variance(numel)
        # 1 + ω doubles for the same reason.
        return 1 + 2 * whole if whole and hasattr(self.inner, "density") else whole

    def longest_section(self, numel: int) -> int | None:
        return self.inner.longest_section(numel)

    def open_batch(
        self, frames: Sequence[bytes], numel: int, layout: Layout | None = None
    ) -> list[Update | FrameError]:
        return self.inner.open_batch(frames, numel, layout)

    def _merge_sections(self, sections: Sequence[Section]) -> Section:
        return self.inner._merge_sections(sections)

    def _sections(self, rows: Rows, seeds: Sequence[int], context: Context) -> list[list[Section]]:
        if context.layout is None:
            raise ConfigError(f"{self} needs layout=…, or write @model in place of @layer")
        frames: list[list[Section]] = [[] for _ in rows]
        for i, e in enumerate(context.layout):
            parts = rows[:, e.span] if isinstance(rows, Tensor) else [row[e.span] for row in rows]
            own = [(seed + i) % SEEDS for seed in seeds]
            told = replace(context, layout=e.alone(), section=i)
            made = self.inner._encode_rows(parts, own, told)
            for sections, section in zip(frames, made, strict=True):
                sections.append(section)
        return frames
