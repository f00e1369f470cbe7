"""The frame: a header and one or more sections. docs/reference/frame-format.md specifies every byte.

The header contains a number, the scope, which says what the sections encode:

    scope 0: one section for the whole vector
    scope 1 (@layer): one section for each tensor
    scope 2 (@chunk=N): one section for all chunks of N coordinates

A section consists of a coordinate count and a body. The coordinate count is the number of encoded coordinates, such as k for top-k. The
codec defines the format of the body. With scope 2, the section has the chunk size N instead of a coordinate count. The header does not
contain the size of the vector, which the receiver must know. The checksum in the header includes this size, so it does not match if the
receiver expects another size. The checksum detects accidental damage; it does not authenticate the sender. A frame usually has 10 to 24
bytes besides the bodies. With scope 1, each section has 2 to 8 more bytes, for its length and its coordinate count.
"""

import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..errors import FrameError
from ..layout import Entry, Layout
from ..messages import skips_checksums

MAGIC, VERSION = b"fc", 1
MODEL, LAYER, CHUNK = 0, 1, 2
SCOPES = {MODEL: "@model", LAYER: "@layer", CHUNK: "@chunk"}  # names in error messages
HEAD, CRC, SEED = struct.Struct("<2sBBB"), struct.Struct("<I"), struct.Struct("<Q")
FACTOR = struct.Struct("<f")  # the factor in a decay frame (see `wrap_decay`)
# Offsets in bytes of the scope, and of the data after the checksum
SCOPE, SECTIONS = 4, HEAD.size + CRC.size

# Codec ids of frames that are not written by a single codec: products of two codecs (codecs/product.py), overwrite frames
# (codecs/overwrite.py) and decay frames (`wrap_decay`).
PRODUCT, OVERWRITE, DECAY = 100, 250, 251
# Names of all registered codecs by id.
NAMES = {PRODUCT: "product", OVERWRITE: "overwrite", DECAY: "decay"}


class ProductId(int):
    """The codec id of a product of two codecs. It equals PRODUCT. The attribute `halves` contains the ids of the two codecs."""

    halves: bytes

    def __new__(cls, first: int, second: int) -> "ProductId":
        made = super().__new__(cls, PRODUCT)
        made.halves = bytes([first, second])
        return made

    def __getnewargs__(self) -> tuple[int, int]:
        return self.halves[0], self.halves[1]


# Takes the place of a tensor's layout entry for a section that encodes a whole vector (scope 0 or 2)
WHOLE = Entry("", (), -1)


class Section(NamedTuple):
    """The output of a codec for one vector or tensor: the number of encoded coordinates, and the encoded bytes."""

    count: int
    body: bytes | memoryview


EMPTY = Section(0, b"")


def seal(
    codec: int, scope: int, numel: int, sections: Sequence[Section], seed: int | None = None
) -> bytes:
    """Assemble a frame for a vector [numel] from its sections. `seed` is None if decoding does not need the seed."""
    parts: list[bytes | memoryview] = [_halves(codec)]
    if seed is not None:
        parts.append(SEED.pack(seed % 2**64))
    for section in sections:
        parts += with_length(section) if scope == LAYER else [varint(section.count), section.body]
    head, crc = _head(codec, scope, numel)
    for part in parts:
        crc = zlib.crc32(part, crc)
    return b"".join([head, CRC.pack(crc), *parts])


def with_length(section: Section) -> list[bytes | memoryview]:
    """Encode a section as three parts: the number of bytes that follow, the coordinate count, and the body."""
    head = varint(section.count)
    return [varint(len(head) + len(section.body)), head, section.body]


def header_bytes(codec: int, seeded: bool) -> int:
    """Return the size in bytes of the header of a frame."""
    return SECTIONS + len(_halves(codec)) + (SEED.size if seeded else 0)


