"""Base classes of codecs that select coordinates, such as top-k.

The body of a section contains the values and the positions of the selected coordinates. The positions can be encoded in several forms. The
encoder chooses the form with the fewest bytes, usually a Rice code (kernels/positions.py). Some codecs draw positions from the seed. These
positions are not sent, because the receiver draws them again. The first byte of a body contains the form, and a flag from 0 to 3. Each
codec defines what its flags mean, such as the precision of the values.

With @chunk, all chunks have one joint body, unless positions are drawn from the seed. If the flag of a joint body is 0, the values of each
chunk are encoded separately, with a flag for each chunk. If the flag of a joint body is not 0, the values of all chunks are encoded
together.
"""

import math
import struct
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from .. import kernels
from ..errors import FrameError, SpecError
from ..kernels import Chosen, Rows, rice
from ..kernels import positions as positions_format
from ..kernels.parallel import starmap
from ..layout import Layout
from .base import SEEDS, Codec, Context, chunk_seeds, expect, stack_chunks
from .frame import EMPTY, Section, read_varint, varint
from .update import Sparse, Update

MEAN = struct.Struct("<f")
# The first byte of a body: the form of the positions in the low bits, and the flag in the two high bits.
FORM, FLAG_SHIFT, FLAG_BITS = 0x3F, 6, 2
DRAWN = 63  # form of positions that the receiver draws from the seed
Unpacked = tuple[np.ndarray, int]  # the decoded float32 values, and the number of bytes read


