"""Frames that an attacker writes byte by byte, with a valid checksum."""

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


def with_checksum(frame: bytes, numel: int) -> bytes:
    """Return a frame with a valid checksum for a vector [numel]."""
    head, rest = frame[: HEAD.size], frame[SECTIONS:]
    return (
        head
        + CRC.pack(zlib.crc32(rest, zlib.crc32(struct.pack("<Q", numel), zlib.crc32(head))))
        + rest
    )


def constant_frame(frame: bytes, value: float, max_numel: int) -> bytes:
    """Return a frame of codec `identity` for a vector of the same size whose coordinates are all `value`.

    Raises FrameError for bytes that are not a frame of at most `max_numel` coordinates.
    """
    numel, _ = claimed_size(frame)
    if not frame.startswith(MAGIC + bytes([VERSION])) or numel > max_numel:
        raise FrameError("not a frame of numbers")
    return seal(Identity.id, 0, numel, [Section(numel, struct.pack("<f", value) * numel)])


def replace_floats(
    frame: bytes, doubled: bytes, codec: Codec, layout: Layout, value: float
) -> bytes:
    """Return a frame of `codec` with `value` in place of every float32.

    `doubled`: the frame of the doubled vector, in which every float32 is twice as large. If the codec writes no float32, all bits of its
    sections are set, which is NaN in every floating-point format.
    """
    start = header_bytes(codec.id, codec.seeded)
    offsets = doubled_offsets(frame, doubled, start)
    if not offsets:
        return _with_all_bits_set(frame, codec, layout)
    changed = bytearray(frame)
    for offset in offsets:
        struct.pack_into("<f", changed, offset, value)
    return with_checksum(bytes(changed), layout.numel)


def doubled_offsets(frame: bytes, doubled: bytes, start: int) -> list[int]:
    """Return the offsets, from `start` on and at least four bytes apart, of float32 values that are twice as large in `doubled`."""
    if len(frame) != len(doubled) or len(frame) - start < 4:
        return []
    values, others = (
        np.lib.stride_tricks.sliding_window_view(np.frombuffer(f, np.uint8)[start:], 4)
        .copy()
        .view("<f4")[:, 0]
        for f in (frame, doubled)
    )
    with np.errstate(over="ignore", invalid="ignore"):
        candidates = np.flatnonzero((values != 0) & np.isfinite(values) & (others == 2 * values))
    offsets: list[int] = []
    for offset in candidates.tolist():
        if not offsets or offset + start >= offsets[-1] + 4:
            offsets.append(offset + start)
    return offsets


def _with_all_bits_set(frame: bytes, codec: Codec, layout: Layout) -> bytes:
    seed, sections = unseal(frame, codec.id, layout.numel, layout, codec.seeded, codec.chunk)
    ones = [Section(section.count, b"\xff" * len(section.body)) for _, section in sections]
    return seal(codec.id, codec.scope, layout.numel, ones, seed if codec.seeded else None)
