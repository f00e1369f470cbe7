"""The scope `@chunk=N`: a codec encodes every chunk of N consecutive coordinates separately, as in `topk:density=1%@chunk=4096`.

The last chunk may be smaller. The buckets of QSGD (Alistarh et al. 2017) are chunks. SparseLoCo selects k coordinates of every chunk
(Sarfi, Thérien, Lidin, Belilovsky: Communication efficient LLM pre-training with SparseLoCo. arXiv:2508.15706, 2025). The seed of chunk i
is the seed of the frame plus i.

    sections   N (LEB128); for each chunk: length of the rest of its section, count, body

Codecs that select coordinates (codecs/selection.py) and `qsgd` write one joint body for all chunks instead, which is shorter. Only a codec
with the same N decodes a frame, so that a sender cannot choose smaller chunks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..errors import SpecError
from ..kernels import Rows
from ..layout import Layout
from . import frame
from .base import Context, expect
from .frame import Section
from .layerwise import Scoped
from .update import Update

JOINT_BYTES = 24  # by which a joint body may be larger than separate ones: its counts and lengths


@dataclass(frozen=True)
class Chunked(Scoped):
    """A codec applied to each chunk. Its frames have one section: N, and the body of all chunks."""

    size: int  # N
    scope: ClassVar[int] = frame.CHUNK

    def __post_init__(self) -> None:
        if not 0 < self.size < 2**63:
            raise SpecError(f"@chunk is {self.size}; give a number of coordinates, such as 4096")
        super().__post_init__()
        object.__setattr__(self, "chunk", self.size)

    def __str__(self) -> str:
        return f"{self.inner}@chunk={self.size}"

    def sizes(self, numel: int) -> set[int]:
        """Return the sizes of the chunks of a vector [numel]."""
        return {min(self.size, numel), numel % self.size or min(self.size, numel)}

    def contraction(self, numel: int) -> float | None:
        each = [self.inner.contraction(size) for size in self.sizes(numel)]
        known = [factor for factor in each if factor is not None]
        return min(known) if len(known) == len(each) else None

    def variance(self, numel: int) -> float | None:
        each = [self.inner.variance(size) for size in self.sizes(numel)]
        known = [factor for factor in each if factor is not None]
        return max(known) if len(known) == len(each) else None

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
        return [
            Section(self.size, self.inner._encode_chunks(row, self.size, seed, context))
            for row, seed in zip(rows, seeds, strict=True)
        ]

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        return self.inner._decode_chunks(memoryview(section.body), layout.numel, self.size, seed)

    def _merge_sections(self, sections: Sequence[Section]) -> Section:
        columns = [list(self._split(memoryview(section.body))) for section in sections]
        sizes = {tuple(section.count for section in column) for column in columns}
        expect(len(sizes) == 1, "frames of different sizes cannot be merged")
        expect(
            set(sizes.pop()[:-1]) <= {self.size}, "a chunk before the last one is smaller than N"
        )
        merged = [self.inner._merge_sections(each) for each in zip(*columns, strict=True)]
        parts = (part for section in merged for part in frame.with_length(section))
        return Section(self.size, b"".join(parts))

    def _split(self, data: memoryview) -> Iterator[Section]:
        while len(data):
            section, data = frame.take_section(data, self.size, "a chunk")
            yield section
