"""Elections with sealed ballots, which the server forwards but cannot read: the messages and the server half.

sealed_client.py is the client half. docs/explanation/elections.md specifies the protocol, privacy/ballots.py the cryptography.

Glossary:

    row       the partitions that a voter counts, and thereby the senders whose ballots it opens (local_election.py)
    attempt   a random name that the server draws when it starts, so that a repeated round uses no key again
    terms     a digest of the model and the options by which clients train in the round
    slot      the place of one ballot: (run, attempt, round, sender, terms); every signature and every key is bound to it
    card      a voter's one-time public key for one slot, signed by the voter
    ballot    the signs of a sender's update, encrypted for the voters whose cards it received, and signed by the sender
    complaint the private key of a card, which a voter reveals if a ballot does not open with it
    proof     a complaint with its card and its ballot: anybody can check that the ballot does not open

The phases of a round are `cards`, `ballots`, `tally` and, if a complaint is proven, `recount` without the senders of those ballots.
The server checks every signature and judges the complaints. Every row must contain every client once, because a ballot with a larger
weight could be read from the vote. A voter makes no card for a sender whose announced key differs from the one that it knows; the server
then excludes one of the two from the round.
"""

import secrets
import struct
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from cryptography.hazmat.primitives.asymmetric import ec

from ..errors import FrameError, ProtocolError
from ..keys.keyring import Keyring, verifier
from ..privacy.ballots import CARD, KEY, SealedBallot, Slot, card_key, refuse_low_order
from .base import AcceptedByPhase, AcceptedUpdate
from .local_election import BALLOTS, ROW, TALLY, CodeRow

CARDS, RECOUNT = "cards", "recount"  # phases, besides BALLOTS and TALLY
ATTEMPT, TERMS = "attempt", "terms"  # announced in every phase
KEY_OF, PROOF_OF = "key/", "proof/"  # announced by client: its public key, the proof against it
MIN_PARTITIONS = 3  # with a ballot: a vote on fewer would reveal the ballots
NO_CARD = bytes(CARD)  # for a sender whose key the voter does not know
COUNT = struct.Struct("<H")  # number of complaints, at the start of a vote
COMPLAINT = struct.Struct(f"<q{KEY}s")  # sender, private key of the voter's card
PROOF = struct.Struct(f"<q{CARD}s{KEY}s")  # voter, its card and the private key; the ballot follows


def terms_of(options: str, fingerprint: str, lr: float, steps: int = 0, batch_size: int = 0) -> str:
    """Return the terms of a round: a digest, 32 hexadecimal digits, of everything that determines how clients train.

    All clients must train by the same terms. Otherwise a server could make the ballots of all clients but one predictable, for example
    with lr=0, and read the remaining ballot from the votes.
    """
    return sha256(f"{fingerprint} {lr!r} {steps} {batch_size} {options}".encode()).hexdigest()[:32]


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
    def unpack(cls, data: bytes) -> "Proof":
        """Return the proof in these bytes. Raises ProtocolError if they are cut off."""
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


