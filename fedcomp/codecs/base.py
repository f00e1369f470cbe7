"""The base class of codecs. A codec encodes a vector as bytes, called a frame, and decodes the frame. A codec has no state.

A section is a part of a frame. It encodes the whole vector or, with the scope @layer, one tensor (codecs/frame.py). A subclass implements
`_encode_row` or `_encode_rows` to write sections, and `_decode_row` or `_decode_rows` to read them. The base class implements everything
else: frames, checksums, the scopes @layer and @chunk (codecs/scopes.py), input checks, batches and accumulation. A batch of m vectors of n
elements is either a tensor [m, n] or a sequence of m tensors [n].
"""

import itertools
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
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
from .frame import EMPTY, Section
from .frame import expect as expect
from .frame import require as require
from .update import Dense, Sections, Update

T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """The round and phase in which a vector is encoded, and other values that codecs and memories (such as error feedback) need."""

    round: int = 0
    phase: str = "train"  # name of one exchange of messages between server and clients in the round
    # Names and shapes of the tensors in the encoded vector: all tensors of the model, or one tensor (@layer), or one chunk (@chunk).
    layout: Layout | None = None
    # Index of the encoded tensor (@layer) or chunk (@chunk); 0 for a whole vector.
    section: int = 0
    # Sum of the gradients of the client's local steps, and sum of their elementwise squares. Both have the shape of the update or batch of
    # updates that is encoded. None = the gradients were not recorded.
    moments: tuple[Tensor, Tensor] | None = None
    # Values that the server announced, by name, such as a shared scale.
    announced: Mapping[str, bytes] = field(default_factory=dict)
    rate: float = 1.0  # learning rate of the round, divided by the learning rate of the run (--lr)

    def at(self, index: int | None) -> "Context":
        """Return a copy of a batch's context that has only the moments of the update `index`: [n] instead of [m, n].

        If `index` is None, turn the moments [n] of one update into the moments [1, n] of a batch with one update.
        """
        if self.moments is None:
            return self
        return replace(self, moments=(self.moments[0][index], self.moments[1][index]))


NO_CONTEXT = Context()
SEEDS = 2**64  # Seeds are integers modulo SEEDS
PRECISIONS = (torch.float32, torch.float16, torch.bfloat16)
# A batch is encoded in groups, to limit the memory for temporary arrays. A group is one large vector (`kernels.are_large`), or several
# vectors with at most SLICE_ELEMENTS elements in total. With @chunk, a group of chunks has about STACK_ELEMENTS elements.
SLICE_ELEMENTS, STACK_ELEMENTS = 1 << 27, 1 << 18


