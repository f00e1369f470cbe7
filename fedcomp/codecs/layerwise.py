"""The scope `@layer`: a codec encodes every tensor separately, as in `stc:density=1%@layer`."""

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
    """A codec `inner` that is applied to parts of the vector. It has the attributes `inherited` of `inner`."""

    inner: Codec
    inherited: ClassVar[tuple[str, ...]] = tuple(
        "name id source linear portable seeded shares_seed".split()
    )

    def __post_init__(self) -> None:
        for name in self.inherited:
            object.__setattr__(self, name, getattr(self.inner, name))

    @property
    def unscoped(self) -> Codec:
        return self.inner

    @property
    def density(self) -> float:
        return self.inner.density


@dataclass(frozen=True)
class LayerWise(Scoped):
    """A codec applied to each tensor. Its frames have a section per tensor of the layout."""

    scope: ClassVar[int] = frame.LAYER
    inherited: ClassVar[tuple[str, ...]] = (*Scoped.inherited, "whole")

    def __str__(self) -> str:
        return f"{self.inner}@layer"

    def contraction(self, numel: int) -> float | None:
        whole = self.inner.contraction(numel)
        # k is rounded: for a tensor down, for the whole vector up by as much as a third.
        return whole / 2 if whole and hasattr(self.inner, "density") else whole

    def variance(self, numel: int) -> float | None:
        whole = self.inner.variance(numel)
        # For the same reason, 1 + ω can double.
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
            raise ConfigError(
                f"{self} needs a layout; give layout=fedcomp.Layout.of(model), or use the scope @model"
            )
        frames: list[list[Section]] = [[] for _ in rows]
        for i, e in enumerate(context.layout):
            parts = rows[:, e.span] if isinstance(rows, Tensor) else [row[e.span] for row in rows]
            own = [(seed + i) % SEEDS for seed in seeds]
            own_context = replace(context, layout=e.as_layout(), section=i)
            encoded = self.inner._encode_rows(parts, own, own_context)
            for sections, section in zip(frames, encoded, strict=True):
                sections.append(section)
        return frames
