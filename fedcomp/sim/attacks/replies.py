"""Attacks that change a client's report (its answer to the server): NaN or infinity, malformed frames, or no answer.

The attack replaces the client's frame (encoded update) and computes the ticket (digest) of the new frame. If the server accepts the new
frame, the server confirms the new ticket. The client's error feedback knows only the ticket of the honest frame, and treats the honest
frame as lost.
"""

import struct
import zlib
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import numpy as np
import torch

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
from ...errors import FedcompError, FrameError
from ...layout import Layout
from ...messages import Report, ticket
from .base import Attack, ReplyContext

# Maps values of the option `value` of the attack infinity to numbers.
NUMBERS = {"nan": float("nan"), "inf": float("inf"), "largest": float(np.finfo(np.float32).max)}
# Values of the option `how` of the attack malformed.
KINDS = ("garbage", "truncated", "size", "checksum", "body")


@dataclass(frozen=True)
class Infinity(Attack):
    """Send frames with NaN, infinity or the largest float32.

    NaN and infinity are written into an encoded frame, since codecs refuse to encode them.
    """

    value: Literal["nan", "inf", "largest"] = "nan"

    name: ClassVar[str] = "infinity"
    source: ClassVar[str] = "Blanchard 2017"

    def reply(self, report: Report, context: ReplyContext) -> Report:
        return _with_frame(report, self._frame(report.frame, context))

    def _frame(self, honest: bytes, context: ReplyContext) -> bytes:
        number, codec = NUMBERS[self.value], context.codec
        if honest and not honest.startswith(MAGIC + bytes([VERSION, codec.id])):
            try:
                return constant_frame(honest, number, max(context.numel, len(honest)))
            except FrameError:  # `honest` is not a frame but, for example, a sealed ballot
                return context.generator.bytes(len(honest))
        x = torch.from_numpy(context.generator.standard_normal(context.numel, np.float32))
        encoded = partial(
            codec.encode, seed=context.seed, layout=context.layout, context=context.codec_context
        )
        try:
            if self.value == "largest":
                return encoded(x.sign().mul_(number))
            return replace_floats(encoded(x), encoded(2 * x), codec, context.layout, number)
        except FedcompError:  # this codec cannot encode without error feedback
            return with_checksum(honest[:9] + b"\xff" * (len(honest) - 9), context.numel)


@dataclass(frozen=True)
class Malformed(Attack):
    """Send malformed frames.

    The kinds are random bytes (`garbage`), a frame that is cut off (`truncated`), a frame for a vector of another size (`size`), a wrong
    checksum (`checksum`), and random bytes with a valid header and checksum (`body`).
    """

    # Kind of the malformed frame; "any": a random kind in each round.
    how: Literal["any", "garbage", "truncated", "size", "checksum", "body"] = "any"

    name: ClassVar[str] = "malformed"

    def reply(self, report: Report, context: ReplyContext) -> Report:
        frame, g = report.frame or b"fc\x01\x01\x00" + bytes(4), context.generator
        how = KINDS[g.integers(len(KINDS))] if self.how == "any" else self.how
        if how == "truncated":
            frame = frame[: g.integers(1, len(frame))]
        elif how == "size":
            frame = with_checksum(frame, context.numel + 1)
        elif how == "checksum":
            frame = frame[:5] + bytes(255 - byte for byte in frame[5:9]) + frame[9:]
        elif how == "body":
            frame = with_checksum(frame[:9] + g.bytes(len(frame) - 9), context.numel)
        else:
            frame = g.bytes(len(frame))
        return _with_frame(report, frame)


@dataclass(frozen=True)
class Abstention(Attack):
    """Send no answer in randomly drawn rounds."""

    share: float = 1.0  # probability that a client does not answer in a round

    name: ClassVar[str] = "abstention"

    def silence_reason(self, generator: np.random.Generator) -> str:
        return "no answer: this client abstains" if generator.random() < self.share else ""


def _with_frame(report: Report, frame: bytes) -> Report:
    return replace(report, frame=frame, ticket=ticket(report.round, report.client, frame))


def with_checksum(frame: bytes, numel: int) -> bytes:
    """Return `frame` with a valid checksum for a vector of `numel` elements."""
    head, rest = frame[: HEAD.size], frame[SECTIONS:]
    checksum = zlib.crc32(rest, zlib.crc32(struct.pack("<Q", numel), zlib.crc32(head)))
    return head + CRC.pack(checksum) + rest


def constant_frame(frame: bytes, value: float, max_numel: int) -> bytes:
    """Return a frame of the codec `identity` for a vector of the same size as that of `frame`, with all coordinates equal to `value`.

    Raises FrameError if the header of `frame` is malformed or states more than `max_numel` coordinates.
    """
    numel, _ = claimed_size(frame)
    if not frame.startswith(MAGIC + bytes([VERSION])) or numel > max_numel:
        raise FrameError(
            "the bytes are not a frame of this version of fedcomp, or the frame is for a vector that is too large"
        )
    return seal(Identity.id, 0, numel, [Section(numel, struct.pack("<f", value) * numel)])


def replace_floats(
    frame: bytes, doubled: bytes, codec: Codec, layout: Layout, value: float
) -> bytes:
    """Return `frame`, which `codec` encoded, with `value` in place of every float32.

    `doubled` is the frame of the same vector times 2. Bytes that are a float32 in `frame`, and twice that float32 in `doubled`, are
    replaced. If there are none, all bits after the header are set, since a number of any floating-point format is NaN if all its bits are
    set.
    """
    start = header_bytes(codec.id, codec.seeded)
    offsets = doubled_offsets(frame, doubled, start)
    if not offsets:
        seed, sections = unseal(frame, codec.id, layout.numel, layout, codec.seeded, codec.chunk)
        ones = [Section(section.count, b"\xff" * len(section.body)) for _, section in sections]
        return seal(codec.id, codec.scope, layout.numel, ones, seed if codec.seeded else None)
    changed = bytearray(frame)
    for offset in offsets:
        struct.pack_into("<f", changed, offset, value)
    return with_checksum(bytes(changed), layout.numel)


def doubled_offsets(frame: bytes, doubled: bytes, start: int) -> list[int]:
    """Return the byte offsets of the float32 values in `frame` that are twice as large in `doubled`.

    The offsets are at least `start`, and at least four bytes apart.
    """
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
