"""Equivocation: another ballot for some voters than for the others.

Under sealed ballots (docs/ballots.md) a sender signs one hash and one ciphertext, so all that is left to it is to wrap a key for some
voters with which the ballot does not open. They prove it, it is named and left out. Where ballots are not sealed all voters are passed the
same one, and this liar is an honest client.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from cryptography.hazmat.primitives.asymmetric import ec

from ...errors import SpecError
from ...messages import Report, ticket
from ...privacy.ballots import HEAD, KEY, TAG, WRAP, Slot, sign, signed_text
from ...strategies.local_election import BALLOTS
from ...strategies.sealed_election import SealedElectionClient
from .base import Attack, Sender


@dataclass(frozen=True)
class Equivocation(Attack):
    share: float = 0.5  # of the voters, who get a key that opens nothing

    name: ClassVar[str] = "equivocation"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share <= 1:
            raise SpecError(f"share is {self.share:g}; give more than 0, at most 1")

    def reply(self, report: Report, sender: Sender) -> Report:
        if report.phase != BALLOTS or not isinstance(sender.algorithm, SealedElectionClient):
            return report
        count = HEAD.unpack_from(report.frame)[3]
        deceived = sender.generator.permutation(count)[: max(1, round(self.share * count))].tolist()
        slot = sender.algorithm.slot(sender.context, report.client)
        key = sender.algorithm.ring.signer(report.client)
        frame = crooked(report.frame, deceived, slot, key, sender.generator.bytes)
        return replace(report, frame=frame, ticket=ticket(report.round, report.client, frame))


def crooked(
    data: bytes,
    deceived: Sequence[int],
    slot: Slot,
    key: ec.EllipticCurvePrivateKey,
    noise: Callable[[int], bytes],
) -> bytes:
    """A sealed ballot whose wraps at these places are noise, under a good signature."""
    point, held, _, count = HEAD.unpack_from(data)
    end = HEAD.size + count * WRAP.size
    wraps = list(WRAP.iter_unpack(data[HEAD.size : end]))
    for place in deceived:
        wraps[place] = *wraps[place][:2], noise(KEY + TAG)
    packed = b"".join(WRAP.pack(*wrap) for wrap in wraps)
    signature = sign(key, signed_text(slot, held, point, packed, data[end:]))
    return HEAD.pack(point, held, signature, count) + packed + data[end:]
