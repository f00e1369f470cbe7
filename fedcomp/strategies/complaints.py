"""Complaints about sealed ballots that do not open, and the proofs that follow from them. docs/ballots.md is the protocol.

A voter complains with the private half of its card, which opens this one ballot and no other. With the card and the ballot it is a proof
that anybody can check.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from cryptography.hazmat.primitives.asymmetric import ec

from ..errors import FrameError, ProtocolError
from ..privacy.ballots import CARD, KEY, Sealed, Slot, card_key

COUNT = struct.Struct("<H")  # number of complaints before a vote
COMPLAINT = struct.Struct(f"<q{KEY}s")  # sender, private half of the voter's card for it
PROOF = struct.Struct(
    f"<q{CARD}s{KEY}s"
)  # voter, its card and the private half; the ballot follows


@dataclass(frozen=True)
class Proof:
    """A ballot that does not open, with the card of a voter that it was sealed for and the card's private half."""

    voter: int
    card: bytes
    private: bytes
    ballot: bytes

    def pack(self) -> bytes:
        return PROOF.pack(self.voter, self.card, self.private) + self.ballot

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Raises ProtocolError."""
        if len(data) < PROOF.size:
            raise ProtocolError("a proof against a client is cut off")
        return cls(*PROOF.unpack_from(data), data[PROOF.size :])

    def holds(
        self, slot: Slot, voter: ec.EllipticCurvePublicKey, sender: ec.EllipticCurvePublicKey
    ) -> bool:
        """Return whether the ballot does not open. Raises ProtocolError for a card or a ballot that was not signed for this slot."""
        public = card_key(self.card, slot, self.voter, voter)
        return Sealed.read(self.ballot, slot, sender).proven_bad(self.voter, public, self.private)


def pack_complaints(complaints: Mapping[int, bytes]) -> bytes:
    """Return the head of a vote. `complaints`: by sender, the private half of the voter's card."""
    return COUNT.pack(len(complaints)) + b"".join(
        COMPLAINT.pack(sender, private) for sender, private in complaints.items()
    )


NO_COMPLAINTS = pack_complaints({})


def split_vote(frame: bytes) -> tuple[Sequence[tuple[int, bytes]], bytes]:
    """Return the complaints in an answer, (sender, private half of the voter's card), and the frame of the vote. Raises FrameError."""
    if len(frame) < COUNT.size:
        raise FrameError("a vote is cut off")
    (count,) = COUNT.unpack_from(frame)
    end = COUNT.size + count * COMPLAINT.size
    if len(frame) < end:
        raise FrameError("the complaints beside a vote are cut off")
    return list(COMPLAINT.iter_unpack(frame[COUNT.size : end])), frame[end:]
