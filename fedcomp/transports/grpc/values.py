"""The encoding of values in gRPC messages. A message is sent as the fields that differ from a base message that both sides know."""

import itertools
import re
import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from ...codecs.frame import varint
from ...errors import ProtocolError
from ...messages import (
    DENSE,
    FAILED,
    FRAMES,
    NEED_DENSE,
    OVERWRITE,
    TRAIN,
    UP_TO_DATE,
    UPDATE,
    fields_of,
)

STAGES = "phase", "download", "encode"
WORDS = (TRAIN, UP_TO_DATE, FRAMES, OVERWRITE, DENSE, UPDATE, NEED_DENSE, FAILED, *STAGES)
HEX = re.compile(r"(?:[0-9a-f]{2})+")
DOUBLE = struct.Struct("<d")
# Encodings of a text. WORD: the text is sent as its index in WORDS.
UTF8, HEX_BYTES, WORD, DEFLATED = 0, 1, 2, 3
MIN_DEFLATE_BYTES = 128  # smallest size in UTF-8 of a text that is compressed (DEFLATED)
MAX_TEXT_BYTES = 1 << 20  # largest size of a compressed text after decompression
M = TypeVar("M")


def encode_int(value: int) -> bytes:
    if not -(1 << 63) <= value < 1 << 63:
        raise ProtocolError(f"the number {value} does not fit into 64 bits")
    return varint(value << 1 if value >= 0 else (-value << 1) - 1)


def encode_text(text: str) -> bytes:
    if text in WORDS:
        return varint(WORDS.index(text) << 2 | WORD)
    if HEX.fullmatch(text):
        data, encoding = bytes.fromhex(text), HEX_BYTES
    else:
        try:
            data, encoding = text.encode(), UTF8
        except UnicodeEncodeError as error:
            raise ProtocolError(f"the text {text[:40]!r} is not valid Unicode") from error
        if MIN_DEFLATE_BYTES <= len(data) <= MAX_TEXT_BYTES:
            deflated = zlib.compress(data, 9, -15)
            if len(deflated) < len(data):
                data, encoding = deflated, DEFLATED
    return varint(len(data) << 2 | encoding) + data


def encode_blob(*pieces: bytes) -> list[bytes]:
    return [varint(sum(map(len, pieces))), *pieces]


def _encode_blobs(blobs: Sequence[bytes]) -> list[bytes]:
    return [varint(len(blobs)), *itertools.chain.from_iterable(map(encode_blob, blobs))]


class Reader:
    """A sequential reader of the values in one or more byte strings (pieces). A value that fills a whole piece is not copied.

    The methods raise ProtocolError if the bytes end too early or are malformed.
    """

    def __init__(self, *pieces: bytes):
        self.pieces, self.at = deque(pieces), 0  # `at`: read position in the first piece
        self.remaining = sum(map(len, pieces))  # bytes

    def varint(self) -> int:
        value = shift = 0
        while True:
            (byte,) = self.take(1)
            value |= (byte & 0x7F) << shift
            if value >= 1 << 64 or (byte == 0 and shift):
                raise ProtocolError("a number has more than 64 bits or more bytes than it needs")
            if byte < 0x80:
                return value
            shift += 7

    def signed(self) -> int:
        value = self.varint()
        return -(value + 1 >> 1) if value & 1 else value >> 1

    def double(self) -> float:
        return DOUBLE.unpack(self.take(DOUBLE.size))[0]

    def take(self, length: int) -> bytes:
        if length > self.remaining:
            raise ProtocolError(f"a message ends {length - self.remaining} bytes too early")
        self.remaining -= length
        parts: list[bytes] = []
        while length:
            if self.at == len(self.pieces[0]):
                self.pieces.popleft()
                self.at = 0
            parts.append(self.pieces[0][self.at : self.at + length])
            self.at += len(parts[-1])
            length -= len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def rest(self) -> bytes:
        return self.take(self.remaining)

    def blob(self) -> bytes:
        return self.take(self.varint())

    def count(self) -> int:
        """Read the number of entries of a list. Raises ProtocolError if there are fewer bytes left than entries."""
        count = self.varint()
        if count > self.remaining:
            raise ProtocolError(
                f"a list claims {count} entries, but its message has only {self.remaining} bytes left"
            )
        return count

    def blobs(self) -> list[bytes]:
        return [self.blob() for _ in range(self.count())]

    def text(self) -> str:
        code = self.varint()
        size, encoding = code >> 2, code & 3
        if encoding == WORD and size < len(WORDS):
            return WORDS[size]
        if encoding == HEX_BYTES:
            return self.take(size).hex()
        if encoding in (UTF8, DEFLATED):
            data = self.take(size)
            try:
                return (data if encoding == UTF8 else _inflated(data)).decode()
            except (UnicodeDecodeError, zlib.error) as error:
                raise ProtocolError(
                    "a text is not UTF-8, or its DEFLATE data is malformed"
                ) from error
        raise ProtocolError(
            f"a text in the message is word {size} of the protocol, which has only {len(WORDS)} words"
        )

    def end(self) -> None:
        """Raise ProtocolError if the message has unread bytes."""
        if self.remaining:
            raise ProtocolError(f"a message has {self.remaining} bytes too many")


def _inflated(data: bytes) -> bytes:
    stream = zlib.decompressobj(-15)
    text = stream.decompress(data, MAX_TEXT_BYTES)
    if not stream.eof or stream.unused_data:
        raise ProtocolError(
            f"a compressed text is incomplete, or longer than {MAX_TEXT_BYTES} bytes"
        )
    return text


# A message is a dataclass whose fields have the types in CODECS.


class FieldCodec(NamedTuple):
    """Functions that write and read values of one type."""

    write: Callable[[Any], list[bytes]]  # returns byte strings, without copying large values
    read: Callable[[Reader], Any]


CODECS: dict[Any, FieldCodec] = {
    int: FieldCodec(lambda value: [encode_int(value)], Reader.signed),
    float: FieldCodec(lambda value: [DOUBLE.pack(value)], Reader.double),
    str: FieldCodec(lambda value: [encode_text(value)], Reader.text),
    bytes: FieldCodec(encode_blob, Reader.blob),
    list[bytes]: FieldCodec(_encode_blobs, Reader.blobs),
}


def encode_fields(message: Any, base: Any) -> list[bytes]:
    """Encode a bit mask of the fields that differ from those of `base`, followed by the values of these fields."""
    mask, pieces = 0, [b""]
    for i, (name, kind) in enumerate(fields_of(type(message))):
        value, default = getattr(message, name), getattr(base, name)
        if value != default or kind is float and DOUBLE.pack(value) != DOUBLE.pack(default):
            mask |= 1 << i
            pieces += CODECS[kind].write(value)
    pieces[0] = varint(mask)
    return pieces


def decode_fields(base: M, reader: Reader) -> tuple[M, set[str]]:
    """Return the decoded message, and the names of its fields that were not sent. These fields have the values of `base`."""
    fields = fields_of(type(base))
    mask = reader.varint()
    if mask >> len(fields):
        raise ProtocolError(
            f"a message of type {type(base).__name__} has more than the known {len(fields)} fields; install the same version of fedcomp on "
            "both sides"
        )
    values, omitted = [], set()
    for i, (name, kind) in enumerate(fields):
        if mask >> i & 1:
            values.append(CODECS[kind].read(reader))
        else:
            value = getattr(base, name)
            values.append([*value] if kind == list[bytes] else value)
            omitted.add(name)
    reader.end()
    return type(base)(*values), omitted