@dataclass(frozen=True)
class Codec(ABC):
    """A codec together with its options. Subclasses are frozen dataclasses whose fields are the options in the spec string."""

    name: ClassVar[str]
    id: ClassVar[int]
    source: ClassVar[str] = "–"  # author and year of the paper, for tables
    scope: ClassVar[int] = frame.MODEL
    chunk: ClassVar[int] = 0  # The chunk size N of @chunk=N; 0 = no chunks
    # Whether frames with the same seed can be added without decoding them (see `merge`)
    linear: ClassVar[bool] = False
    seeded: ClassVar[bool] = False  # Whether decoding needs the seed; if so, the frame contains it
    # Whether all clients encode with the same seed, the seed of the round, so that their frames can be added
    shares_seed: ClassVar[bool] = False
    portable: ClassVar[bool] = True  # Whether CPUs and GPUs encode a vector as the same bytes
    lossless: ClassVar[bool] = False  # Whether decoding restores every bit of a float32 vector
    # Whether the coordinate count at the start of a section is always the size of the encoded vector. If so, decoding raises FrameError for
    # any other count.
    whole: ClassVar[bool] = False
    # Contraction factor δ and variance bound ω, if they do not depend on the options or the size of the vector. Otherwise, the codec
    # overrides `contraction` or `variance`.
    delta: ClassVar[float | None] = None
    omega: ClassVar[float | None] = None
    # (head, bits): a section has, after the coordinate count, at most `head` bytes plus `bits` bits per coordinate. None = the codec
    # overrides `longest_section`, or the size has no bound.
    body_size: ClassVar[tuple[int, int] | None] = None

    def __str__(self) -> str:
        return spec.format_spec(self.name, self)

    @property
    def unscoped(self) -> "Codec":
        """The codec without its scope `@layer` or `@chunk`."""
        return self

    def contraction(self, numel: int) -> float | None:
        """Return the contraction factor δ ≥ 0, or None if no factor is known.

        The decoded vector C(x) has E ‖x − C(x)‖² ≤ (1 − δ)‖x‖² for every x, where E is the mean over all seeds.
        """
        return self.delta

    def variance(self, numel: int) -> float | None:
        """Return the variance bound ω, or None if the codec is biased or no bound is known.

        The decoded vector C(x) has E C(x) = x and E ‖x − C(x)‖² ≤ ω‖x‖² for every x, where E is the mean over all seeds.
        """
        return self.omega

    def longest_section(self, numel: int) -> int | None:
        """Return the largest size in bytes of a section, including its coordinate count, for a vector [numel]; None = unbounded."""
        if self.body_size is None:
            return None
        head, bits = self.body_size
        return len(frame.varint(numel)) + head + (bits * numel + 7) // 8

    # Methods for subclasses to implement. Linear codecs also implement `_merge_sections`.

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        """Encode one finite, nonempty vector x [n] as a section, without modifying x.

        `seed`: from 0 to 2⁶⁴ − 1. If the codec is `seeded`, `_decode_row` gets the same seed.
        """
        raise NotImplementedError("implement _encode_row or _encode_rows")

    def _encode_rows(self, rows: Rows, seeds: Sequence[int], context: Context) -> list[Section]:
        """Encode each of m ≥ 1 finite vectors [n] as a section, without modifying them. By default, call `_encode_row` for each vector."""
        if not rows[0].numel():
            return [EMPTY] * len(rows)
        return [self._encode_row(row, seed, context) for row, seed in zip(rows, seeds, strict=True)]

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        """Decode a section into an `Update` of a nonempty vector [layout.numel].

        Raises FrameError if the section is too short or too long, or holds NaN or infinity. If the codec has whole=True, the caller has
        checked that the coordinate count is layout.numel. `layout`: the tensors in the vector (all tensors of the model, or one tensor); a
        single flat tensor if the shapes are unknown. `seed`: the seed in the frame; 0 unless the codec is `seeded`.
        """
        raise NotImplementedError("implement _decode_row or _decode_rows")

    def _decode_rows(
        self, sections: Sequence[Section], layout: Layout, seeds: Sequence[int]
    ) -> list[Update | FrameError]:
        """Decode sections. Return a list with an `Update` for each valid section, and a FrameError for each invalid section.

        By default, call `_decode_row` for each section.
        """
        if not layout.numel:
            return [Dense(np.empty(0, np.float32))] * len(sections)
        opened: list[Update | FrameError] = []
        for section, seed in zip(sections, seeds, strict=True):
            try:
                if self.whole:
                    expect(
                        section.count == layout.numel,
                        f"{section.count} coordinates are encoded; expected {layout.numel}",
                    )
                opened.append(self._decode_row(section, layout, seed))
            except FrameError as error:
                opened.append(error)
        return opened

    def _merge_sections(self, sections: Sequence[Section]) -> Section:
        """Return a section that encodes the sum of the vectors in `sections`.

        A linear codec writes the size of the vector as the coordinate count, because `merge` reads the size from this count.
        """
        raise NotImplementedError("implement _merge_sections")

    def _encode_chunks(self, x: Tensor, size: int, seed: int, context: Context) -> bytes:
        """Encode a finite vector x [n] in chunks of `size` coordinates. Codecs that encode all chunks jointly override this method."""

        def encode_stack(first: int, rows: Tensor) -> bytes:
            own = replace(context, layout=Layout.flat(rows.shape[1]), section=first)
            sections = self._encode_rows(rows, chunk_seeds(seed, first, len(rows)), own)
            return b"".join(part for section in sections for part in frame.with_length(section))

        # If the server announced a scale for each chunk, each call encodes only one chunk, because a codec looks up the scale by
        # `context.section`.
        elements = size if context.announced else STACK_ELEMENTS
        return b"".join(starmap(encode_stack, stack_chunks(x, size, elements)))

    def _decode_chunks(self, data: memoryview, numel: int, size: int, seed: int) -> Update:
        """Decode the result of `_encode_chunks` into an `Update` of a vector [numel]. Raises FrameError."""
        edges = [*range(0, numel, size), numel]
        seeds, sections = chunk_seeds(seed, 0, len(edges) - 1), []
        for begin, end in pairwise(edges):
            section, data = frame.take_section(
                data, end - begin, f"the chunk that starts at coordinate {begin}"
            )
            sections.append(section)
        expect(not len(data), f"{len(data)} bytes follow the last chunk")
        whole = numel // size  # number of chunks of full size; the last chunk may be smaller
        updates = self._decode_rows(sections[:whole], Layout.flat(size), seeds[:whole])
        if numel % size:
            rest = Layout.flat(numel % size)
            updates += self._decode_rows(sections[whole:], rest, seeds[whole:])
        spans = (slice(*edge) for edge in pairwise(edges))
        return Sections(numel, tuple(zip(spans, map(or_raise, updates), strict=True)))

    def encode(
        self,
        x: Tensor,
        *,
        seed: int = 0,
        layout: Layout | None = None,
        context: Context = NO_CONTEXT,
    ) -> bytes:
        """Encode a vector x [n] as a frame. The vector can be float32, float16 or bfloat16, on the CPU or a GPU, and is not modified.

        The same vector and seed always give the same bytes on the same CPU or GPU, and on all CPUs and GPUs if the codec is `portable`.
        Raises NonFiniteError if x holds NaN or infinity; the message names the tensor if `layout` is given.
        """
        (result,) = self.encode_batch([x], [seed], layout=layout, context=context)
        return or_raise(result)

    def encode_batch(
        self,
        x: Rows,
        seeds: Sequence[int],
        *,
        onto: Sequence[Tensor] | None = None,
        layout: Layout | None = None,
        context: Context = NO_CONTEXT,
    ) -> list[bytes | NonFiniteError]:
        """Encode each of m vectors of one size, dtype and device as a frame.

        A vector with NaN or infinity gives a NonFiniteError instead of a frame.

        If `onto` (m float32 vectors) is given, x[i] is added to onto[i] in place, and the sum is encoded. In error feedback, onto[i] is the
        residual. If the sum for vector i is not finite, onto[i] is not changed.
        """
        rows = checked_batch(x, seeds, onto, layout)
        if not len(rows):
            return []
        large = kernels.are_large(rows)
        step = 1 if large else max(1, SLICE_ELEMENTS // max(1, rows[0].numel()))
        groups = [slice(at, at + step) for at in range(0, len(rows), step)]
        calls = [(rows[at], seeds[at], None if onto is None else onto[at]) for at in groups]
        encode = partial(self._frames, replace(context, layout=layout, moments=None))
        frames = starmap(encode, calls) if large else itertools.starmap(encode, calls)
        return list(itertools.chain.from_iterable(frames))

    def open(self, data: bytes, numel: int, layout: Layout | None = None) -> Update:
        """Decode a frame into an `Update`, which represents the vector compactly, such as by its nonzeros.

        Raises FrameError unless `data` is exactly one valid frame of this codec for a vector with `numel` elements.
        """
        (opened,) = self.open_batch([data], numel, layout)
        return or_raise(opened)

    def open_batch(
        self, frames: Sequence[bytes], numel: int, layout: Layout | None = None
    ) -> list[Update | FrameError]:
        """Decode frames. Return a list with an `Update` [numel] for each valid frame, and a FrameError for each invalid frame."""
        if type(numel) is not int or numel < 0:
            raise ConfigError(
                f"numel is {numel!r}; give the number of elements of the receiver's vector"
            )
        opened: list[Update | FrameError | None] = [None] * len(frames)
        parts: list[list[tuple[slice, Update]]] = [[] for _ in frames]
        # For each tensor: the sections that encode it, each with the index and the seed of its frame. These sections are decoded together.
        columns: dict[Entry, list[tuple[int, Section, int]]] = {}
        model = Layout.flat(numel) if layout is None else layout
        for i, data in enumerate(frames):
            try:
                seed, sections = self._unseal(data, numel, layout)
            except FrameError as error:
                opened[i] = error
                continue
            for j, (entry, section) in enumerate(sections):
                columns.setdefault(entry, []).append((i, section, (seed + j) % SEEDS))
        for entry, column in columns.items():
            whole = entry is frame.WHOLE
            own = model if whole else entry.as_layout()
            indices, own_sections, seeds = zip(*column, strict=True)
            updates = self._decode_rows(own_sections, own, seeds)
            for i, update in zip(indices, updates, strict=True):
                if whole:
                    opened[i] = update
                elif isinstance(update, FrameError):
                    opened[i] = opened[i] or frame.in_tensor(update, entry)
                else:
                    parts[i].append((entry.span, update))
        pairs = zip(opened, parts, strict=True)
        return [update or Sections(numel, tuple(own_parts)) for update, own_parts in pairs]

    def decode(
        self,
        data: bytes,
        *,
        numel: int,
        device: torch.device | str | None = None,
        layout: Layout | None = None,
    ) -> Tensor:
        """Decode a frame into a float32 vector [numel], on the CPU unless `device` is given.

        Raises FrameError if the frame is invalid.
        """
        return self.open(data, numel, layout).dense(device)

    def accumulate(
        self, data: bytes, into: Tensor, weight: float = 1.0, *, layout: Layout | None = None
    ) -> None:
        """Decode the frame `data`, multiply the decoded vector by `weight`, and add the product to `into` in place.

        The time for a sparse frame is proportional to its number of nonzeros, not to numel.

        If the frame is invalid, raises FrameError and leaves `into` unchanged.
        """
        self.open(data, into.numel(), layout).add_to(into, weight)

    def merge(
        self, frames: Sequence[bytes], *, numel: int | None = None, layout: Layout | None = None
    ) -> bytes:
        """Add frames of a linear codec without decoding them, and return a frame of the sum.

        Raises FrameError unless all frames are valid and have the same vector size, scope and seed.

        By default, the size of the vector is read from the first frame. If senders are not trusted, give `numel` or `layout`, so that
        frames of any other size are rejected.
        """
        if not self.linear:
            raise ConfigError(
                f"frames of {self} cannot be merged; use a linear codec, such as identity"
            )
        if not frames:
            raise ConfigError("`frames` is empty; give at least one frame")
        claimed, sizes = frame.claimed_size(frames[0], self.seeded)
        expected = numel if layout is None else layout.numel
        fits = expected in (None, claimed)
        require(fits, f"the first frame is for a vector of {claimed} elements; expected {expected}")
        numel, layout = claimed, layout or sizes
        opened = [self._unseal(data, numel, layout) for data in frames]
        scopes, seeds = {data[frame.SCOPE] for data in frames}, {seed for seed, _ in opened}
        alike = len(scopes) == len(seeds) == 1
        require(
            alike, "frames of different scopes or seeds cannot be merged; use one codec and seed"
        )
        columns = zip(*(sections for _, sections in opened), strict=True)
        merged = [self._merge_sections([section for _, section in column]) for column in columns]
        seed = seeds.pop() if self.seeded else None
        return frame.seal(self.id, scopes.pop(), numel, merged, seed)

    def _unseal(
        self, data: bytes, numel: int, layout: Layout | None = None
    ) -> tuple[int, list[tuple[Entry, Section]]]:
        return frame.unseal(data, self.id, numel, layout, self.seeded, self.chunk)

    def _frames(
        self, context: Context, rows: Rows, seeds: Sequence[int], onto: Sequence[Tensor] | None
    ) -> list[bytes | NonFiniteError]:
        """Implement `encode_batch` for one group of vectors."""
        if onto is None:
            sums, finite = rows, kernels.are_finite(rows)
        else:
            sums, finite = kernels.add_finite(onto, rows)
        totals: Sequence[Tensor | None] = onto or [None] * len(rows)
        results: list[bytes | NonFiniteError] = [
            b"" if ok else nonfinite_error(row, context.layout, total)
            for ok, row, total in zip(finite, rows, totals, strict=True)
        ]
        valid = [i for i, ok in enumerate(finite) if ok]
        if valid:
            valid_rows = sums if len(valid) == len(sums) else [sums[i] for i in valid]
            own = [seeds[i] % SEEDS for i in valid]
            encoded = self._sections(valid_rows, own, context)
            for i, seed, sections in zip(valid, own, encoded, strict=True):
                sent = seed if self.seeded else None
                results[i] = frame.seal(self.id, self.scope, rows[0].numel(), sections, sent)
        return results

    def _sections(self, rows: Rows, seeds: Sequence[int], context: Context) -> list[list[Section]]:
        return [[section] for section in self._encode_rows(rows, seeds, context)]


def at_density(codec: Codec, density: float) -> Codec:
    """Return a copy of the codec that sends the fraction `density` of the coordinates.

    Raises ConfigError if the codec has no option `density`.
    """
    for name in ("inner", "first"):
        if isinstance(part := getattr(codec, name, None), Codec):
            return replace(codec, **{name: at_density(part, density)})
    if "density" not in {f.name for f in fields(codec)}:
        raise ConfigError(
            f"{codec} has no option density, so its density cannot be changed; use a codec with this option, such as stc or topk"
        )
    return replace(codec, **{"density": density})


def spans(codec: Codec, layout: Layout) -> list[slice]:
    """Return the parts of a vector that are encoded separately, as slices.

    With `@layer`, there is one slice per tensor; with `@chunk`, one per chunk; without a scope, one for the whole vector.
    """
    if codec.scope == frame.LAYER:
        return [e.span for e in layout]
    starts = range(0, layout.numel, codec.chunk or layout.numel or 1)
    return [slice(at, min(at + starts.step, layout.numel)) for at in starts] or [slice(0, 0)]


def chunk_seeds(seed: int, first: int, count: int) -> list[int]:
    """Return the seeds of `count` consecutive chunks of a frame, starting with chunk `first`."""
    return [(seed + i) % SEEDS for i in range(first, first + count)]


def stack_chunks(x: Tensor, size: int, elements: int = STACK_ELEMENTS) -> list[tuple[int, Tensor]]:
    """Split x [n] into tensors [m, size] with one chunk in each row. Return each tensor with the index of its first chunk.

    Each returned tensor has at most `elements` elements, or one row if `size` is larger. If the last chunk is smaller than `size`, it is a
    separate tensor [1, n mod size].
    """
    step, count = max(1, elements // size), x.numel() // size
    whole, rest = x[: count * size].reshape(count, size), x[count * size :]
    cut = [(at, whole[at : at + step]) for at in range(0, count, step)]
    return [*cut, (count, rest[None])] if rest.numel() else cut


def longest_frame(codec: Codec, layout: Layout) -> int | None:
    """Return the largest size in bytes of a frame for vectors of this layout, or None if the size has no bound."""
    layered = codec.scope == frame.LAYER
    sizes = [e.numel for e in layout] if layered else [layout.numel]
    total = frame.header_bytes(codec.id, codec.seeded)
    for numel in sizes:
        if (section := codec.longest_section(numel)) is None:
            return None
        total += section + (len(frame.varint(section)) if layered else 0)
    return total


def check_vector(x: Tensor, layout: Layout | None = None) -> None:
    """Raise ConfigError unless x is dense and one-dimensional, has a dtype in PRECISIONS, and has as many elements as the layout."""
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_meta:
        given = f"{x.layout} tensor on {x.device}" if isinstance(x, Tensor) else type(x).__name__
        raise ConfigError(
            f"x is a {given}, but a codec encodes a dense torch tensor; give a dense tensor"
        )
    if x.dim() != 1:
        raise ConfigError(
            f"x has the shape {list(x.shape)}, but a codec encodes a vector of one dimension; give x.flatten()"
        )
    if x.dtype not in PRECISIONS:
        raise ConfigError(
            f"x is {x.dtype}, but a codec encodes float32, float16 or bfloat16; give x.float()"
        )
    if layout is not None and layout.numel != x.numel():
        raise ConfigError(
            f"the layout has {layout.numel} elements, but the vector has {x.numel()}; give the layout of the vector's model"
        )


def checked_batch(
    x: Rows, seeds: Sequence[int], onto: Sequence[Tensor] | None, layout: Layout | None
) -> Rows:
    """Check a batch of vectors x, and return it detached from the autograd graph. Raises ConfigError if an argument is invalid."""
    if isinstance(x, Tensor) and x.dim() != 2 or len(seeds) != len(x):
        given = f"shape {list(x.shape)}" if isinstance(x, Tensor) else f"{len(x)} vectors"
        raise ConfigError(
            f"encode_batch needs m vectors of one size, such as a stack [m, n], and m seeds; given {given} and {len(seeds)} seeds"
        )
    alike = set()
    for row in [x[0]] if isinstance(x, Tensor) and len(x) else x:
        check_vector(row, layout)
        alike.add((row.shape, row.device, row.dtype))
    if len(alike) > 1:
        given = ", ".join(sorted(f"{dtype} {list(s)} on {device}" for s, device, dtype in alike))
        raise ConfigError(
            f"the vectors are {given}; encode_batch needs vectors of one size, dtype and device"
        )
    for total in onto or ():
        if (total.shape, total.device, x[0].dtype) not in alike or total.dtype != torch.float32:
            given = f"{total.dtype} {list(total.shape)} on {total.device}"
            raise ConfigError(
                f"`onto` contains {given}; give float32 tensors with the shape and the device of x"
            )
    return x.detach() if isinstance(x, Tensor) else [row.detach() for row in x]


def nonfinite_errors(rows: Rows, layout: Layout | None, what: str) -> list[NonFiniteError | None]:
    """Return a list with a NonFiniteError for each vector that holds NaN or infinity, and None for each finite vector.

    `what`: name of the vectors in the error messages.
    """
    return [
        None if ok else nonfinite_error(row, layout, what=what)
        for row, ok in zip(rows, kernels.are_finite(rows), strict=True)
    ]


def nonfinite_error(
    x: Tensor, layout: Layout | None, onto: Tensor | None = None, what: str = "the update"
) -> NonFiniteError:
    """Return the error for a vector that holds NaN or infinity: x, or the sum onto + x if `onto` is given.

    The error message names the tensor and the first element that is NaN or infinite. `what`: name of x in the message.
    """
    total = x.to(torch.float32) if onto is None else onto + x
    position = int((~total.isfinite()).nonzero()[0])
    value = x[position].to(torch.float32)
    if value.isfinite():
        value, what = total[position], "the sum of residual and update"
    if layout is None:
        place = f"in element {position}"
    else:
        entry = layout.entry_at(position)
        place = f"in tensor '{entry.name}', element {position - entry.offset}"
    error = NonFiniteError(
        f"{what} is {value.item()} {place}; lower the learning rate (--lr) or clip gradients (--clip)"
    )
    error.position = position
    return error


def or_raise(result: T | Exception) -> T:
    """Return `result`, or raise it if it is an exception."""
    if isinstance(result, Exception):
        raise result
    return result
