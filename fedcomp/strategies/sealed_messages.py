"""Messages of elections with sealed ballots: announcements of the server and answers of clients.

sealed_election.py has a glossary. A voter complains about a ballot that does not open by revealing the private key of its card, which opens
this one ballot and no other. Together with the card and the ballot, the key is a proof that anybody can check.
"""

import re
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Self

from cryptography.hazmat.primitives.asymmetric import ec

from ..errors import FrameError, ProtocolError
from ..privacy.ballots import CARD, KEY, SealedBallot, Slot, card_key
from .local_election import CodeRow, announced_row

CARDS, RECOUNT = "cards", "recount"  # phases, besides BALLOTS and TALLY of local_election.py
ATTEMPT, TERMS = "attempt", "terms"  # announced in every phase
KEY_OF, PROOF_OF = "key/", "proof/"  # announced by client: its public key, the proof against it
MIN_PARTITIONS = (
    3  # smallest number of partitions with a ballot: a vote on fewer would reveal the ballots
)
NO_CARD = bytes(CARD)  # for a sender whose key the voter does not know
COUNT = struct.Struct("<H")  # number of complaints, at the start of a vote
COMPLAINT = struct.Struct(f"<q{KEY}s")  # sender, private key of the voter's card
PROOF = struct.Struct(f"<q{CARD}s{KEY}s")  # voter, its card and the private key; the ballot follows


def attempt_of(announced: Mapping[str, bytes]) -> str:
    """Return the announced attempt. Raises ProtocolError."""
    attempt = announced.get(ATTEMPT, b"")
    if not re.fullmatch(rb"[0-9a-f]{32}", attempt):
        raise ProtocolError(
            "the name of the attempt is not 32 hexadecimal digits; both sides need the same version of fedcomp"
        )
    return attempt.decode()


def slot_of(run: str, announced: Mapping[str, bytes], round: int, sender: int) -> Slot:
    """Return the slot of a sender's ballot. Raises ProtocolError."""
    terms = announced.get(TERMS, b"").decode("ascii", "replace")
    return Slot(run, attempt_of(announced), round, sender, terms)


def terms_of(options: str, fingerprint: str, lr: float, steps: int = 0, batch_size: int = 0) -> str:
    """Return the terms of a round: a digest, 32 hexadecimal digits, of everything that determines how clients train.

    All clients must train by the same terms. Otherwise a server could make the ballots of all clients but one predictable, for example
    with lr=0, and read the remaining ballot from the votes.
    """
    return sha256(f"{fingerprint} {lr!r} {steps} {batch_size} {options}".encode()).hexdigest()[:32]


def client_number(name: str, prefix: str = "") -> int:
    """Return the client in an announced name: `prefix` and a decimal number without leading zeros. Raises ProtocolError for other names."""
    if not re.fullmatch("0|[1-9][0-9]{0,17}", text := name.removeprefix(prefix)):
        raise ProtocolError(
            f"the server announces the name {ascii(name)[:60]}, which is no client's"
        )
    return int(text)


def full_row(announced: Mapping[str, bytes]) -> CodeRow:
    """Return the announced row. Raises ProtocolError unless it has an odd number of partitions and contains this client.

    The sizes of the partitions must differ by at most one client: the only sender of a small partition would have a larger weight.
    """
    row = announced_row(announced)
    sizes = [len(part.clients) for part in row.partitions]
    numbered = [part.number for part in row.partitions] == list(range(len(row.partitions)))
    if (
        not numbered
        or len(sizes) % 2 == 0
        or len(sizes) < MIN_PARTITIONS
        or max(sizes) - min(sizes) > 1
        or row.client not in row.senders
    ):
        raise ProtocolError(
            f"the row of the code does not count all clients equally in an odd number of at least {MIN_PARTITIONS} partitions; "
            "a vote on it would reveal ballots"
        )
    return row


def partitions_with_ballots(row: CodeRow, senders: Collection[int]) -> int:
    """Return the number of partitions of a row that have a ballot from one of these senders."""
    return sum(not set(part.clients).isdisjoint(senders) for part in row.partitions)


def too_few(partitions: int) -> str:
    """Return the reason why there is no vote on the ballots of so few partitions."""
    return f"{partitions} ballots are whole, and a vote on fewer than {MIN_PARTITIONS} would reveal them"


@dataclass(frozen=True)
class Proof:
    """Evidence against a sender: its ballot, and the card and private key of a voter for whom the ballot does not open."""

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
        voter, card, private = PROOF.unpack_from(data)
        return cls(voter, card, private, data[PROOF.size :])

    def is_valid(
        self, slot: Slot, voter: ec.EllipticCurvePublicKey, sender: ec.EllipticCurvePublicKey
    ) -> bool:
        """Return whether the ballot does not open with the card. `voter`, `sender`: their public keys.

        Raises ProtocolError for a card or a ballot that was not signed for this slot.
        """
        public = card_key(self.card, slot, self.voter, voter)
        return SealedBallot.read(self.ballot, slot, sender).proven_bad(
            self.voter, public, self.private
        )


def pack_complaints(complaints: Mapping[int, bytes]) -> bytes:
    """Return the start of a vote. `complaints`: by sender, the private key of the voter's card."""
    return COUNT.pack(len(complaints)) + b"".join(
        COMPLAINT.pack(sender, private) for sender, private in complaints.items()
    )


NO_COMPLAINTS = pack_complaints({})


def split_vote(frame: bytes) -> tuple[Sequence[tuple[int, bytes]], bytes]:
    """Return the complaints in an answer, (sender, private key of the voter's card), and the frame of the vote. Raises FrameError."""
    if len(frame) < COUNT.size:
        raise FrameError("a vote is cut off")
    (count,) = COUNT.unpack_from(frame)
    end = COUNT.size + count * COMPLAINT.size
    if len(frame) < end:
        raise FrameError("the complaints of a vote are cut off")
    return list(COMPLAINT.iter_unpack(frame[COUNT.size : end])), frame[end:]
