"""Equivocation: send some voters another ballot than the others.

With sealed ballots (docs/explanation/elections.md), a sender signs one hash and one ciphertext. All it can do is wrap, for some voters, a
key that does not open the ballot. These voters prove it, and the sender is named and left out. Without sealed ballots all voters get the
same ballot, and the client is honest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from cryptography.hazmat.primitives.asymmetric import ec

from ...messages import Report, ticket
from ...privacy.ballots import HEAD, KEY, TAG, WRAP, Slot, sign, signed_text
from ...strategies.local_election import BALLOTS
from ...strategies.sealed_client import SealedElectionClient
from .base import Attack, Sender


@dataclass(frozen=True)
class Equivocation(Attack):
    share: float = 0.5  # of the voters, which get a key that opens nothing

    name: ClassVar[str] = "equivocation"
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {"share": (1e-9, 1)}

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
    """Return a sealed ballot whose wraps at the positions `deceived` are noise, with a valid signature."""
    point, held, _, count = HEAD.unpack_from(data)
    end = HEAD.size + count * WRAP.size
    wraps = list(WRAP.iter_unpack(data[HEAD.size : end]))
    for place in deceived:
        wraps[place] = *wraps[place][:2], noise(KEY + TAG)
    packed = b"".join(WRAP.pack(*wrap) for wrap in wraps)
    signature = sign(key, signed_text(slot, held, point, packed, data[end:]))
    return HEAD.pack(point, held, signature, count) + packed + data[end:]
