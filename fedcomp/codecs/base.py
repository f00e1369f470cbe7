"""The base class of codecs: pure functions from a vector to a frame and back.

The author of a codec writes one method that makes sections, `_encode_row` or `_encode_rows`, and one that reads them, `_decode_row` or
`_decode_rows`. Frames, checksums, scopes, checks of the input, stacks and accumulation are here, once. A stack is a sequence of m vectors
[n]: the rows of a tensor, or separate tensors. One vector is a stack with m = 1.
"""

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from .. import kernels, spec
from ..errors import ConfigError, FrameError, NonFiniteError
from ..kernels import Rows
from ..kernels.parallel import starmap
from ..layout import Entry, Layout
from . import frame
from .frame import Section
from .update import Sections, Update

T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """What a codec or memory may know of the exchange that a frame is made for."""

    round: int = 0
    phase: str = "train"
    layout: Layout | None = None  # of the vectors that are encoded: the model's, or one tensor's
    section: int = 0  # which tensor it is, 0 for the whole model
    moments: tuple[Tensor, Tensor] | None = (
        None  # for memories: sum and sum of squares of the local steps' gradients, shaped like the updates
    )
    announced: Mapping[str, bytes] = field(
        default_factory=dict
    )  # by the server: a shared scale, a factor
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
PRECISIONS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Codec(ABC):
    """A codec with its options. Subclasses are frozen dataclasses; their fields are the options of the spec string."""

    name: ClassVar[str]
    id: ClassVar[int]
    source: ClassVar[str] = "–"  # author and year, for tables
    scope: ClassVar[int] = frame.MODEL
    linear: ClassVar[bool] = False  # frames of one seed can be merged
    seeded: ClassVar[bool] = False  # decoding needs the seed, which then stands in the frame
    shares_seed: ClassVar[bool] = (
        False  # frames of a round are made with one seed, so that they add; else each client has its own
    )
    portable: ClassVar[bool] = True  # the same bytes on every device
    fused: ClassVar[bool] = False  # `_encode_rows` takes `onto`

    def __str__(self) -> str:
        return spec.show(self.name, self)

    @property
    def unscoped(self) -> "Codec":
        """The codec without `@layer`."""
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
        """Return a section for a finite vector [n], which is not modified. `seed` is in 0..2⁶⁴−1, as `_decode_row` gets it."""
        raise NotImplementedError(f"{type(self).__name__} has neither _encode_row nor _encode_rows")

    def _encode_rows(self, rows: Rows, seeds: Sequence[int], context: Context) -> list[Section]:
        """Return a section for each of m ≥ 1 finite vectors [n], which are not modified.

        A codec that is `fused` also takes `onto`, contiguous float32 vectors: it adds `onto[i] += rows[i]` in place and encodes the
        sums, in fewer passes than one after the other, and raises NonFiniteError with `onto` unchanged. It gets it for large vectors
        on a CPU, one at a time, whose sums are not checked.
        """
        return [self._encode_row(row, seed, context) for row, seed in zip(rows, seeds, strict=True)]

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        """Return the update in a section. Raise FrameError unless it is a whole section for a vector [layout.numel]: nothing missing,
        nothing left over, nothing that is not finite.

        `layout` is the model's, or that of one tensor, or of one flat tensor where the caller knew none; `seed` is 0 unless `seeded`.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither _decode_row nor _decode_rows")

    def _decode_rows(
        self, sections: Sequence[Section], layout: Layout, seeds: Sequence[int]
    ) -> list[Update | FrameError]:
        """Return the update in each section, or a FrameError in the place of one that is bad."""
        opened: list[Update | FrameError] = []
        for section, seed in zip(sections, seeds, strict=True):
            try:
                opened.append(self._decode_row(section, layout, seed))
            except FrameError as error:
                opened.append(error)
        return opened

    def _merge_sections(self, sections: Sequence[Section]) -> Section:
        """Return the section of the sum. The sections of a linear codec count every coordinate."""
        raise self._not_linear()

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
        stays as it was. That is what error feedback does, in as few passes as possible.
        """
        rows = _checked(x, seeds, onto, layout)
        if not len(rows):
            return []
        frames = partial(self._frames, replace(context, layout=layout, moments=None))
        if not kernels.are_large(rows, onto):
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
                seed, sections = frame.unseal(data, self.id, numel, layout, self.seeded)
            except FrameError as error:
                opened[i] = error
                continue
            for j, (entry, section) in enumerate(sections):
                _, column = columns.setdefault(-1 if entry is frame.WHOLE else j, (entry, []))
                column.append((i, section, (seed + j) % SEEDS))
        for entry, column in columns.values():
            whole = entry is frame.WHOLE
            own = (layout or Layout.flat(numel)) if whole else entry.alone()
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
        return self.open(data, numel, layout).take(device)

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
        opened = [frame.unseal(data, self.id, numel, layout, self.seeded) for data in frames]
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

    def _frames(
        self,
        context: Context,
        rows: Rows,
        seeds: Sequence[int],
        onto: Sequence[Tensor] | None,
    ) -> list[bytes | NonFiniteError]:
        """Return frames of vectors that are encoded together, or errors in their place."""
        if onto is not None and self.fused and kernels.are_large(rows, onto):
            ((row,), (total,), (seed,)) = rows, onto, seeds
            try:
                made = self._encode_rows(rows, [seed % SEEDS], context, onto)
            except NonFiniteError:
                return [_nonfinite(row, context.layout, total)]
            return [self._seal(row.numel(), made, seed)]
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
            else _nonfinite(rows[i], context.layout, onto and onto[i])
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


