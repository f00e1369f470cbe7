"""The base class of codecs that rotate a vector (kernels/hadamard.py) and quantize the result.

The vector is divided into blocks. Each coordinate of a rotated block is replaced by a code, a small integer that stands for a value v. Each
block has a scale s and, in some codecs, a shift b, so that the rotated coordinate is about s·v + b. A frame contains a = s/d for each
block, where d is the number of coordinates in the block. The decoder computes a·v + b/d for all coordinates of the block, multiplies the
block by D·W (see kernels/hadamard.py), and clips the result to the range of float32.

A nonzero vector whose largest magnitude is below 2⁻¹⁰⁰ is sent as float32, without rotation, because the rotation could give subnormal
numbers, which are imprecise.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..kernels import bit_planes, hadamard
from ..kernels.hadamard import RotatedBlocks
from ..kernels.parallel import map_ranges
from ..layout import Layout
from . import floats, selection
from .base import Codec, Context, expect
from .frame import Section, varint
from .update import Dense, Update

UNROTATED = 0  # first byte of a body that contains the vector as float32, without rotation
# A vector is sent without rotation if the binary exponent of its largest magnitude (`frexp`) is at most this number.
MAX_UNROTATED_EXPONENT = -100
HALF = np.dtype("<u4")  # Scales and shifts are sent as the upper 32 bits of float64 numbers
MIN_SCALE, MAX_SCALE = 2.0**-400, 2.0**160  # range of the magnitudes of nonzero scales and shifts

# A function that returns the values of the codes start..stop-1 as a new float32 array. `start` and `stop` are block boundaries.
ReadCodes = Callable[[int, int], np.ndarray]


@dataclass(frozen=True)
class RotatedCodec(Codec):
    """A codec that rotates a vector and quantizes the result.

    Subclasses implement `first_byte`, `quantize`, and either `width` and `table`, or `pack_codes` and `unpack_codes`.
    """

    seeded = True
    whole = True
    shifts = False  # whether a section contains a shift b for each block
    code_type: ClassVar[type] = np.uint8

    @abstractmethod
    def first_byte(self) -> int:
        """Return the first byte of the body, from 1 to 255, which tells the decoder how to read the codes."""

    @abstractmethod
    def quantize(self, blocks: RotatedBlocks) -> tuple[np.ndarray, list[np.ndarray]]:
        """Quantize rotated blocks. Return the codes [N], and a list: [scales] or [scales, shifts].

        A code with the value v represents the rotated coordinate scale·v + shift. N is the total size of the blocks. Scales and shifts are
        float64 [blocks], and their lower 32 bits are zero.
        """

    def width(self) -> int | None:
        """Return the number of bits of a code, or None if codes have different lengths."""
        return None

    def table(self, first_byte: int) -> np.ndarray:
        """Return the float32 value of each code. `first_byte`: the first byte of the body. Raises FrameError if it is invalid."""
        raise NotImplementedError("implement table or unpack_codes")

    def pack_codes(self, codes: np.ndarray) -> bytes:
        """Encode codes [N] as bytes, by default as bit planes. N includes the padding of the last block."""
        return bit_planes.pack(codes, self.width() or 0)

    def unpack_codes(
        self, first_byte: int, data: memoryview, count: int, is_zero: np.ndarray
    ) -> ReadCodes:
        """Return a function that reads the values of the `count` codes in `data`. Raises FrameError if a code is invalid.

        `is_zero` [count/8]: whether each group of eight codes belongs to a block with scale 0, in which all values must be 0.
        """
        table = self.table(first_byte)
        planes = bit_planes.unpack(data, count, table.size)
        is_invalid = is_zero.any() and planes[:, is_zero].any()
        expect(not is_invalid, "a block with scale 0 has nonzero values")
        return partial(bit_planes.read, planes, table=np.resize(table, 1 << len(planes)))

    def longest_section(self, numel: int) -> int | None:
        edges, width = hadamard.edges(numel), self.width()
        if width is None:
            return None
        coded = HALF.itemsize * (edges.size - 1) * (1 + self.shifts) + width * int(edges[-1]) // 8
        return len(varint(numel)) + 1 + max(4 * numel, coded)

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        edges = hadamard.edges(x.numel())
        sent = np.empty((1 + self.shifts, edges.size - 1))
        exponents = np.empty(edges.size - 1, np.int64)
        codes = np.empty(edges[-1], self.code_type)

        def encode_blocks(blocks: RotatedBlocks) -> None:
            codes[blocks.span], numbers = self.quantize(blocks)
            exponents[blocks.indices] = blocks.exponents
            sent[:, blocks.indices] = np.ldexp(numbers, blocks.exponents.astype(np.int32))
            sent[0, blocks.indices] /= blocks.sizes

        hadamard.rotate(x, seed, encode_blocks)
        nonzero = sent.any(0)
        if nonzero.any() and exponents[nonzero].max() <= MAX_UNROTATED_EXPONENT:
            values = floats.pack(x.to(torch.float32).cpu().numpy(), floats.FP32)
            return Section(x.numel(), bytes([UNROTATED]) + values)
        numbers = (sent.view(np.int64) >> 32).astype(HALF).tobytes()
        return Section(x.numel(), bytes([self.first_byte()]) + numbers + self.pack_codes(codes))

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        count, body = section
        first, data = selection.take(memoryview(body), 1)
        if first[0] == UNROTATED:
            return Dense(floats.unpack_all(data, count, floats.FP32))
        sizes = np.diff(hadamard.edges(count))
        sent, data = selection.take(data, HALF.itemsize * sizes.size * (1 + self.shifts))
        scale, shift = _read_numbers(np.frombuffer(sent, HALF).reshape(-1, sizes.size))
        codes = self.unpack_codes(first[0], data, int(sizes.sum()), (scale == 0).repeat(sizes // 8))
        return RotatedUpdate(count, seed, scale, shift, codes)


@dataclass(frozen=True)
class RotatedUpdate(Update):
    """An update stored as quantized rotated blocks, which are rotated back each time that the update is read."""

    numel: int
    seed: int
    scale: np.ndarray  # a, the scale divided by the block size, float64 [blocks]
    shift: np.ndarray  # b, float64 [blocks]
    codes: ReadCodes
    positions = None

    def add_to(self, into: Tensor, weight: float = 1.0) -> None:
        factor = np.float32(weight)
        if into.device.type != "cpu":
            into.add_(self.dense(into.device) * float(factor))
            return
        target = into.detach().numpy()

        def add(start: int, stop: int, values: np.ndarray) -> None:
            target[start:stop] += factor * values

        self._for_each_chunk(0, self.numel, add)

    def block(self, start: int, stop: int) -> np.ndarray:
        out = np.empty(stop - start, np.float32)

        def put(first: int, last: int, values: np.ndarray) -> None:
            a, b = max(start, first), min(stop, last)
            out[a - start : b - start] = values[a - first : b - first]

        self._for_each_chunk(start, stop, put)
        return out

    def _for_each_chunk(
        self, start: int, stop: int, use: Callable[[int, int, np.ndarray], None]
    ) -> None:
        """Decode the blocks that contain the coordinates start..stop-1, in chunks and on several threads.

        Call use(first, last, values) for each chunk, where `values` are the coordinates first..last-1.
        """
        if start == stop:
            return
        edges = hadamard.edges(self.numel)
        first_block = int(np.searchsorted(edges, start, "right")) - 1
        last_edge = int(np.searchsorted(edges, stop))

        def work(a: int, b: int) -> None:
            for at in range(a, b, hadamard.CHUNK):
                span = edges[first_block] + [at, min(at + hadamard.CHUNK, b)]
                i, j = np.searchsorted(edges, span).tolist()
                first, last = edges[[i, j]].tolist()
                affine = self.scale[i:j], self.shift[i:j]
                values = hadamard.rotate_back(
                    self.codes(first, last), self.seed, self.numel, i, *affine
                )
                use(first, first + values.size, values)

        map_ranges(int(edges[last_edge] - edges[first_block]), work, hadamard.CHUNK)


def round_nearest(numbers: np.ndarray) -> np.ndarray:
    """Round numbers ≥ 0 to the nearest float64 whose lower 32 bits are zero."""
    return ((numbers.view(np.int64) + (1 << 31)) >> 32 << 32).view(np.float64)


def round_up(numbers: np.ndarray) -> np.ndarray:
    """Round numbers up to the next float64 whose lower 32 bits are zero."""
    bits = numbers.view(np.int64)
    return (np.where(bits < 0, bits, bits + 0xFFFFFFFF) >> 32 << 32).view(np.float64)


def _read_numbers(halves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales a and the shifts b, as two arrays [blocks]. Raises FrameError if one cannot result from a float32 vector."""
    numbers = (halves.astype(np.int64) << 32).view(np.float64)
    sizes = np.abs(numbers)
    with np.errstate(invalid="ignore"):
        in_range = (halves == 0) | (sizes >= MIN_SCALE) & (sizes <= MAX_SCALE)
    valid = bool(in_range.all() and (numbers[0] >= 0).all())
    expect(valid, "the scale or shift of a block is out of range")
    return numbers[0], numbers[1] if len(numbers) > 1 else np.zeros(numbers.shape[1])