@dataclass(frozen=True)
class Selective(Codec):
    """A codec that selects coordinates and sends their positions and values.

    Zeros are not selected, unless positions are drawn from the seed.

    Subclasses implement `select` or `choose` to select coordinates, and `pack_values` and `unpack_values` to encode and decode values.
    """

    draws = False  # Whether positions are drawn from the seed (`draw_positions`) and not sent

    def select(self, rows: Rows, seeds: Sequence[int]) -> Chosen:
        """Select coordinates of each of m ≥ 1 finite vectors and return their positions."""
        raise NotImplementedError("implement select or choose")

    def choose(self, rows: Rows, seeds: Sequence[int]) -> tuple[Chosen, Tensor]:
        """Select coordinates of each vector. Return their positions, and the float32 values to send.

        By default, the values are those of the vector. Codecs that send scaled values override this method.
        """
        chosen = self.select(rows, seeds)
        return chosen, kernels.values_at(rows, chosen)

    def max_count(self, numel: int) -> int:
        """Return an upper bound of the number of coordinates that are sent for a vector [numel]."""
        return numel

    def draw_positions(self, numel: int, count: int, seed: int) -> np.ndarray:
        """Draw `count` of the positions 0..numel-1 from the seed. Return them as int64, ascending. Needed only if `draws` is true."""
        raise FrameError(
            f"the frame has no positions, but {self.name} does not draw positions from a seed; use the same codec on both sides"
        )

    @abstractmethod
    def pack_values(
        self, values: np.ndarray, counts: np.ndarray, seeds: Sequence[int], context: Context
    ) -> list[tuple[int, bytes]]:
        """Encode the selected values of each of m vectors. Return a flag from 0 to 3 and the bytes for each vector.

        `values`: the float32 values of all vectors, concatenated; none is 0 unless positions are drawn from the seed. `counts` [m]: the
        number of values of each vector. For a vector without values, the flag and the bytes are ignored.
        """

    @abstractmethod
    def unpack_values(self, flag: int, data: memoryview, count: int, seed: int) -> Unpacked:
        """Decode `count` ≥ 1 values from the start of `data`. Return the values and the number of bytes read. Raises FrameError."""

    def _encode_rows(self, rows: Rows, seeds: Sequence[int], context: Context) -> list[Section]:
        (positions, counts), values = self.choose(rows, seeds)
        numel = rows[0].numel()
        sent = self.pack_values(values.cpu().numpy(), counts, seeds, context)
        sections = [EMPTY] * len(rows)
        if not self.draws:
            forms, codes = positions_format.pack_rows(positions.cpu().numpy(), counts, numel)
        for i, (count, (flag, data)) in enumerate(zip(counts.tolist(), sent, strict=True)):
            if count and self.draws:
                sections[i] = _section(numel, DRAWN, flag, varint(count), data)
            elif count:
                sections[i] = _section(count, forms[i], flag, data, codes[i])
        return sections

    def _decode_rows(
        self, sections: Sequence[Section], layout: Layout, seeds: Sequence[int]
    ) -> list[Update | FrameError]:
        numel = layout.numel
        opened: list[Update | FrameError] = [Sparse.zero(numel)] * len(sections)
        # For each section that contains positions: its index, the number of values, the form, the encoded positions, and the values.
        read = []
        for i, ((count, body), seed) in enumerate(zip(sections, seeds, strict=True)):
            if not count:
                continue
            try:
                first, data = take(memoryview(body), 1)
                form, flag = first[0] & FORM, first[0] >> FLAG_SHIFT
                if count == numel and form == DRAWN:
                    values = self._read_drawn(flag, data, numel, seed)
                    opened[i] = Sparse(numel, self.draw_positions(numel, values.size, seed), values)
                    continue
                values, used = self.unpack_values(flag, data, count, seed)
                read.append((i, count, form, data[used:], values))
            except FrameError as error:
                opened[i] = error
        if read:
            places, counts, forms, codes, sent_values = zip(*read, strict=True)
            rows = positions_format.unpack_rows(codes, counts, forms, numel)
            for i, row, sent in zip(places, rows, sent_values, strict=True):
                opened[i] = row if isinstance(row, FrameError) else Sparse(numel, row, sent)
        return opened

    def _encode_chunks(self, x: Tensor, size: int, seed: int, context: Context) -> bytes:
        if self.draws:
            return super()._encode_chunks(x, size, seed, context)

        def work(first: int, rows: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            (positions, counts), values = self.choose(rows, chunk_seeds(seed, first, len(rows)))
            starts = np.arange(first, first + len(rows)).repeat(counts) * size
            return positions.cpu().numpy() + starts, counts, values.cpu().numpy()

        found = starmap(work, stack_chunks(x, size))
        if not sum(counts.sum() for _, counts, _ in found):
            return varint(0)
        positions, counts, values = map(np.concatenate, zip(*found, strict=True))
        form, code = positions_format.pack(positions, x.numel())
        some = np.flatnonzero(counts)
        seeds = [(seed + i) % SEEDS for i in some.tolist()]
        flag, sent = self.pack_chunks(values, counts[some], seeds, context)
        head = varint(positions.size) + bytes([form | flag << FLAG_SHIFT])
        return b"".join([head, varint(len(code)), code, sent])

    def _decode_chunks(self, data: memoryview, numel: int, size: int, seed: int) -> Update:
        if self.draws:
            return super()._decode_chunks(data, numel, size, seed)
        count, start = read_varint(data)
        if not count:
            expect(len(data) == start, "more bytes follow, although no coordinates are selected")
            return Sparse.zero(numel)
        expect(count <= numel, f"{count} coordinates are selected, but the vector has {numel}")
        first, rest = take(data[start:], 1)
        length, start = read_varint(rest)
        code, rest = take(rest[start:], length)
        positions = positions_format.unpack(code, count, first[0] & FORM, numel)
        some, counts = np.unique(positions // size, return_counts=True)
        seeds = [(seed + i) % SEEDS for i in some.tolist()]
        flag = first[0] >> FLAG_SHIFT
        return Sparse(numel, positions, self.unpack_chunks(flag, rest, counts, seeds))

    def pack_chunks(
        self, values: np.ndarray, counts: np.ndarray, seeds: Sequence[int], context: Context
    ) -> tuple[int, bytes]:
        """Encode the values of m chunks. Return the flag of the joint body, and the encoded values.

        If the flag is 0, the encoded values begin with a flag for each chunk. `counts` [m]: the number of values of each chunk, at least 1.
        """
        flags, sent = zip(*self.pack_values(values, counts, seeds, context), strict=True)
        bits = np.unpackbits(np.array(flags, np.uint8)[:, None], axis=1)[:, -FLAG_BITS:]
        return 0, kernels.pack_signs(bits) + b"".join(sent)

    def unpack_chunks(
        self, flag: int, data: memoryview, counts: np.ndarray, seeds: Sequence[int]
    ) -> np.ndarray:
        """Decode the values of m chunks into a float32 array. `counts`: see `pack_chunks`.

        Raises FrameError unless `data` contains exactly these values.
        """
        expect(flag == 0, f"the values of the chunks have the unknown format {flag}")
        head, rest = take(data, -(-FLAG_BITS * len(counts) // 8))
        bits = kernels.unpack_signs(head, FLAG_BITS * len(counts)).reshape(-1, FLAG_BITS)
        flags = bits @ (2, 1)
        runs = []
        for flag, count, seed in zip(flags.tolist(), counts.tolist(), seeds, strict=True):
            values, used = self.unpack_values(flag, rest, count, seed)
            runs.append(values)
            rest = rest[used:]
        expect(not len(rest), f"{len(rest)} bytes follow the values of the last chunk")
        return np.concatenate(runs)

    def _read_drawn(self, flag: int, data: memoryview, numel: int, seed: int) -> np.ndarray:
        """Decode the values of a vector [numel] at positions that are drawn from the seed. Raises FrameError."""
        count, start = read_varint(data)
        expect(0 < count <= numel, f"{count} values are encoded for {numel} coordinates")
        values, used = self.unpack_values(flag, data[start:], count, seed)
        expect(start + used == len(data), "bytes follow the last value")
        return values


@dataclass(frozen=True)
class DensityCodec(Selective):
    """A codec that sends at most k = max(1, floor(density · n + ½)) of n coordinates."""

    density: float  # fraction of the coordinates sent

    def __post_init__(self) -> None:
        check_density(self.density)

    def count(self, numel: int) -> int:
        """Return k, the number of coordinates to send for a vector [numel]."""
        return count_at_density(self.density, numel)

    def max_count(self, numel: int) -> int:
        return self.count(numel)

    @abstractmethod
    def value_bytes(self, count: int) -> int:
        """Return an upper bound of the number of bytes of `count` values encoded by `pack_values`."""


@dataclass(frozen=True)
class Largest(DensityCodec):
    """A codec that sends the k coordinates with the largest magnitudes.

    Among equal magnitudes, those at lower positions are selected first.
    """

    def longest_section(self, numel: int) -> int:
        k = self.count(numel)
        b = rice.parameter(k, numel)
        # A Rice code with the parameter b takes b + 1 bits for each of the k positions, plus at most (numel − k) >> b bits in total.
        gaps = (k * (b + 1) + ((numel - k) >> b) + 7) // 8
        return len(varint(k)) + 2 + self.value_bytes(k) + gaps

    def select(self, rows: Rows, seeds: Sequence[int]) -> Chosen:
        return kernels.top_k(rows, self.count(rows[0].numel()))


def check_density(density: float) -> None:
    """Raise SpecError unless the density is above 0 and at most 1."""
    if not 0 < density <= 1:
        raise SpecError("density must be in (0, 1]; try density=1%")


def count_at_density(density: float, numel: int) -> int:
    """Return how many coordinates of a vector [numel] are sent at this density: at least one, unless numel is 0."""
    return min(numel, max(1, math.floor(density * numel + 0.5)))


def _section(count: int, form: int, flag: int, first: bytes, second: bytes) -> Section:
    return Section(count, b"".join([bytes([form | flag << FLAG_SHIFT]), first, second]))


def take(data: memoryview, length: int) -> tuple[memoryview, memoryview]:
    """Split `data` into its first `length` bytes and the rest. Raises FrameError if `data` is shorter."""
    expect(len(data) >= length, "the encoded values end too early")
    return data[:length], data[length:]


def pack_means(values: np.ndarray, counts: np.ndarray) -> list[bytes]:
    """Return the mean magnitude of each of m consecutive runs of values, encoded as float32. `counts` [m]: lengths of the runs."""
    packed = kernels.means(np.abs(values), counts).astype("<f4").tobytes()
    return [packed[at : at + MEAN.size] for at in range(0, len(packed), MEAN.size)]


def unpack_magnitude(data: memoryview) -> float:
    """Decode the magnitude that all values of a section share. Raises FrameError unless the magnitude is finite and positive."""
    (mean,) = MEAN.unpack(data)
    is_valid = 0 < mean < math.inf
    expect(is_valid, f"the magnitude of the values is {mean}; expected a finite number above 0")
    return mean
