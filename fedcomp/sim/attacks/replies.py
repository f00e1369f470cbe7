"""Reports that no honest client sends: NaN and infinity, bytes that are no frame, no answer at all.

A Byzantine client has the memory of an honest one, but sends another frame than the memory proposed, with a ticket of its own. If the
server accepts that frame, the next message names a proposal that the memory never made, and the memory rolls back.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch

from ...codecs.frame import MAGIC, VERSION
from ...errors import FedcompError, FrameError
from ...messages import Report, ticket
from .base import Attack, Sender
from .frames import of_floats, resealed, with_numbers

NUMBERS = {"nan": float("nan"), "inf": float("inf"), "largest": float(np.finfo(np.float32).max)}
KINDS = ("garbage", "truncated", "size", "checksum", "body")


@dataclass(frozen=True)
class Infinity(Attack):
    """NaN, infinity or the largest float32. The frames are written byte by byte, since codecs refuse to encode these numbers."""

    value: Literal["nan", "inf", "largest"] = "nan"

    name: ClassVar[str] = "infinity"
    source: ClassVar[str] = "Blanchard 2017"

    def reply(self, report: Report, sender: Sender) -> Report:
        number = NUMBERS[self.value]
        of_codec = MAGIC + bytes([VERSION, sender.codec.id])
        if report.frame and not report.frame.startswith(of_codec):
            return _with_frame(report, self._floats(report.frame, number, sender))
        x = torch.from_numpy(sender.generator.standard_normal(sender.numel, np.float32))
        try:
            if self.value == "largest":
                return _with_frame(report, self._encoded(x.sign().mul_(number), sender))
            frame, twin = self._encoded(x, sender), self._encoded(2 * x, sender)
            return _with_frame(
                report, with_numbers(frame, twin, sender.codec, sender.context.layout, number)
            )
        except FedcompError:  # the codec does not work without its memory
            return _with_frame(
                report, resealed(report.frame[:9] + b"\xff" * (len(report.frame) - 9), sender.numel)
            )

    @staticmethod
    def _floats(frame: bytes, number: float, sender: Sender) -> bytes:
        """Return a frame of floats that are all `number`; noise if `frame` holds something else, such as a sealed ballot."""
        try:
            return of_floats(frame, number, max(sender.numel, len(frame)))
        except FrameError:
            return sender.generator.bytes(len(frame))

    @staticmethod
    def _encoded(x: torch.Tensor, sender: Sender) -> bytes:
        return sender.codec.encode(
            x, seed=sender.seed, layout=sender.context.layout, context=sender.context
        )


@dataclass(frozen=True)
class Malformed(Attack):
    """Bytes that are no frame: noise; a frame that is cut short, of another size, or damaged; noise with a valid checksum."""

    # any: drawn in each round
    how: Literal["any", "garbage", "truncated", "size", "checksum", "body"] = "any"

    name: ClassVar[str] = "malformed"

    def reply(self, report: Report, sender: Sender) -> Report:
        frame, g = report.frame or b"fc\x01\x01\x00" + bytes(4), sender.generator
        how = KINDS[g.integers(len(KINDS))] if self.how == "any" else self.how
        if how == "truncated":
            return _with_frame(report, frame[: g.integers(1, len(frame))])
        if how == "size":
            return _with_frame(report, resealed(frame, sender.numel + 1))
        if how == "checksum":
            return _with_frame(
                report, frame[:5] + bytes(255 - byte for byte in frame[5:9]) + frame[9:]
            )
        if how == "body":
            return _with_frame(report, resealed(frame[:9] + g.bytes(len(frame) - 9), sender.numel))
        return _with_frame(report, g.bytes(len(frame)))


@dataclass(frozen=True)
class Abstention(Attack):
    """No answer, in a share of the rounds."""

    share: float = 1.0  # of the rounds

    name: ClassVar[str] = "abstention"

    def silent(self, generator: np.random.Generator) -> str:
        return "no answer: this client abstains" if generator.random() < self.share else ""


def _with_frame(report: Report, frame: bytes) -> Report:
    return replace(report, frame=frame, ticket=ticket(report.round, report.client, frame))
