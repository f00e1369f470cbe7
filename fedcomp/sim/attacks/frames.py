"""Frames as an attacker can write them: byte by byte, with any checksum."""

import struct
import zlib

import numpy as np

from ...codecs import Codec
from ...codecs.frame import (
    CRC,
    HEAD,
    MAGIC,
    SECTIONS,
    VERSION,
    Section,
    claimed_size,
    header_bytes,
    seal,
    unseal,
)
from ...codecs.identity import Identity
from ...errors import FrameError
from ...layout import Layout


def resealed(frame: bytes, numel: int) -> bytes:
    """Return a frame with the checksum of a frame for a vector [numel]."""
    head, rest = frame[: HEAD.size], frame[SECTIONS:]
    return (
        head
        + CRC.pack(zlib.crc32(rest, zlib.crc32(struct.pack("<Q", numel), zlib.crc32(head))))
        + rest
    )


def of_floats(frame: bytes, number: float, most: int) -> bytes:
    """Return a frame of codec `identity` of the same size whose coordinates are all `number`.

    Raises FrameError for bytes that are no frame of at most `most` coordinates.
    """
    numel, _ = claimed_size(frame)
    if not frame.startswith(MAGIC + bytes([VERSION])) or numel > most:
        raise FrameError("not a frame of numbers")
    return seal(Identity.id, 0, numel, [Section(numel, struct.pack("<f", number) * numel)])


def with_numbers(frame: bytes, twin: bytes, codec: Codec, layout: Layout, number: float) -> bytes:
    """Return a frame of `codec` with `number` in place of every float32 that is twice as large in `twin`, the frame of the doubled vector.

    If the codec writes no float32, all bits of the bodies of its sections are set, which is NaN in every floating-point format.
    """
    start = header_bytes(codec.id, codec.seeded)
    places = doubled(frame, twin, start)
    if not places:
        return _of_ones(frame, codec, layout)
    changed = bytearray(frame)
    for place in places:
        struct.pack_into("<f", changed, place, number)
    return resealed(bytes(changed), layout.numel)


def doubled(frame: bytes, twin: bytes, start: int) -> list[int]:
    """Return the offsets from `start` on, at least four bytes apart, of the float32 values that are twice as large in `twin`."""
    if len(frame) != len(twin) or len(frame) - start < 4:
        return []
    values, others = (
        np.lib.stride_tricks.sliding_window_view(np.frombuffer(f, np.uint8)[start:], 4)
        .copy()
        .view("<f4")[:, 0]
        for f in (frame, twin)
    )
    with np.errstate(over="ignore", invalid="ignore"):
        found = np.flatnonzero((values != 0) & np.isfinite(values) & (others == 2 * values))
    places: list[int] = []
    for place in found.tolist():
        if not places or place + start >= places[-1] + 4:
            places.append(place + start)
    return places


def _of_ones(frame: bytes, codec: Codec, layout: Layout) -> bytes:
    seed, sections = unseal(frame, codec.id, layout.numel, layout, codec.seeded, codec.chunk)
    ones = [Section(section.count, b"\xff" * len(section.body)) for _, section in sections]
    return seal(codec.id, codec.scope, layout.numel, ones, seed if codec.seeded else None)