def unseal(
    data: bytes,
    codec: int,
    numel: int,
    layout: Layout | None = None,
    seeded: bool = False,
    chunk: int = 0,
) -> tuple[int, list[tuple[Entry, Section]]]:
    """Parse a frame and return its seed and its sections, each with the layout entry of its tensor.

    The seed is 0 unless `seeded` is true. With scope 0 (whole vector) or 2 (chunks), the entry of the only section is WHOLE. For a codec
    with @chunk=N, give N as `chunk`. Raises FrameError unless `data` is exactly one frame of `codec` for a vector [numel], and its sections
    match `layout`.
    """
    view = memoryview(data)
    scope = _check_head(view, codec, numel)
    if layout is not None and layout.numel != numel:
        raise FrameError(
            f"the layout has {layout.numel} elements, but the vector has {numel}; give the layout of the vector's model"
        )
    expected, start = _halves(codec), header_bytes(codec, seeded)
    halves = bytes(view[SECTIONS : SECTIONS + len(expected)])
    require(
        halves == expected,
        f"the frame was encoded with {_product(halves)}, but is decoded with {_product(expected)}; both sides need the same codecs",
    )
    expect(len(view) >= start, "the seed is incomplete")
    seed = SEED.unpack_from(view, start - SEED.size)[0] if seeded else 0
    if scope == CHUNK or chunk:
        return seed, [(WHOLE, _chunks(view[start:], scope, numel, chunk))]
    if scope == MODEL:
        return seed, [(WHOLE, read_section(view[start:], numel))]
    expect(scope == LAYER, f"the scope {scope} is unknown; expected 0, 1 or 2")
    if layout is None:
        raise FrameError(
            "a frame with one section per tensor cannot be decoded without the shapes of the tensors; give layout=fedcomp.Layout.of(model)"
        )
    return seed, _sections(view[start:], layout)


def _check_head(view: memoryview, codec: int, numel: int) -> int:
    """Check the magic bytes, version, codec and checksum of a frame. Return its scope. Raises FrameError."""
    expect(len(view) >= SECTIONS, f"{len(view)} bytes are too short for a frame")
    magic, version, found, scope = HEAD.unpack_from(view)
    require(magic == MAGIC, "not a fedcomp frame: it does not start with the magic bytes")
    require(
        version == VERSION,
        f"this version of fedcomp does not know frame format {version}; both sides need the same version of fedcomp",
    )
    require(
        found == codec,
        f"the frame was encoded with {_title(found)}, but is decoded with {_title(codec)}; both sides need the same codec",
    )
    (checksum,) = CRC.unpack_from(view, HEAD.size)
    _, crc = _head(found, scope, numel)
    require(
        skips_checksums() or checksum == zlib.crc32(view[SECTIONS:], crc),
        f"the checksum does not match: the frame is damaged, or is for a vector whose size is not {numel}",
    )
    return scope


def _sections(rest: memoryview, layout: Layout) -> list[tuple[Entry, Section]]:
    sections = []
    for entry in layout:
        try:
            section, rest = take_section(rest, entry.numel, f"the data of tensor '{entry.name}'")
        except FrameError as error:
            raise in_tensor(error, entry) from error
        sections.append((entry, section))
    expect(not len(rest), f"{len(rest)} bytes follow the data of the last tensor")
    return sections


def in_tensor(error: FrameError, entry: Entry) -> FrameError:
    """Return a copy of the error whose message also names the tensor, and advises giving the layout of the sender's model."""
    return FrameError(f"{error} (tensor '{entry.name}'; give the layout of the sender's model)")


def _chunks(rest: memoryview, scope: int, numel: int, chunk: int) -> Section:
    require(
        scope == CHUNK and chunk > 0,
        f"the frame has the scope {SCOPES.get(scope, scope)}, but the codec that decodes it has "
        f"{f'@chunk={chunk}' if chunk else 'no @chunk'}; both sides need the same scope",
    )
    size, start = read_varint(rest)
    require(
        size == chunk,
        f"the frame has @chunk={size}, but the codec that decodes it has @chunk={chunk}; both sides need the same chunk size",
    )
    expect(
        numel > 0 or start == len(rest),
        f"{len(rest) - start} bytes follow the chunk size, although the vector is empty",
    )
    return Section(size, rest[start:])


def take_section(rest: memoryview, numel: int, name: str) -> tuple[Section, memoryview]:
    """Split `rest` into a section, whose length in bytes comes first, and the remaining bytes. Raises FrameError."""
    length, start = read_varint(rest)
    expect(length <= len(rest) - start, f"{name} ends too early")
    return read_section(rest[start : start + length], numel), rest[start + length :]


def read_section(data: memoryview, numel: int) -> Section:
    """Parse the section of a vector [numel]: the coordinate count and the body.

    Raises FrameError if the coordinate count is larger than numel, or is 0 although a body follows.
    """
    count, start = read_varint(data)
    expect(count <= numel, f"{count} coordinates are encoded, but the vector has {numel}")
    fits = count > 0 or start == len(data)
    expect(fits, "bytes follow the coordinate count, although it is 0")
    return Section(count, data[start:])


