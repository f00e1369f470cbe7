"""The scopes `@layer` and `@chunk=N`: a codec encodes every tensor, or every chunk of N consecutive coordinates, separately.

Examples are `stc:density=1%@layer` and `topk:density=1%@chunk=4096`. Like the second example, the training method SparseLoCo selects the
coordinates with the largest magnitudes in every chunk (Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo", 2025,
arXiv:2508.15706).

The last chunk of a vector may have fewer than N coordinates. The tensor or chunk with index i is encoded with the seed of the frame plus i.
A frame with @layer has one section for each tensor. A frame with @chunk has a single section. In its body, most codecs write one section
for each chunk. The codec `qsgd` and codecs that select coordinates (codecs/selection.py) encode all chunks jointly, which is usually
shorter. A frame with @chunk can only be decoded by a codec with the same chunk size N.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ..errors import ConfigError, FrameError, SpecError
from ..kernels import Rows
from ..layout import Layout
from . import frame
from .base import SEEDS, Codec, Context, expect, require
from .frame import Section
from .update import Update

# If all chunks are encoded jointly, the body is at most this many bytes longer than separate sections of the chunks.
JOINT_BYTES = 24


@dataclass(frozen=True)
class Scoped(Codec):
    """A codec that applies the codec `inner` separately to each tensor or chunk of the vector."""

    inner: Codec
    inherited = "name id source linear portable seeded shares_seed"

    def __post_init__(self) -> None:
        for name in self.inherited.split():
            object.__setattr__(self, name, getattr(self.inner, name))

    @property
    def unscoped(self) -> Codec:
        return self.inner

    @property
    def density(self) -> float:
        return self.inner.density


@dataclass(frozen=True)
class LayerWise(Scoped):
    """A codec that encodes each tensor separately."""

    scope = frame.LAYER
    inherited = f"{Scoped.inherited} whole"

    def __str__(self) -> str:
        return f"{self.inner}@layer"

    def contraction(self, numel: int) -> float | None:
        whole = self.inner.contraction(numel)
        # The number of selected coordinates is rounded. With density 1 %, two of 150 coordinates are sent, but only one of 149. A tensor
        # can therefore have a smaller fraction of sent coordinates than the whole vector, but at least half of that fraction.
        return whole / 2 if whole and hasattr(self.inner, "density") else whole

    def variance(self, numel: int) -> float | None:
        whole = self.inner.variance(numel)
        # The fraction of sent coordinates can be half that of the whole vector (see `contraction`). This doubles 1 + ω, the inverse of the
        # fraction.
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
                f"{self} needs the shapes of the tensors; give layout=fedcomp.Layout.of(model), or leave out @layer"
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


@dataclass(frozen=True)
class Chunked(Scoped):
    """A codec that encodes each chunk of a vector separately.

    A frame has one section, which consists of the chunk size N and the encoded chunks.
    """

    size: int  # N
    scope = frame.CHUNK

    def __post_init__(self) -> None:
        if not 0 < self.size < 2**63:
            raise SpecError(f"@chunk is {self.size}; give a number of coordinates, such as 4096")
        super().__post_init__()
        object.__setattr__(self, "chunk", self.size)

    def __str__(self) -> str:
        return f"{self.inner}@chunk={self.size}"

    def sizes(self, numel: int) -> set[int]:
        """Return the sizes that chunks of a vector [numel] can have."""
        return {min(self.size, numel), numel % self.size or min(self.size, numel)}

    def contraction(self, numel: int) -> float | None:
        return worst(map(self.inner.contraction, self.sizes(numel)), min)

    def variance(self, numel: int) -> float | None:
        return worst(map(self.inner.variance, self.sizes(numel)), max)

    def longest_section(self, numel: int) -> int | None:
        whole, rest = divmod(numel, self.size)
        total = len(frame.varint(self.size)) + JOINT_BYTES
        for count, size in ((whole, self.size), (1, rest)):
            if not count * size:
                continue
            if (longest := self.inner.longest_section(size)) is None:
                return None
            total += count * (len(frame.varint(longest)) + longest)
        return total

    def _encode_rows(self, rows: Rows, seeds: Sequence[int], context: Context) -> list[Section]:
        if not rows[0].numel():
            return [Section(self.size, b"")] * len(rows)
        calls = [(row, self.size, seed, context) for row, seed in zip(rows, seeds, strict=True)]
        return [Section(self.size, self.inner._encode_chunks(*call)) for call in calls]

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        return self.inner._decode_chunks(memoryview(section.body), layout.numel, self.size, seed)

    def _merge_sections(self, sections: Sequence[Section]) -> Section:
        columns = [list(self._split(memoryview(section.body))) for section in sections]
        sizes = {tuple(section.count for section in column) for column in columns}
        require(len(sizes) == 1, "frames of vectors of different sizes cannot be merged")
        complete = set(sizes.pop()[:-1]) <= {self.size}
        expect(complete, f"a chunk that is not the last has fewer than {self.size} coordinates")
        merged = [self.inner._merge_sections(each) for each in zip(*columns, strict=True)]
        parts = (part for section in merged for part in frame.with_length(section))
        return Section(self.size, b"".join(parts))

    def _split(self, data: memoryview) -> Iterator[Section]:
        while len(data):
            section, data = frame.take_section(data, self.size, "a chunk")
            yield section


def worst(factors: Iterable[float | None], choose: Callable[[list[float]], float]) -> float | None:
    """Return the minimum or maximum of `factors`, or None if a factor is None. `choose`: min or max."""
    each = list(factors)
    known = [factor for factor in each if factor is not None]
    return choose(known) if len(known) == len(each) else None