class SealedRound:
    """The server's state of one round: the cards and ballots that it forwards, and the proofs. `start` begins the next round."""

    def __init__(self, ring: Keyring):
        self.ring, self.attempt = ring, secrets.token_hex(16)
        self.options = ""  # options of the run, as the server announces them to clients
        self.start(0, {}, 0, "")

    def start(self, round: int, rows: Mapping[int, CodeRow], numel: int, terms: str) -> None:
        """Start a round. `rows`: by logical client id."""
        self.round, self.rows, self.numel, self.terms = round, rows, numel, terms
        self.cards: dict[tuple[int, int], bytes] = {}  # by voter and sender
        self.ballots: dict[int, bytes] = {}  # by sender
        self.proofs: dict[int, Proof] = {}  # by the sender that they convict
        self.present: set[int] = set()  # clients that were accepted in phase CARDS
        self.unknown_keys: dict[int, set[int]] = {}  # by voter: senders whose key it does not know
        self._keys: dict[int, bytes] = {}

    def announce(self, phase: str, client: int, before: AcceptedByPhase) -> dict[str, bytes]:
        """Return the announcements for a client at the start of a phase, given the updates accepted in the phases before."""
        common = {ATTEMPT: self.attempt.encode(), TERMS: self.terms.encode()}
        row = self.rows[client]
        if phase == CARDS:
            voters = {voter for voter, other in self.rows.items() if client in other.senders}
            peers = {client, *voters} | (set(row.senders) & self.rows.keys())
            keys = {f"{KEY_OF}{peer}": self.key(peer) for peer in sorted(peers)}
            return common | {ROW: row.pack()} | keys
        if phase == BALLOTS:
            self.present = {a.client for a in before[CARDS]}
            return common | {str(voter): card for voter, card in sorted(self._cards_for(client))}
        if phase == TALLY:
            senders = {a.client for a in before[BALLOTS]}
            return common | {str(s): self.ballots[s] for s in row.senders if s in senders}
        proofs = {s: proof for s, proof in sorted(self.proofs.items()) if s in row.senders}
        witnesses = sorted({proof.voter for proof in proofs.values()})
        keys = {f"{KEY_OF}{voter}": self.key(voter) for voter in witnesses}
        return common | keys | {f"{PROOF_OF}{s}": proof.pack() for s, proof in proofs.items()}

    def key(self, client: int) -> bytes:
        """Return a client's public key, the same throughout a round."""
        if client not in self._keys:
            self._keys[client] = self.ring.key(client)
        return self._keys[client]

    def without_known_key(self, present: Collection[int], f: int) -> dict[int, str]:
        """Return the clients to exclude because some clients do not know each other's keys, with the reason.

        If more than `f` voters do not know a sender's key, at least one of them is honest, and the sender is excluded. Otherwise the voters
        that do not know the key are excluded.
        """
        counts = Counter(sender for voter in present for sender in self.unknown_keys.get(voter, ()))
        unknown = {sender for sender, count in counts.items() if count > f and sender in present}
        excluded = {
            sender: f"{counts[sender]} voters have another key of it, from earlier in this run or from their --roster, or none; a client "
            "whose key is renewed takes part again in the next run"
            for sender in unknown
        }
        for voter in sorted(set(present) - unknown):
            if others := (self.unknown_keys.get(voter, set()) & set(present)) - unknown:
                excluded[voter] = (
                    f"it has another key of client {min(others)} than others, from earlier in this run or from its --roster, or "
                    "none; give it the newest list, or let it take part in the next run"
                )
        return excluded

    def too_few(self, senders: Collection[int]) -> str:
        """Return the reason why the ballots of these senders, without those convicted, are too few for a vote; "" if they suffice."""
        row = next(iter(self.rows.values()))
        partitions = partitions_with_ballots(row, set(senders) - self.proofs.keys())
        return too_few(partitions) if partitions < MIN_PARTITIONS else ""

    def check_frame(self, phase: str, client: int, frame: bytes) -> None:
        """Store the cards or the ballot in a frame. Raises FrameError for a frame that no honest client sends."""
        try:
            if phase == CARDS:
                self._store_cards(client, frame)
            elif phase == BALLOTS:
                self._store_ballot(client, frame)
            else:
                split_vote(frame)
        except ProtocolError as error:
            raise FrameError(str(error)) from error

    def judge(self, votes: Sequence[AcceptedUpdate]) -> dict[int, str]:
        """Return the convicted clients with the reason: senders of ballots that do not open, and voters with unjustified complaints."""
        convicted: dict[int, str] = {}
        for vote in votes:
            voter, complaints = vote.client, split_vote(vote.frame)[0]
            if len(complaints) > (n_senders := len(self.rows[voter].senders)):
                convicted[voter] = (
                    f"it complained {len(complaints)} times about {n_senders} ballots; it is excluded"
                )
                continue
            for sender, private in complaints:
                if proof := self._proof(voter, sender, private):
                    convicted.setdefault(
                        sender,
                        f"its ballot does not open for voter {voter}, which has proven it; it is excluded",
                    )
                    self.proofs.setdefault(sender, proof)
                else:
                    convicted[voter] = (
                        f"it complained about the ballot of client {sender}, which opens; it is excluded"
                    )
        return convicted

    def _proof(self, voter: int, sender: int, private: bytes) -> Proof | None:
        """Return the proof that a complaint gives, None if the complaint is not justified."""
        card, ballot = self.cards.get((voter, sender)), self.ballots.get(sender)
        if not card or not ballot:
            return None
        proof = Proof(voter, card, private, ballot)
        keys = verifier(self.key(voter)), verifier(self.key(sender))
        return proof if proof.is_valid(self._slot(sender), *keys) else None

    def _cards_for(self, sender: int) -> list[tuple[int, bytes]]:
        """Return the cards to forward to a sender: (voter, card)."""
        return [
            (voter, card)
            for (voter, other), card in self.cards.items()
            if other == sender and voter in self.present
        ]

    def _store_cards(self, voter: int, frame: bytes) -> None:
        senders = self.rows[voter].senders
        if len(frame) != CARD * len(senders):
            raise FrameError(f"{len(frame)} bytes are not the cards for {len(senders)} ballots")
        parts = [frame[start : start + CARD] for start in range(0, len(frame), CARD)]
        cards = {s: card for s, card in zip(senders, parts, strict=True) if card != NO_CARD}
        for sender, card in cards.items():
            refuse_low_order(card_key(card, self._slot(sender), voter, verifier(self.key(voter))))
        self.cards |= {(voter, sender): card for sender, card in cards.items()}
        self.unknown_keys[voter] = set(senders) - cards.keys()

    def _store_ballot(self, sender: int, frame: bytes) -> None:
        sealed = SealedBallot.read(frame, self._slot(sender), verifier(self.key(sender)))
        if sealed.size != (self.numel + 7) // 8:
            raise FrameError(
                f"a ballot of {sealed.size} bytes is not one of {self.numel} coordinates"
            )
        forwarded = {voter: card[:KEY] for voter, card in self._cards_for(sender)}
        if {voter: public for voter, (public, _) in sealed.wraps.items()} != forwarded:
            raise FrameError("the ballot is sealed for other cards than those that were forwarded")
        self.ballots[sender] = frame

    def _slot(self, sender: int) -> Slot:
        return Slot(self.ring.run, self.attempt, self.round, sender, self.terms)