@lru_cache(1024)
def _head(codec: int, scope: int, numel: int) -> tuple[bytes, int]:
    """Return the header bytes before the checksum, and the CRC-32 of these bytes and of numel."""
    head = HEAD.pack(MAGIC, VERSION, codec, scope)
    return head, zlib.crc32(struct.pack("<Q", numel), zlib.crc32(head))


def _halves(codec: int) -> bytes:
    return codec.halves if isinstance(codec, ProductId) else b""


def _product(halves: bytes) -> str:
    return "+".join(map(_name, halves)) or "no codecs"


def _title(codec: int) -> str:
    return "a product of two codecs" if codec == PRODUCT else f"the codec {_name(codec)}"


def _name(codec: int) -> str:
    return NAMES.get(codec, f"number {codec}")


def claimed_size(data: bytes, seeded: bool = False) -> tuple[int, Layout]:
    """Return the sum of the coordinate counts in a frame of a linear codec, and a layout with one tensor per count.

    The sum is the size of the frame's vector. The frame can be invalid, because `Codec.merge` calls this function before `unseal`, which
    checks the frame.
    """
    view = memoryview(data)
    expect(len(view) >= SECTIONS, f"{len(view)} bytes are too short for a frame")
    rest, counts = view[SECTIONS + (SEED.size if seeded else 0) :], []
    if view[SCOPE] == CHUNK:
        rest = rest[read_varint(rest)[1] :]
    if view[SCOPE] == MODEL:
        counts.append(read_varint(rest)[0])
    while len(rest) and view[SCOPE] != MODEL:
        length, start = read_varint(rest)
        counts.append(read_varint(rest[start : start + length])[0])
        rest = rest[start + length :]
    expect(sum(counts) < 2**63, "the claimed number of coordinates is too large")
    layout = Layout.from_shapes({str(i): (count,) for i, count in enumerate(counts)})
    return layout.numel, layout


def require(condition: bool, message: str) -> None:
    """Raise FrameError with the given message unless `condition` is true."""
    if not condition:
        raise FrameError(message)


def expect(condition: bool, message: str) -> None:
    """Raise FrameError with the message "damaged frame: " and `message` unless `condition` is true."""
    if not condition:
        raise FrameError(f"damaged frame: {message}")


def varint(value: int) -> bytes:
    """Return a non-negative integer as LEB128: 7 bits per byte, the lowest first. The high bit of a byte is 1 if more bytes follow."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: memoryview) -> tuple[int, int]:
    """Read the LEB128 integer at the start of `data`. Return the integer and its number of bytes.

    Raises FrameError unless the integer is below 2⁶³ and encoded in as few bytes as possible.
    """
    value = length = 0
    for byte in data[:9]:
        value |= (byte & 0x7F) << 7 * length
        length += 1
        if byte < 0x80:
            expect(byte > 0 or length == 1, "an integer is not encoded in its shortest form")
            return value, length
    raise FrameError("damaged frame: an integer is incomplete or too large")


def wrap_decay(factor: float, step: bytes, numel: int) -> bytes:
    """Return a decay frame: the receiver multiplies its weights [numel] by `factor` and then adds the update in the frame `step`.

    `factor`: from 0 to 1. If it is 1, return `step` itself.
    """
    if factor == 1:
        return step
    return seal(DECAY, MODEL, numel, [Section(numel, FACTOR.pack(factor) + step)])


def unwrap_decay(data: bytes, numel: int) -> tuple[float, bytes]:
    """Split a broadcast frame of the server into the decay factor and the frame of the update.

    If the broadcast is not a decay frame, return the factor 1 and the broadcast. Raises FrameError for an invalid decay frame.
    """
    if data[:SCOPE] != bytes([*MAGIC, VERSION, DECAY]):
        return 1.0, data
    _, ((_, (count, body)),) = unseal(data, DECAY, numel)
    require(
        count == numel,
        f"the broadcast is for a model of {count} weights, but the client's model has {numel}; server and client need the same model",
    )
    expect(len(body) >= FACTOR.size, "the weight decay factor is incomplete")
    (factor,) = FACTOR.unpack_from(body)
    valid = 0 <= factor < 1
    expect(valid, f"the weight decay factor is {factor:g}; expected at least 0 and below 1")
    return factor, bytes(body[FACTOR.size :])
