"""What every codec is: a pure function from a vector to a frame and back.

The author of a codec writes `pack` (vector → section) and `unpack` (section → update). Frames, checksums, scopes, checks of the input,
batches and accumulation are here, once.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from .. import kernels, spec
from ..errors import ConfigError, FrameError, NonFiniteError
from ..kernels.select import non_finite
from ..layout import Entry, Layout
from . import frame
from .frame import Section
from .stacks import in_pieces
from .update import Sections, Update


@dataclass(frozen=True)
class Context:
    """What a codec or memory may know of the exchange that a frame is made for."""

    round: int = 0
    phase: str = "train"
    layout: Layout | None = None  # of the vector that is packed: the model's, or one tensor's
    section: int = 0  # which tensor it is, 0 for the whole model
    moments: tuple[Tensor, Tensor] | None = (
        None  # sum and sum of squares of the local steps' gradients, shaped like what is packed
    )
    announced: Mapping[str, bytes] = field(
        default_factory=dict
    )  # what the server said: a shared scale, a factor
    rate: float = 1.0  # the round's learning rate as a multiple of the run's

    def of_tensor(self, section: int, entry: Entry) -> "Context":
        """The context of one tensor of the model."""
        moments = self.moments and (
            self.moments[0][..., entry.span],
            self.moments[1][..., entry.span],
        )
        return replace(self, layout=entry.alone(), section=section, moments=moments)

    def of_rows(self, rows: slice | list[int]) -> "Context":
        """The context of some rows of a stack."""
        stacked = self.moments is not None and self.moments[0].dim() > 1
        return (
            replace(self, moments=(self.moments[0][rows], self.moments[1][rows]))
            if stacked
            else self
        )


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

    def __str__(self) -> str:
        return spec.show(self.name, self)

    # What may be done with it, at vectors of numel elements.

    def contraction(self, numel: int) -> float | None:
        """δ ≥ 0 with ‖x − C(x)‖² ≤ (1 − δ)‖x‖² for every x, in the mean over seeds; None if there is none."""
        return None

    def variance(self, numel: int) -> float | None:
        """ω with E C(x) = x and E ‖x − C(x)‖² ≤ ω‖x‖², or None if the codec is biased."""
        return None

    def at_density(self, density: float) -> "Codec":
        """This codec, sending another share of the coordinates. Raises ConfigError for one that has no density."""
        if "density" not in {f.name for f in fields(self)}:
            raise ConfigError(
                f"{self} has no density that could change; use one that has, such as stc or topk"
            )
        return replace(self, density=density)

    def longest_section(self, numel: int) -> int | None:
        """A length in bytes, count included, that no section for a vector [numel] exceeds; None if the codec knows none."""
        return None

    def longest_frame(self, layout: Layout) -> int | None:
        """A length in bytes that no frame for vectors of this layout exceeds; None if the codec knows none."""
        section = self.longest_section(layout.numel)
        return section and frame.header_bytes(self.id, self.seeded) + section

    # What an author writes.

    @abstractmethod
    def pack(self, x: Tensor, seed: int, context: Context) -> Section:
        """A section for a finite vector x of one dimension, which is not touched. `seed` is in 0..2⁶⁴−1, as `unpack` gets it."""

    @abstractmethod
    def unpack(self, section: Section, layout: Layout, seed: int) -> Update:
        """The update in a section. Raises FrameError unless it is a whole section for a vector [layout.numel]: nothing cut off, nothing
        left over, nothing that is not finite.

        `layout` is the model's, or that of one tensor, or of one flat tensor where the caller knew none; `seed` is 0 unless `seeded`.
        """

    def pack_rows(self, x: Tensor, seeds: Sequence[int], context: Context) -> list[Section]:
        """A section for each row of a finite stack [m, n]; override where one launch can serve them all."""
        return [self.pack(row, seed, context) for row, seed in zip(x, seeds, strict=True)]

    def pack_added(self, total: Tensor, x: Tensor, seed: int, context: Context) -> Section:
        """`total += x` in place, then a section for `total`; both float32. Override where one pass can do both.

        Raises NonFiniteError, with `total` untouched, when x or the sum is not finite.
        """
        add_finite(total, x)
        return self.pack(total, seed, context)

    def merge_sections(self, sections: Sequence[Section]) -> Section:
        """The section of the sum; a linear codec, whose sections count every coordinate, overrides this."""
        raise ConfigError(
            f"frames of {self} cannot be merged; use a linear codec, such as identity"
        )

    def add_all(self, updates: Sequence[Update], weights: Sequence[float], into: Tensor) -> None:
        """into += Σ wᵢ·updateᵢ, in place and in this order; override where updates have to be merged before they are read."""
        for update, weight in zip(updates, weights, strict=True):
            update.add_to(into, weight)

    # What others call.

    def encode(
        self,
        x: Tensor,
        *,
        seed: int = 0,
        layout: Layout | None = None,
        context: Context = NO_CONTEXT,
    ) -> bytes:
        """A frame for x: one dimension, float32, float16 or bfloat16, any device; not touched. Same x, same seed, same bytes.

        Raises NonFiniteError, naming the tensor of `layout`, when x holds NaN or infinity.
        """
        _check_vector(x, layout)
        _check_finite(x, layout)
        return self._seal(
            x.numel(), [self.pack(x.detach(), seed % SEEDS, replace(context, layout=layout))], seed
        )

    def encode_batch(
        self,
        x: Tensor,
        seeds: Sequence[int],
        *,
        layout: Layout | None = None,
        context: Context = NO_CONTEXT,
    ) -> list[bytes | NonFiniteError]:
        """A frame for each row of x [m, n], or a NonFiniteError in the place of a row with NaN or infinity."""
        check_dense(x)
        if x.dim() != 2 or len(seeds) != len(x):
            raise ConfigError(
                f"encode_batch needs a stack [m, n] and m seeds; given shape {list(x.shape)} and {len(seeds)} seeds"
            )
        check_kind(x, layout)
        bad = kernels.first_nonfinite_rows(x).tolist()
        good = [i for i, position in enumerate(bad) if position < 0]
        rows = x.detach() if len(good) == len(x) else x.detach()[good]
        own, said = (
            [seeds[i] % SEEDS for i in good],
            context if len(good) == len(x) else context.of_rows(good),
        )
        packed = iter(
            in_pieces(
                lambda some, at: self._pack_stack(some, own[at], layout, said.of_rows(at)), rows
            )
        )
        return [
            self._seal(x.shape[1], next(packed), seeds[i]) if p < 0 else _nonfinite(x[i], p, layout)
            for i, p in enumerate(bad)
        ]

    def encode_added(
        self,
        total: Tensor,
        x: Tensor,
        *,
        seed: int = 0,
        layout: Layout | None = None,
        context: Context = NO_CONTEXT,
    ) -> bytes:
        """`total += x` in place, then a frame for `total`; both float32 [n]. What error feedback does, in as few passes as possible.

        Raises NonFiniteError, with `total` untouched, when x or the sum is not finite.
        """
        _check_pair(total, x, layout)
        try:
            return self._seal(
                x.numel(),
                [self.pack_added(total, x.detach(), seed % SEEDS, replace(context, layout=layout))],
                seed,
            )
        except NonFiniteError as error:
            raise _named(error, layout) from None

    def open(self, data: bytes, numel: int, layout: Layout | None = None) -> Update:
        """What a frame says, checked to the last bit. Raises FrameError on anything but a whole valid frame of this codec and size."""
        if type(numel) is not int or numel < 0:
            raise ConfigError(
                f"numel is {numel!r}; give the number of elements of the receiver's vector"
            )
        seed, sections = frame.unseal(data, self.id, numel, layout, self.seeded)
        if sections and sections[0][0] is frame.WHOLE:
            return self.unpack(sections[0][1], layout or Layout.flat(numel), seed)
        parts = [
            (e.span, self.unpack(section, e.alone(), (seed + i) % SEEDS))
            for i, (e, section) in enumerate(sections)
        ]
        return Sections(numel, tuple(parts))

    def open_batch(
        self, frames: Sequence[bytes], numel: int, layout: Layout | None = None
    ) -> list[Update | FrameError]:
        """`open` for many frames of one size; a FrameError in the place of one that is bad. Override where one pass can read them all."""
        opened: list[Update | FrameError] = []
        for data in frames:
            try:
                opened.append(self.open(data, numel, layout))
            except FrameError as error:
                opened.append(error)
        return opened

    def decode(
        self,
        data: bytes,
        *,
        numel: int,
        device: torch.device | str | None = None,
        layout: Layout | None = None,
    ) -> Tensor:
        """The vector [numel] in a frame, float32, on the CPU unless `device` is given. Raises FrameError like `open`."""
        return self.open(data, numel, layout).take(device)

    def accumulate(
        self, data: bytes, into: Tensor, weight: float = 1.0, *, layout: Layout | None = None
    ) -> None:
        """into += weight · decode(data), in place; a sparse frame costs its nonzeros. Raises FrameError with `into` untouched."""
        self.open(data, into.numel(), layout).add_to(into, weight)

    def merge(
        self, frames: Sequence[bytes], *, numel: int | None = None, layout: Layout | None = None
    ) -> bytes:
        """A frame of the sum of what frames of a linear codec say, all of one size, scope and seed. Raises FrameError on others.

        The size is that of the first frame; give `numel`, or the `layout`, where frames are a stranger's: time and memory are O(numel)
        then, and what comes out can be read with that layout.
        """
        if not self.linear:
            raise ConfigError(
                f"frames of {self} cannot be merged; use a linear codec, such as identity"
            )
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
            self.merge_sections([section for _, section in column])
            for column in zip(*(s for _, s in opened), strict=True)
        ]
        return frame.seal(
            self.id, scopes.pop(), numel, merged, seeds.pop() if self.seeded else None
        )

    def _pack_stack(
        self, rows: Tensor, seeds: Sequence[int], layout: Layout | None, context: Context
    ) -> list[list[Section]]:
        return [
            [section] for section in self.pack_rows(rows, seeds, replace(context, layout=layout))
        ]

    def _seal(self, numel: int, sections: Sequence[Section], seed: int) -> bytes:
        return frame.seal(self.id, self.scope, numel, sections, seed if self.seeded else None)


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

    def at_density(self, density: float) -> Codec:
        return LayerWise(self.inner.at_density(density))

    def longest_frame(self, layout: Layout) -> int | None:
        sections = [self.inner.longest_section(e.numel) for e in layout]
        if None in sections:
            return None
        return frame.header_bytes(self.id, self.seeded) + sum(
            len(frame.varint(section)) + section for section in sections
        )

    def pack(self, x: Tensor, seed: int, context: Context) -> Section:
        return self.inner.pack(x, seed, context)

    def unpack(self, section: Section, layout: Layout, seed: int) -> Update:
        return self.inner.unpack(section, layout, seed)

    def open_batch(
        self, frames: Sequence[bytes], numel: int, layout: Layout | None = None
    ) -> list[Update | FrameError]:
        return self.inner.open_batch(frames, numel, layout)

    def merge_sections(self, sections: Sequence[Section]) -> Section:
        return self.inner.merge_sections(sections)

    def add_all(self, updates: Sequence[Update], weights: Sequence[float], into: Tensor) -> None:
        if not all(isinstance(update, Sections) for update in updates):
            return self.inner.add_all(updates, weights, into)
        for column in zip(*(update.parts for update in updates), strict=True):
            self.inner.add_all([part for _, part in column], weights, into[column[0][0]])

    def encode(
        self,
        x: Tensor,
        *,
        seed: int = 0,
        layout: Layout | None = None,
        context: Context = NO_CONTEXT,
    ) -> bytes:
        _check_vector(x, layout)
        _check_finite(x, layout)
        tensors = enumerate(self._layout(layout))
        packed = [
            self.inner.pack(x.detach()[e.span], (seed + i) % SEEDS, context.of_tensor(i, e))
            for i, e in tensors
        ]
        return self._seal(x.numel(), packed, seed)

    def encode_added(
        self,
        total: Tensor,
        x: Tensor,
        *,
        seed: int = 0,
        layout: Layout | None = None,
        context: Context = NO_CONTEXT,
    ) -> bytes:
        _check_pair(total, x, layout)
        tensors = list(enumerate(self._layout(layout)))
        if any(kernels.first_nonfinite(total[e.span] + x[e.span]) is not None for _, e in tensors):
            raise _named(non_finite(total, x), layout)
        packed = [
            self.inner.pack_added(
                total[e.span], x.detach()[e.span], (seed + i) % SEEDS, context.of_tensor(i, e)
            )
            for i, e in tensors
        ]
        return self._seal(x.numel(), packed, seed)

    def _pack_stack(
        self, rows: Tensor, seeds: Sequence[int], layout: Layout | None, context: Context
    ) -> list[list[Section]]:
        tensors = enumerate(self._layout(layout))
        columns = [
            self.inner.pack_rows(
                rows[:, e.span], [(seed + i) % SEEDS for seed in seeds], context.of_tensor(i, e)
            )
            for i, e in tensors
        ]
        return [list(sections) for sections in zip(*columns, strict=True)]

    def _layout(self, layout: Layout | None) -> Layout:
        if layout is None:
            raise ConfigError(f"{self} needs layout=…, or write @model in place of @layer")
        return layout


def check_dense(x: Tensor) -> None:
    """Raise ConfigError unless x is a tensor that holds all of its numbers."""
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_meta:
        raise ConfigError(
            f"a codec takes a dense torch tensor; given {_kind(x)}, give a torch tensor that holds its numbers"
        )


def _kind(x: object) -> str:
    """What stands in the place of a dense tensor."""
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    return "a tensor on the meta device" if x.is_meta else f"one of layout {x.layout}"


def _check_vector(x: Tensor, layout: Layout | None) -> None:
    check_dense(x)
    if x.dim() != 1:
        raise ConfigError(f"a codec takes a vector of one dimension; given shape {list(x.shape)}")
    check_kind(x, layout)


def check_kind(x: Tensor, layout: Layout | None = None) -> None:
    """Raise ConfigError unless x has a precision that codecs take and, in its last dimension, the size of the layout."""
    if x.dtype not in PRECISIONS:
        raise ConfigError(
            f"a codec takes float32, float16 or bfloat16; given {x.dtype}, write x.float()"
        )
    if layout is not None and layout.numel != x.shape[-1]:
        raise ConfigError(
            f"the layout has {layout.numel} elements and the vector {x.shape[-1]}; give the layout of this model"
        )


def _check_pair(total: Tensor, x: Tensor, layout: Layout | None) -> None:
    _check_vector(x, layout)
    if total.dtype != torch.float32 or total.shape != x.shape or total.device != x.device:
        given = f"{total.dtype} {list(total.shape)} on {total.device}"
        raise ConfigError(
            f"the sum is {given}, the vector {list(x.shape)} on {x.device}; give a float32 sum of its shape and device"
        )


def add_finite(total: Tensor, x: Tensor) -> None:
    """`total += x` in place. Raises NonFiniteError, with `total` untouched, when the sum is not finite."""
    added = total + x
    if kernels.first_nonfinite(added) is not None:
        raise non_finite(total, x)
    total.copy_(added)


def _check_finite(x: Tensor, layout: Layout | None) -> None:
    position = kernels.first_nonfinite(x)
    if position is not None:
        raise _nonfinite(x, position, layout)


def nonfinite_rows(x: Tensor, layout: Layout | None, what: str) -> list[NonFiniteError | None]:
    """For each row of x [m, n] that holds NaN or infinity, the error that says so of `what`."""
    if not x.numel() or all(math.isfinite(edge) for edge in x.aminmax()):
        return [None] * len(x)
    bad = kernels.first_nonfinite_rows(x).tolist()
    return [
        _nonfinite(row, position, layout, what) if position >= 0 else None
        for row, position in zip(x, bad, strict=True)
    ]


def _nonfinite(
    x: Tensor, position: int, layout: Layout | None, what: str = "the update"
) -> NonFiniteError:
    error = NonFiniteError(f"{what} is {x[position].item()} at position {position}")
    error.position = position
    return _named(error, layout)


def _named(error: NonFiniteError, layout: Layout | None) -> NonFiniteError:
    """The error with the name of the tensor in it."""
    entry = layout.entry_at(error.position) if layout is not None else None
    where = (
        f"tensor '{entry.name}', element {error.position - entry.offset}"
        if entry
        else f"element {error.position}"
    )
    named = NonFiniteError(
        f"{str(error).partition(' at position')[0]} in {where}; lower --lr or set --clip"
    )
    named.position = error.position
    return named


def expect(condition: bool, sentence: str) -> None:
    """Raise FrameError unless `condition` holds: for the checks in `unpack`."""
    if not condition:
        raise FrameError(sentence)
