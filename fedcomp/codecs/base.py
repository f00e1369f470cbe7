"""The base class of codecs: pure functions from a vector to a frame and back.

The author of a codec writes one method that makes sections, `_encode_row` or `_encode_rows`, and one that reads them, `_decode_row` or
`_decode_rows`. Frames, checksums, scopes, checks of the input, stacks and accumulation are here, once. A stack is a sequence of m vectors
[n]: the rows of a tensor, or separate tensors. One vector is a stack with m = 1.
"""

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice, pairwise
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from .. import kernels, spec
from ..errors import ConfigError, FrameError, NonFiniteError
from ..kernels import Rows
from ..kernels.parallel import starmap
from ..layout import Entry, Layout
from . import frame
from .checks import checked, nonfinite
from .frame import EMPTY, Section
from .update import Dense, Sections, Update, join

T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """The exchange that a frame is made for, as far as codecs and memories need it."""

    round: int = 0
    phase: str = "train"
    layout: Layout | None = None  # of the vectors that are encoded: the model's, or one tensor's
    section: int = 0  # which tensor it is, 0 for the whole model
    # For memories: sum and sum of squares of the local steps' gradients, shaped like the updates.
    moments: tuple[Tensor, Tensor] | None = None
    # By the server: a shared scale, a factor.
    announced: Mapping[str, bytes] = field(default_factory=dict)
    rate: float = 1.0  # the round's learning rate as a multiple of the run's

    def row(self, i: int) -> "Context":
        """Return the context of one update of a stack."""
        return self._with_moments(lambda moment: moment[i])

    def stacked(self) -> "Context":
        """Return the context of one update as that of a stack of one."""
        return self._with_moments(lambda moment: moment[None])

    def _with_moments(self, change: Callable[[Tensor], Tensor]) -> "Context":
        if self.moments is None:
            return self
        return replace(self, moments=(change(self.moments[0]), change(self.moments[1])))


NO_CONTEXT = Context()
SEEDS = 2**64  # seeds are taken modulo this
PIECE = 1 << 18  # elements of chunks that are worked on together


