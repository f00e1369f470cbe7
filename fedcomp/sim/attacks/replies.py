"""Reports that no honest client sends: NaN and infinity, malformed frames, no answer.

A Byzantine client has the memory of an honest one, but replaces the proposed frame by another with its own ticket. If the server accepts
that frame, the next assignment names a proposal that the memory did not make, and the memory rolls back.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch

from ...codecs.frame import MAGIC, VERSION
from ...errors import FedcompError, FrameError
from ...messages import Report, ticket
from .base import Attack, ReplyContext
from .frames import constant_frame, replace_floats, with_checksum

NUMBERS = {"nan": float("nan"), "inf": float("inf"), "largest": float(np.finfo(np.float32).max)}
KINDS = ("garbage", "truncated", "size", "checksum", "body")


@dataclass(frozen=True)
class Infinity(Attack):
    """Frames with NaN, infinity or the largest float32, written byte by byte, since codecs do not encode these numbers."""

    value: Literal["nan", "inf", "largest"] = "nan"

    name: ClassVar[str] = "infinity"
    source: ClassVar[str] = "Blanchard 2017"

    def reply(self, report: Report, context: ReplyContext) -> Report:
        number = NUMBERS[self.value]
        of_codec = MAGIC + bytes([VERSION, context.codec.id])
        if report.frame and not report.frame.startswith(of_codec):
            return _with_frame(report, self._floats(report.frame, number, context))
        x = torch.from_numpy(context.generator.standard_normal(context.numel, np.float32))
        try:
            if self.value == "largest":
                return _with_frame(report, self._encoded(x.sign().mul_(number), context))
            frame, doubled = self._encoded(x, context), self._encoded(2 * x, context)
            return _with_frame(
                report, replace_floats(frame, doubled, context.codec, context.layout, number)
            )
        except FedcompError:  # the codec does not work without its memory
            return _with_frame(
                report,
                with_checksum(report.frame[:9] + b"\xff" * (len(report.frame) - 9), context.numel),
            )

    @staticmethod
    def _floats(frame: bytes, number: float, context: ReplyContext) -> bytes:
        """Return a frame whose floats are all `number`; noise if `frame` has other content, such as a sealed ballot."""
        try:
            return constant_frame(frame, number, max(context.numel, len(frame)))
        except FrameError:
            return context.generator.bytes(len(frame))

    @staticmethod
    def _encoded(x: torch.Tensor, context: ReplyContext) -> bytes:
        return context.codec.encode(
            x, seed=context.seed, layout=context.layout, context=context.codec_context
        )


@dataclass(frozen=True)
class Malformed(Attack):
    """Malformed frames: noise; a truncated frame, one of another size, or one with a wrong checksum; noise with a valid checksum."""

    # "any": drawn in each round
    how: Literal["any", "garbage", "truncated", "size", "checksum", "body"] = "any"

    name: ClassVar[str] = "malformed"

    def reply(self, report: Report, context: ReplyContext) -> Report:
        frame, g = report.frame or b"fc\x01\x01\x00" + bytes(4), context.generator
        how = KINDS[g.integers(len(KINDS))] if self.how == "any" else self.how
        if how == "truncated":
            return _with_frame(report, frame[: g.integers(1, len(frame))])
        if how == "size":
            return _with_frame(report, with_checksum(frame, context.numel + 1))
        if how == "checksum":
            return _with_frame(
                report, frame[:5] + bytes(255 - byte for byte in frame[5:9]) + frame[9:]
            )
        if how == "body":
            return _with_frame(
                report, with_checksum(frame[:9] + g.bytes(len(frame) - 9), context.numel)
            )
        return _with_frame(report, g.bytes(len(frame)))


@dataclass(frozen=True)
class Abstention(Attack):
    """No answer in a fraction of the rounds."""

    share: float = 1.0  # fraction of the rounds

    name: ClassVar[str] = "abstention"

    def silence_reason(self, generator: np.random.Generator) -> str:
        return "no answer: this client abstains" if generator.random() < self.share else ""


def _with_frame(report: Report, frame: bytes) -> Report:
    return replace(report, frame=frame, ticket=ticket(report.round, report.client, frame))
