"""The attack equivocation: send ballots (encoded signs of an update) that only some of the voters in an election can read.

With sealed (encrypted) ballots (docs/explanation/elections.md), a sender signs one hash and one ciphertext for all voters. The sender can
therefore not send different ballots to different voters, but can send some voters an encrypted key that does not decrypt the ballot. These
voters prove to the server that the key is invalid, and the server excludes the sender. Without sealed ballots, the server sends the same
ballot to all voters, and this attack has no effect.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from cryptography.hazmat.primitives.asymmetric import ec

from ...messages import Report, ticket
from ...privacy.ballots import HEAD, KEY, TAG, WRAP, Slot, sign, signed_text
from ...strategies.codes import BALLOTS
from ...strategies.sealed_election import SealedElectionClient
from .base import Attack, ReplyContext


@dataclass(frozen=True)
class Equivocation(Attack):
    share: float = 0.5  # fraction of the voters that receive an invalid key

    name: ClassVar[str] = "equivocation"
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {"share": (1e-9, 1)}

    def reply(self, report: Report, context: ReplyContext) -> Report:
        if report.phase != BALLOTS or not isinstance(context.algorithm, SealedElectionClient):
            return report
        count = HEAD.unpack_from(report.frame)[3]
        n_invalid = max(1, round(self.share * count))
        positions = context.generator.permutation(count)[:n_invalid].tolist()
        slot = context.algorithm.slot(context.codec_context, report.client)
        key = context.algorithm.ring.signer(report.client)
        frame = replace_wraps(report.frame, positions, slot, key, context.generator.bytes)
        return replace(report, frame=frame, ticket=ticket(report.round, report.client, frame))


def replace_wraps(
    data: bytes,
    positions: Sequence[int],
    slot: Slot,
    key: ec.EllipticCurvePrivateKey,
    noise: Callable[[int], bytes],
) -> bytes:
    """Return the sealed ballot `data`, signed again with `key`, with `noise(n)` (n random bytes) as the encrypted keys at `positions`."""
    point, commitment, _, count = HEAD.unpack_from(data)
    end = HEAD.size + count * WRAP.size
    wraps = list(WRAP.iter_unpack(data[HEAD.size : end]))
    for i in positions:
        wraps[i] = *wraps[i][:2], noise(KEY + TAG)
    packed = b"".join(WRAP.pack(*wrap) for wrap in wraps)
    signature = sign(key, signed_text(slot, commitment, point, packed, data[end:]))
    return HEAD.pack(point, commitment, signature, count) + packed + data[end:]