@dataclass(frozen=True)
class Codec(ABC):
    """A codec with its options. Subclasses are frozen dataclasses; their fields are the options of the spec string."""

    name: ClassVar[str]
    id: ClassVar[int]
    source: ClassVar[str] = "–"  # author and year, for tables
    scope: ClassVar[int] = frame.MODEL
    chunk: ClassVar[int] = 0  # N of @chunk=N
    linear: ClassVar[bool] = False  # frames of one seed can be merged
    seeded: ClassVar[bool] = False  # decoding needs the seed, which then stands in the frame
    shares_seed: ClassVar[bool] = False  # all frames of a round have one seed, so that they add
    portable: ClassVar[bool] = True  # the same bytes on every device
    lossless: ClassVar[bool] = False  # a frame holds every bit of a float32 vector
    whole: ClassVar[bool] = (
        False  # a section counts every coordinate, as those of a linear codec do
    )

    def __str__(self) -> str:
        return spec.format_spec(self.name, self)

    @property
    def unscoped(self) -> "Codec":
        """The codec without `@layer` or `@chunk`."""
        return self

    # Facts, for vectors of numel elements.

    def contraction(self, numel: int) -> float | None:
        """δ ≥ 0 with ‖x − C(x)‖² ≤ (1 − δ)‖x‖² for every x, in the mean over seeds; None if there is none."""
        return None

    def variance(self, numel: int) -> float | None:
        """ω with E C(x) = x and E ‖x − C(x)‖² ≤ ω‖x‖², or None if the codec is biased."""
        return None

    def longest_section(self, numel: int) -> int | None:
        """Return a length in bytes, count included, that no section exceeds; None if the codec knows none."""
        return None

    # Written by authors: one of the first two, one of the next two, and the last for a linear codec.

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        """Return a section for a finite vector [n], n ≥ 1, which is not modified. `seed` is in 0..2⁶⁴−1, as `_decode_row` gets it."""
        raise NotImplementedError(f"{type(self).__name__} has neither _encode_row nor _encode_rows")

    def _encode_rows(self, rows: Rows, seeds: Sequence[int], context: Context) -> list[Section]:
        """Return a section for each of m ≥ 1 finite vectors [n], which are not modified."""
        if not rows[0].numel():
            return [EMPTY] * len(rows)
        return [self._encode_row(row, seed, context) for row, seed in zip(rows, seeds, strict=True)]

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        """Return the update in a section. Raise FrameError unless it is a section for a vector [layout.numel], at least 1: nothing
        missing, nothing left over, nothing that is not finite. The section of a codec that is `whole` counts all coordinates.

        `layout` is the model's, or that of one tensor, or of one flat tensor where the caller knew none; `seed` is 0 unless `seeded`.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither _decode_row nor _decode_rows")

    def _decode_rows(
        self, sections: Sequence[Section], layout: Layout, seeds: Sequence[int]
    ) -> list[Update | FrameError]:
        """Return the update in each section, or a FrameError in the place of one that is bad."""
        if not layout.numel:
            return [Dense(np.empty(0, np.float32))] * len(sections)
        opened: list[Update | FrameError] = []
        for section, seed in zip(sections, seeds, strict=True):
            try:
                expect(
                    section.count == layout.numel or not self.whole,
                    f"a section of {section.count} coordinates was given for {layout.numel}",
                )
                opened.append(self._decode_row(section, layout, seed))
            except FrameError as error:
                opened.append(error)
        return opened

    def _merge_sections(self, sections: Sequence[Section]) -> Section:
        """Return the section of the sum. The sections of a linear codec count every coordinate."""
        raise self._not_linear()

    def _encode_chunks(self, x: Tensor, size: int, seed: int, context: Context) -> bytes:
        """Return the body of all chunks of `size` coordinates of a finite vector [n]. Overridden where a joint body is shorter."""

        def work(first: int, rows: Tensor) -> bytes:
            told = replace(context, layout=Layout.flat(rows.shape[1]), section=first)
            sections = self._encode_rows(rows, chunk_seeds(seed, first, len(rows)), told)
            return b"".join(part for section in sections for part in frame.with_length(section))

        # An announced scale is that of one section.
        return b"".join(starmap(work, stacks(x, size, size if context.announced else PIECE)))

    def _decode_chunks(self, data: memoryview, numel: int, size: int, seed: int) -> Update:
        """Return the update in the body of all chunks of `size` coordinates of a vector [numel]. Raises FrameError."""
        parts: list[tuple[slice, Update]] = []
        for start in range(0, numel, step := max(size, PIECE // size * size)):
            edges = [*range(start, min(start + step, numel), size), min(start + step, numel)]
            rows: dict[int, list[Section]] = {}  # by size: that of the last chunk may differ
            for begin, end in pairwise(edges):
                section, data = frame.take_section(data, end - begin, f"the chunk at {begin}")
                rows.setdefault(end - begin, []).append(section)
            seeds = iter(chunk_seeds(seed, start // size, len(edges) - 1))
            opened = [
                or_raise(update)
                for length, sections in rows.items()
                for update in self._decode_rows(
                    sections, Layout.flat(length), list(islice(seeds, len(sections)))
                )
            ]
            parts += zip((slice(*edge) for edge in pairwise(edges)), opened, strict=True)
        expect(not len(data), f"{len(data)} bytes follow the last chunk")
        return join(numel, parts)

    # Called by others.

    def encode(
        self,
        x: Tensor,
        *,
        seed: int = 0,
        layout: Layout | None = None,
        context: Context = NO_CONTEXT,
    ) -> bytes:
        """Return a frame for x: one dimension, float32, float16 or bfloat16, any device; not modified. Same x, same seed, same bytes.

        Raises NonFiniteError, naming the tensor of `layout`, when x holds NaN or infinity.
        """
        (made,) = self.encode_batch([x], [seed], layout=layout, context=context)
        return or_raise(made)

    def encode_batch(
        self,
        x: Rows,
        seeds: Sequence[int],
        *,
        onto: Sequence[Tensor] | None = None,
        layout: Layout | None = None,
        context: Context = NO_CONTEXT,
    ) -> list[bytes | NonFiniteError]:
        """Return a frame for each of m vectors of one size, kind and device, or a NonFiniteError in the place of one with NaN or infinity.

        With `onto`, m float32 vectors, `onto[i] += x[i]` in place, and the frame is that of the sum; where this is not finite, onto[i]
        stays as it was. That is what error feedback does.
        """
        rows = checked(x, seeds, onto, layout)
        if not len(rows):
            return []
        frames = partial(self._frames, replace(context, layout=layout, moments=None))
        if not kernels.are_large(rows):
            return frames(rows, seeds, onto)
        one_each = [slice(i, i + 1) for i in range(len(rows))]
        calls = [(rows[at], seeds[at], None if onto is None else onto[at]) for at in one_each]
        return [made for (made,) in starmap(frames, calls)]

    def open(self, data: bytes, numel: int, layout: Layout | None = None) -> Update:
        """Return the update in a frame, checked to the last bit. Raises FrameError on anything but a whole valid frame of this codec
        and size."""
        (opened,) = self.open_batch([data], numel, layout)
        return or_raise(opened)

    def open_batch(
        self, frames: Sequence[bytes], numel: int, layout: Layout | None = None
    ) -> list[Update | FrameError]:
        """Open many frames of one size; a FrameError stands in the place of one that is bad."""
        if type(numel) is not int or numel < 0:
            raise ConfigError(
                f"numel is {numel!r}; give the number of elements of the receiver's vector"
            )
        opened: list[Update | FrameError | None] = [None] * len(frames)
        parts: list[list[tuple[slice, Update]]] = [[] for _ in frames]
        columns: dict[int, tuple[Entry, list[tuple[int, Section, int]]]] = {}  # by tensor
        for i, data in enumerate(frames):
            try:
                seed, sections = self._unseal(data, numel, layout)
            except FrameError as error:
                opened[i] = error
                continue
            for j, (entry, section) in enumerate(sections):
                _, column = columns.setdefault(-1 if entry is frame.WHOLE else j, (entry, []))
                column.append((i, section, (seed + j) % SEEDS))
        for entry, column in columns.values():
            whole = entry is frame.WHOLE
            model = Layout.flat(numel) if layout is None else layout
            own = model if whole else entry.alone()
            places, sections, seeds = zip(*column, strict=True)
            updates = self._decode_rows(sections, own, seeds)
            for i, update in zip(places, updates, strict=True):
                if whole or isinstance(update, FrameError):
                    opened[i] = opened[i] or update
                else:
                    parts[i].append((entry.span, update))
        return [
            Sections(numel, tuple(found)) if update is None else update
            for update, found in zip(opened, parts, strict=True)
        ]

    def decode(
        self,
        data: bytes,
        *,
        numel: int,
        device: torch.device | str | None = None,
        layout: Layout | None = None,
    ) -> Tensor:
        """Return the vector [numel] in a frame, float32, on the CPU unless `device` is given. Raises FrameError like `open`."""
        return self.open(data, numel, layout).dense(device)

    def accumulate(
        self, data: bytes, into: Tensor, weight: float = 1.0, *, layout: Layout | None = None
    ) -> None:
        """into += weight · decode(data), in place; a sparse frame costs its nonzeros. Raises FrameError with `into` untouched."""
        self.open(data, into.numel(), layout).add_to(into, weight)

    def merge(
        self, frames: Sequence[bytes], *, numel: int | None = None, layout: Layout | None = None
    ) -> bytes:
        """Return a frame of the sum of frames of a linear codec, all of one size, scope and seed. Raises FrameError on others.

        The size is that of the first frame. Give `numel` or `layout` where frames are not trusted: time and memory are then O(numel), and
        the merged frame can be read with that layout.
        """
        if not self.linear:
            raise self._not_linear()
        if not frames:
            raise ConfigError("merge needs at least one frame")
        claimed, sizes = frame.claimed_size(frames[0], self.seeded)
        expected = numel if layout is None else layout.numel
        expect(
            expected in (None, claimed),
            f"a frame for a vector of {claimed} was given for one of {expected}",
        )
        numel, layout = claimed, layout or sizes
        opened = [self._unseal(data, numel, layout) for data in frames]
        scopes, seeds = {data[frame.SCOPE] for data in frames}, {seed for seed, _ in opened}
        expect(
            len(scopes) == len(seeds) == 1, "frames of different scopes or seeds cannot be merged"
        )
        merged = [
            self._merge_sections([section for _, section in column])
            for column in zip(*(s for _, s in opened), strict=True)
        ]
        return frame.seal(
            self.id, scopes.pop(), numel, merged, seeds.pop() if self.seeded else None
        )

    def _unseal(
        self, data: bytes, numel: int, layout: Layout | None = None
    ) -> tuple[int, list[tuple[Entry, Section]]]:
        """Return `frame.unseal` of a frame of this codec."""
        return frame.unseal(data, self.id, numel, layout, self.seeded, self.chunk)

    def _frames(
        self,
        context: Context,
        rows: Rows,
        seeds: Sequence[int],
        onto: Sequence[Tensor] | None,
    ) -> list[bytes | NonFiniteError]:
        """Return frames of vectors that are encoded together, or errors in their place."""
        found, finite = (
            (rows, kernels.are_finite(rows)) if onto is None else kernels.add_finite(onto, rows)
        )
        good, numel = [i for i, fine in enumerate(finite) if fine], rows[0].numel()
        kept = found if len(good) == len(found) else [found[i] for i in good]
        own = [seeds[i] % SEEDS for i in good]
        sections = iter(in_pieces(lambda at: self._sections(kept[at], own[at], context), kept))
        return [
            self._seal(numel, next(sections), seed)
            if fine
            else nonfinite(rows[i], context.layout, onto and onto[i])
            for i, (seed, fine) in enumerate(zip(seeds, finite, strict=True))
        ]

    def _sections(self, rows: Rows, seeds: Sequence[int], context: Context) -> list[list[Section]]:
        """Return the sections of each frame."""
        return [[section] for section in self._encode_rows(rows, seeds, context)]

    def _seal(self, numel: int, sections: Sequence[Section], seed: int) -> bytes:
        return frame.seal(self.id, self.scope, numel, sections, seed if self.seeded else None)

    def _not_linear(self) -> ConfigError:
        return ConfigError(
            f"frames of {self} cannot be merged; use a linear codec, such as identity"
        )


def at_density(codec: Codec, density: float) -> Codec:
    """Return a codec with another share of the coordinates sent. Raises ConfigError for a codec without a density."""
    for part in ("inner", "first"):
        if isinstance(held := getattr(codec, part, None), Codec):
            return replace(codec, **{part: at_density(held, density)})
    if "density" not in {f.name for f in fields(codec)}:
        raise ConfigError(
            f"{codec} has no density that could change; use one that has, such as stc or topk"
        )
    return replace(codec, density=density)


def spans(codec: Codec, layout: Layout) -> list[slice]:
    """Return the spans of a vector that are encoded one by one: its tensors under `@layer`, its chunks under `@chunk`, else all of it."""
    if codec.scope == frame.LAYER:
        return [e.span for e in layout]
    starts = range(0, layout.numel, codec.chunk or layout.numel or 1)
    return [slice(at, min(at + starts.step, layout.numel)) for at in starts] or [slice(0, 0)]


def chunk_seeds(seed: int, first: int, count: int) -> list[int]:
    """Return the seeds of `count` chunks from number `first` on."""
    return [(seed + i) % SEEDS for i in range(first, first + count)]


def stacks(x: Tensor, size: int, most: int = PIECE) -> list[tuple[int, Tensor]]:
    """Return the chunks of x [n] as stacks [m, size] of about `most` elements, each with the number of its first chunk.

    The last chunk may be shorter, and is then a stack by itself.
    """
    step, count = max(1, most // size), x.numel() // size
    whole, rest = x[: count * size].reshape(count, size), x[count * size :]
    cut = [(at, whole[at : at + step]) for at in range(0, count, step)]
    return [*cut, (count, rest[None])] if rest.numel() else cut


def longest_frame(codec: Codec, layout: Layout) -> int | None:
    """Return a length in bytes that no frame for vectors of this layout exceeds; None if the codec knows none."""
    layered = codec.scope == frame.LAYER
    sizes = [e.numel for e in layout] if layered else [layout.numel]
    sections = [codec.longest_section(numel) for numel in sizes]
    if None in sections:
        return None
    lengths = [len(frame.varint(section)) for section in sections] if layered else []
    return frame.header_bytes(codec.id, codec.seeded) + sum(sections) + sum(lengths)


_most: dict[torch.device, int] = {}  # elements that were not too many


def in_pieces(work: Callable[[slice], Sequence[T]], rows: Rows) -> list[T]:
    """Return what `work` makes of slices of m vectors. A slice for which the device's memory runs out is halved, which is remembered.

    Raises ConfigError where one vector does not fit.
    """
    made: list[T] = []
    while len(made) < len(rows):
        device, numel = rows[0].device, rows[0].numel()
        room = max(1, _most.get(device, numel * len(rows)) // max(1, numel))
        at = slice(len(made), min(len(made) + room, len(rows)))
        try:
            made += work(at)
        except torch.cuda.OutOfMemoryError:
            count = at.stop - at.start
            if count == 1:
                raise ConfigError(
                    f"the memory of {device} does not hold the compression of one update of {numel:,} elements; give "
                    "--device cpu, or a codec that needs less, such as --uplink stc"
                ) from None
            _most[device] = count // 2 * numel
    return made


def or_raise(made: T | Exception) -> T:
    """Return what stands in a list of results, or raise the error that stands in its place."""
    if isinstance(made, Exception):
        raise made
    return made


def expect(condition: bool, sentence: str) -> None:
    """Raise FrameError unless `condition` holds: for the checks in `unpack`."""
    if not condition:
        raise FrameError(sentence)