@dataclass(frozen=True)
class LayerWise(Codec):
    """A codec applied tensor by tensor: `stc:density=1%@layer`. Its frames have a section per tensor of the layout."""

    inner: Codec
    scope: ClassVar[int] = frame.LAYER

    def __post_init__(self) -> None:
        for fact in ("name", "id", "source", "linear", "portable", "seeded", "shares_seed"):
            object.__setattr__(self, fact, getattr(self.inner, fact))

    def __str__(self) -> str:
        return f"{self.inner}@layer"

    @property
    def unscoped(self) -> Codec:
        return self.inner

    def contraction(self, numel: int) -> float | None:
        whole = self.inner.contraction(numel)
        return (
            whole / 2 if whole and hasattr(self.inner, "density") else whole
        )  # k of the whole can be a third up, that of a tensor down

    def variance(self, numel: int) -> float | None:
        whole = self.inner.variance(numel)
        return (
            1 + 2 * whole if whole and hasattr(self.inner, "density") else whole
        )  # 1 + ω doubles for the same reason

    @property
    def density(self) -> float:
        return self.inner.density

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
            for sections, section in zip(
                frames, self.inner._encode_rows(parts, own, told), strict=True
            ):
                sections.append(section)
        return frames


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


def encoded_spans(codec: Codec, layout: Layout) -> list[slice]:
    """Return the spans of a vector that a codec encodes one by one."""
    if codec.scope == frame.LAYER:
        return [entry.span for entry in layout]
    return [slice(0, layout.numel)]


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


def check_dense(x: Tensor) -> None:
    """Raise ConfigError unless x is a tensor that holds all of its numbers."""
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_meta:
        raise ConfigError(
            f"a codec takes a dense torch tensor; given {_kind(x)}, give a torch tensor that holds its numbers"
        )


def check_vector(x: Tensor, layout: Layout | None = None) -> None:
    """Raise ConfigError unless x is a dense vector of one dimension, of a precision that codecs take and of the size of the layout."""
    check_dense(x)
    if x.dim() != 1:
        raise ConfigError(f"a codec takes a vector of one dimension; given shape {list(x.shape)}")
    if x.dtype not in PRECISIONS:
        raise ConfigError(
            f"a codec takes float32, float16 or bfloat16; given {x.dtype}, write x.float()"
        )
    if layout is not None and layout.numel != x.numel():
        raise ConfigError(
            f"the layout has {layout.numel} elements and the vector {x.numel()}; give the layout of this model"
        )


def _checked(
    x: Rows, seeds: Sequence[int], onto: Sequence[Tensor] | None, layout: Layout | None
) -> Rows:
    """Return the vectors, detached. Raise ConfigError for vectors that a codec does not take."""
    if not isinstance(x, Sequence):
        check_dense(x)
    if isinstance(x, Tensor) and x.dim() != 2 or len(seeds) != len(x):
        given = f"shape {list(x.shape)}" if isinstance(x, Tensor) else f"{len(x)} vectors"
        raise ConfigError(
            f"encode_batch needs m vectors of one size, such as a stack [m, n], and m seeds; given {given} and {len(seeds)} seeds"
        )
    alike = set()
    for row in x[:1] if isinstance(x, Tensor) else x:
        check_vector(row, layout)
        alike.add((row.shape, row.device, row.dtype))
    if len(alike) > 1:
        raise ConfigError("encode_batch needs vectors of one size, precision and device")
    for shape, device, _ in alike:
        for total in onto or ():
            if total.shape != shape or total.device != device or total.dtype != torch.float32:
                given = f"{total.dtype} {list(total.shape)} on {total.device}"
                raise ConfigError(
                    f"the sum is {given}, the vector {list(shape)} on {device}; give a float32 sum of its shape and device"
                )
    return x.detach() if isinstance(x, Tensor) else [row.detach() for row in x]


def _kind(x: object) -> str:
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    return "a tensor on the meta device" if x.is_meta else f"one of layout {x.layout}"


def or_raise(made: T | Exception) -> T:
    """Return what stands in a list of results, or raise the error that stands in its place."""
    if isinstance(made, Exception):
        raise made
    return made


def nonfinite_rows(rows: Rows, layout: Layout | None, what: str) -> list[NonFiniteError | None]:
    """Return for each vector that holds NaN or infinity the error that says so of `what`, None for others."""
    return [
        None if fine else _nonfinite(row, layout, what=what)
        for row, fine in zip(rows, kernels.are_finite(rows), strict=True)
    ]


def _nonfinite(
    x: Tensor, layout: Layout | None, onto: Tensor | None = None, what: str = "the update"
) -> NonFiniteError:
    """Return the error for a vector, or a sum onto + x, that is not finite, with the name of the tensor."""

    def place(position: int) -> str:
        if layout is None:
            return f"in element {position}"
        entry = layout.entry_at(position)
        return f"in tensor '{entry.name}', element {position - entry.offset}"

    return kernels.nonfinite(x, onto, what, place)


def expect(condition: bool, sentence: str) -> None:
    """Raise FrameError unless `condition` holds: for the checks in `unpack`."""
    if not condition:
        raise FrameError(sentence)
