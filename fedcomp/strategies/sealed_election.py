"""Elections with sealed (encrypted) ballots, which the server forwards but cannot read.

Clients vote as in election.py with form=ballots. The election code must be `deterministic` with n = 2b + 1 seats. With this code, every
voter votes on all partitions, so honest votes reveal no more than the result. docs/explanation/elections.md specifies the protocol, and
privacy/ballots.py implements the cryptography.

Terms of this file:

    Sender:    a client that made a ballot.
    Voter:     a client that decrypts the ballots of the senders, counts them and votes.
    Row:       the partitions on which a voter votes. The clients in these partitions are the senders.
    Attempt:   a random name that the server draws at each start. A restarted server that repeats a round therefore gets new keys.
    Terms:     a hash of the model and the options with which clients train in the round.
    Slot:      the identity of one ballot: run, attempt, round, sender and terms. Every signature and every key is bound to a slot.
    Card:      a voter's one-time public key for one slot, signed by the voter.
    Ballot:    the signs of a sender's update, encrypted for the voters whose cards the sender received, and signed by the sender.
    Complaint: the private key of a card. A voter reveals this key if it cannot decrypt the ballot of the card's slot.
    Proof:     a complaint with its card and its ballot. Anybody can check that the key does not decrypt the ballot.

Phases of a round:

    cards      Clients train. Each voter sends one card for each sender.
    ballots    The server forwards the cards to the senders. Each sender sends its ballot.
    tally      The server forwards the ballots to the voters. Each voter sends its vote, and complaints about ballots.
    recount    Only if a complaint is a valid proof: the server forwards the proofs, and each voter votes again, without the ballots of the
               senders that are proven Byzantine.

Server and clients check every signature. Every row must contain each client exactly once, because the votes would reveal a ballot with a
larger weight than the others. A client answers each phase of a round only once, even if the server asks again with other ballots, because
the difference between two votes could reveal a ballot. An honest sender signs only one ballot for a slot. A proof may therefore contain any
ballot that the sender signed for the slot.
"""

import re
import secrets
import struct
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, ClassVar

from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from .. import kernels
from ..codecs import Codec, Context
from ..codecs.base import nonfinite_errors
from ..errors import FrameError, ProtocolError
from ..keys.keyring import DerivedKeys, Keyring, UnknownKey, point_of, verifier
from ..memories import Memory
from ..messages import Assignment
from ..privacy.ballots import (
    CARD,
    KEY,
    Card,
    SealedBallot,
    Slot,
    UnopenableBallot,
    card_key,
    refuse_low_order,
    seal,
)
from .base import AcceptedByPhase, AcceptedUpdate, ClientAlgorithm, RoundState, Values
from .codes import BALLOTS, ROW, TALLY, CodeRow, announced_row, vote_on_ballots

CARDS, RECOUNT = "cards", "recount"  # names of the first and the last phase
ATTEMPT, TERMS = "attempt", "terms"  # names of announcements in every phase
KEY_OF = "key/"  # announcement "key/<client>": the client's public key
PROOF_OF = "proof/"  # announcement "proof/<sender>": the proof against this sender
# A vote needs valid ballots of at least this number of partitions, because a vote on fewer ballots would reveal them.
MIN_PARTITIONS = 3
NO_CARD = bytes(CARD)  # sent by a voter instead of a card if it does not know the sender's key
MAX_ATTEMPTS = 1024  # maximum number of server starts in a run
ATTEMPT_BYTES = 16
COUNT = struct.Struct("<H")  # first field of the frame with a vote: the number of complaints
COMPLAINT = struct.Struct(f"<q{KEY}s")  # fields of a complaint: sender, private key of the card
# Fields of a proof before its ballot: the voter, the voter's card, and the card's private key
PROOF = struct.Struct(f"<q{CARD}s{KEY}s")
ROUND = struct.Struct("<q")  # field at the start of a result of `pack_signed`: the round number
NO_COMPLAINTS = COUNT.pack(0)

# Names of entries in RoundState.values, besides ROW, TERMS and KEY_OF:
ATTEMPTS = "attempts"  # attempts in which the client has signed messages, the newest last
BITS = "bits"  # the client's own ballot before encryption
COMPLAINTS = "complaints"  # packed complaints, until the client sends them
CARD_FOR = "card/"  # "card/<sender>": private key of the card for this sender
BALLOT_OF = "ballot/"  # "ballot/<sender>": the decrypted ballot of this sender
ANSWERED = "answered/"  # "answered/<phase>": the client has answered this phase


# Messages.


def terms_of(options: str, fingerprint: str, lr: float, steps: int = 0, batch_size: int = 0) -> str:
    """Return the terms of a round, a hash (32 hexadecimal digits) of the arguments, which determine how clients train.

    Clients check that they all have the same terms. Otherwise, a server could make the ballots of all clients but one predictable, for
    example with lr=0, and compute the remaining ballot from the votes.
    """
    return sha256(f"{fingerprint} {lr!r} {steps} {batch_size} {options}".encode()).hexdigest()[:32]


def too_few_ballots(row: CodeRow, senders: Collection[int]) -> str:
    """Return the reason why the ballots of `senders` are too few for a vote on the row, or "" if they are enough."""
    partitions = sum(not set(part.clients).isdisjoint(senders) for part in row.partitions)
    if partitions >= MIN_PARTITIONS:
        return ""
    return f"the number of partitions with valid ballots is {partitions}; a vote on fewer than {MIN_PARTITIONS} would reveal the ballots"


@dataclass(frozen=True)
class Proof:
    """Evidence against a sender: its ballot, and the card and private key of a voter that cannot decrypt the ballot."""

    voter: int
    card: bytes
    private: bytes
    ballot: bytes

    def pack(self) -> bytes:
        return PROOF.pack(self.voter, self.card, self.private) + self.ballot

    @classmethod
    def unpack(cls, data: bytes) -> "Proof":
        """Parse the result of `pack`. Raises ProtocolError if `data` is too short."""
        if len(data) < PROOF.size:
            raise ProtocolError(
                f"the server's proof against a client has {len(data)} bytes; expected at least {PROOF.size}"
            )
        voter, card, private = PROOF.unpack_from(data)
        return cls(voter, card, private, data[PROOF.size :])

    def is_valid(
        self, slot: Slot, voter: ec.EllipticCurvePublicKey, sender: ec.EllipticCurvePublicKey
    ) -> bool:
        """Return whether the private key of the card fails to decrypt the ballot.

        `voter`, `sender`: public keys of the voter and of the sender. Raises ProtocolError if the voter has not signed the card, or if the
        sender has not signed the ballot.
        """
        public = card_key(self.card, slot, self.voter, voter)
        return SealedBallot.read(self.ballot, slot, sender).proven_bad(
            self.voter, public, self.private
        )


def pack_complaints(complaints: Mapping[int, bytes]) -> bytes:
    """Pack a voter's complaints. `complaints`: private key of the voter's card, by sender of the ballot."""
    return COUNT.pack(len(complaints)) + b"".join(
        COMPLAINT.pack(sender, private) for sender, private in complaints.items()
    )


def split_vote(frame: bytes) -> tuple[Sequence[tuple[int, bytes]], bytes]:
    """Split a voter's frame into complaints, as pairs (sender, private key of the card), and a vote. Raises FrameError."""
    if len(frame) < COUNT.size:
        raise FrameError("the client's vote is cut off before its list of complaints")
    (count,) = COUNT.unpack_from(frame)
    end = COUNT.size + count * COMPLAINT.size
    if len(frame) < end:
        raise FrameError("the client's vote is cut off within its list of complaints")
    return list(COMPLAINT.iter_unpack(frame[COUNT.size : end])), frame[end:]


def attempt_of(announced: Mapping[str, bytes]) -> bytes:
    """Return the announced attempt [16 bytes]. Raises ProtocolError if it is missing or malformed."""
    attempt = announced.get(ATTEMPT, b"")
    if not re.fullmatch(rb"[0-9a-f]{32}", attempt):
        raise ProtocolError(
            f"the server announces the attempt {ascii(attempt)[:60]}, which is not 32 hexadecimal digits; server and client need the same "
            "version of fedcomp"
        )
    return bytes.fromhex(attempt.decode())


def client_number(name: str, prefix: str = "") -> int:
    """Return the client id after `prefix` in the name of an announcement. Raises ProtocolError if there is no id."""
    if not re.fullmatch("0|[1-9][0-9]{0,17}", text := name.removeprefix(prefix)):
        raise ProtocolError(
            f"the server's announcement has the name {ascii(name)[:60]}, which does not end with a client id (a decimal number)"
        )
    return int(text)


def full_row(announced: Mapping[str, bytes]) -> CodeRow:
    """Return the announced row. Raises ProtocolError if a vote on this row could reveal ballots.

    The sizes of partitions may differ by at most one client, because ballots in a smaller partition have a larger weight. The partitions
    must have the numbers 0, 1, …, because these numbers determine the random signs that replace a missing ballot.
    """
    row = announced_row(announced)
    sizes = [len(part.clients) for part in row.partitions]
    numbers = [part.number for part in row.partitions]
    if (
        numbers != list(range(len(numbers)))
        or len(sizes) % 2 == 0
        or len(sizes) < MIN_PARTITIONS
        or max(sizes) - min(sizes) > 1
        or row.client not in row.senders
    ):
        raise ProtocolError(
            f"a vote on the announced row could reveal ballots: it has the partitions {numbers} with {sizes} clients; a row needs an odd "
            f"number of partitions, at least {MIN_PARTITIONS}, numbered from 0, of equal size or 1 apart, and must contain this client"
        )
    return row


# The client half.


@dataclass(frozen=True)
class SealedElectionClient(ClientAlgorithm):
    """Client half: send cards, an encrypted ballot, a vote, and a second vote if the server excludes a sender."""

    phases: tuple[str, ...] = (CARDS, BALLOTS, TALLY, RECOUNT)
    ring: Keyring = DerivedKeys(0)  # noqa: RUF009 (DerivedKeys in simulations, PinnedKeys on devices)
    options: str = ""  # options of the run, as the server announced them

    one_by_one: ClassVar[bool] = True

    def starts_round(self, assignment: Assignment, state: RoundState | None) -> bool:
        """Extend the base method: raise ProtocolError also for wrong terms, and for a repeated round or attempt."""
        if not super().starts_round(assignment, state):
            return False
        a, announced = assignment, assignment.announcements
        terms = terms_of(self.options, a.fingerprint, a.lr, a.steps, a.batch_size)
        if announced.get(TERMS) != terms.encode():
            raise ProtocolError(
                "the model or the options of this client's assignment differ from those that the server announces to all clients, which "
                "could reveal ballots; server and client need the same version of fedcomp"
            )
        attempt, known = attempt_of(announced), signed_attempts(state)
        if state and known and known[-1] == attempt and a.round <= state.round:
            raise ProtocolError(
                f"the server starts round {a.round}, but has not been restarted since this client signed messages of round {state.round}; "
                "a client signs messages of each round only once"
            )
        if attempt in known[:-1]:
            raise ProtocolError(
                "the server announces the name of an earlier attempt (server start) of this run, but must draw a new name at each start"
            )
        if len(known) >= MAX_ATTEMPTS and known[-1] != attempt:
            raise ProtocolError(
                f"the server was started at least {len(known) + 1} times for this run, but at most {MAX_ATTEMPTS} are allowed; "
                "start a new run"
            )
        return True

    def initial_values(self, assignment: Assignment, previous: RoundState | None) -> Values:
        announced = assignment.announcements
        attempts, attempt = signed_attempts(previous), attempt_of(announced)
        if attempts[-1:] != [attempt]:
            attempts.append(attempt)
        return {ATTEMPTS: b"".join(attempts), TERMS: announced.get(TERMS, b"")}

    def seed(self, codec: Codec, run_seed: int, assignment: Assignment) -> int:
        return super().seed(codec, run_seed, assignment) if assignment.phase == CARDS else run_seed

    def later_update(
        self, memory: Memory, values: Values, seed: int, context: Context
    ) -> Tensor | None:
        """Return the vote in `tally` or `recount`. Return None in `ballots`, or if the client sends complaints without a vote."""
        self._start_phase(values, context)
        if context.phase == BALLOTS:
            return None
        if context.phase == TALLY:
            self._open_ballots(memory, values, context)
        else:
            self._remove_excluded(values, context)
        row = _row(values, context)
        names = {sender: f"{BALLOT_OF}{sender}" for sender in row.senders}
        opened = {sender: values[name] for sender, name in names.items() if name in values}
        if reason := too_few_ballots(row, opened):
            if values.get(COMPLAINTS, NO_COMPLAINTS) != NO_COMPLAINTS:
                return None
            raise ProtocolError(reason)
        return vote_on_ballots(row, opened, memory.numel, seed, context.round)

    def encode_one(
        self, memory: Memory, update: Tensor | None, values: Values, seed: int, context: Context
    ) -> bytes:
        if context.phase == CARDS:
            return self._cards(memory, update, values, seed, context)
        if context.phase == BALLOTS:
            return self._ballot(values, context)
        if memory.pending is not None:  # the vote in the recount replaces the vote in the tally
            memory.rollback()
        complaints = values.pop(COMPLAINTS, NO_COMPLAINTS)
        if update is None:
            return complaints
        return complaints + (memory.propose(update, seed=seed, context=context) or b"")

    def slot(self, context: Context, sender: int) -> Slot:
        attempt = attempt_of(context.announced).hex()
        terms = context.announced.get(TERMS, b"").decode("ascii", "replace")
        return Slot(self.ring.run, attempt, context.round, sender, terms)

    def _start_phase(self, values: Values, context: Context) -> None:
        """Record that the client answers this phase. Raises ProtocolError if the client must not answer it."""
        if not _value(values, ATTEMPTS, context).endswith(attempt_of(context.announced)):
            raise ProtocolError(
                f"the server was restarted since this client began the round, so the client does not answer phase '{context.phase}'; "
                "it can take part in the next round"
            )
        if values.get(TERMS) != context.announced.get(TERMS):
            raise ProtocolError(
                "the server announces a model or options that differ from those with which this client has trained"
            )
        if f"{ANSWERED}{context.phase}" in values:
            raise ProtocolError(
                f"the server sends a second assignment for phase '{context.phase}' of round {context.round}; a client answers only one"
            )
        values[f"{ANSWERED}{context.phase}"] = b"1"

    def _cards(
        self, memory: Memory, update: Tensor | None, values: Values, seed: int, context: Context
    ) -> bytes:
        """Store this client's signs and the private keys of its cards. Return one card per sender, in the order of ids."""
        assert update is not None
        (error,) = nonfinite_errors(update[None], memory.layout, "the update")
        if error is not None:
            raise error
        row = full_row(context.announced)
        signer = self.ring.signer(row.client)
        for name, point in context.announced.items():
            if name.startswith(KEY_OF):
                try:
                    values[name] = self.ring.key(client_number(name, KEY_OF), point)
                except UnknownKey:
                    continue
        known = [sender for sender in row.senders if f"{KEY_OF}{sender}" in values]
        if too_few_ballots(row, known):
            raise ProtocolError(
                f"this client knows the keys of only {len(known)} of the clients whose ballots it counts, too few for a vote; give "
                "this client the newest --roster"
            )
        cards = {s: Card.make(self.slot(context, s), row.client, signer) for s in known}
        values[ROW], values[BITS] = row.pack(), kernels.bits.signs(update, seed)
        values |= {f"{CARD_FOR}{sender}": card.private for sender, card in cards.items()}
        return b"".join(cards[s].data if s in cards else NO_CARD for s in row.senders)

    def _ballot(self, values: Values, context: Context) -> bytes:
        """Return this client's ballot, encrypted for the voters whose cards the server announced."""
        row = _row(values, context)
        slot, signer = self.slot(context, row.client), self.ring.signer(row.client)
        if _value(values, f"{KEY_OF}{row.client}", context) != point_of(signer.public_key()):
            raise ProtocolError(
                "the key of this client has changed since the start of the round; the client can take part in the next round"
            )
        voters: dict[int, bytes] = {}
        for name, card in context.announced.items():
            if name in (ATTEMPT, TERMS):
                continue
            if (voter := client_number(name)) not in row.senders:
                raise ProtocolError(
                    f"the server asks this client to encrypt its ballot for client {voter}, which is not a voter in this round"
                )
            voters[voter] = card_key(card, slot, voter, _verifier(values, voter, context))
        return seal(_value(values, BITS, context), slot, voters, signer)

    def _open_ballots(self, memory: Memory, values: Values, context: Context) -> None:
        """Store the announced ballots that this voter can decrypt, and complaints about the ballots that it cannot decrypt."""
        row, complaints = _row(values, context), {}
        for sender in row.senders:
            if (name := str(sender)) not in context.announced:
                continue
            private = _value(values, f"{CARD_FOR}{sender}", context)
            verify = _verifier(values, sender, context)
            sealed = SealedBallot.read(context.announced[name], self.slot(context, sender), verify)
            try:
                bits = sealed.open(row.client, private)
                values[f"{BALLOT_OF}{sender}"] = checked_bits(bits, memory.numel)
            except UnopenableBallot:
                complaints[sender] = private
        values[COMPLAINTS] = pack_complaints(complaints)

    def _remove_excluded(self, values: Values, context: Context) -> None:
        """Remove the ballots of senders that the server excludes. Raises ProtocolError for an invalid proof."""
        for name, data in context.announced.items():
            if not name.startswith(PROOF_OF):
                continue
            sender, proof = client_number(name, PROOF_OF), Proof.unpack(data)
            key = self.ring.key(proof.voter, context.announced.get(f"{KEY_OF}{proof.voter}", b""))
            verify = _verifier(values, sender, context)
            if not proof.is_valid(self.slot(context, sender), verifier(key), verify):
                raise ProtocolError(
                    f"the server excludes client {sender} with an invalid proof; a proof must show that a voter cannot "
                    "decrypt the client's ballot"
                )
            values.pop(f"{BALLOT_OF}{sender}", None)


def unknown_keys(assignment: Assignment, state: RoundState | None) -> list[int]:
    """Return the clients whose announced public keys the client did not accept in the phase `cards`."""
    if assignment.phase != CARDS or state is None:
        return []
    return [
        client_number(name, KEY_OF)
        for name in assignment.announcements
        if name.startswith(KEY_OF) and name not in state.values
    ]


def signed_attempts(state: RoundState | None) -> list[bytes]:
    """Return the attempts in which a client has signed messages, the newest last."""
    known = state.values.get(ATTEMPTS, b"") if state else b""
    return [known[at : at + ATTEMPT_BYTES] for at in range(0, len(known), ATTEMPT_BYTES)]


def pack_signed(state: RoundState | None) -> bytes:
    """Return a client's entry in the signature log: the last signed round and all attempts, or b"" if the client has signed nothing."""
    attempts = b"".join(signed_attempts(state))
    return ROUND.pack(state.round) + attempts if state and attempts else b""


def unpack_signed(record: bytes) -> RoundState:
    """Return a client's state that contains only the values that `pack_signed` stored."""
    return RoundState(ROUND.unpack_from(record)[0], 0.0, {ATTEMPTS: record[ROUND.size :]})


def checked_bits(packed: bytes, numel: int) -> bytes:
    """Return a ballot whose unused bits are set to 0. Raises UnopenableBallot for a ballot of the wrong size."""
    if len(packed) != (numel + 7) // 8:
        raise UnopenableBallot(
            f"the ballot has {len(packed)} bytes; a model of {numel} parameters needs {(numel + 7) // 8}"
        )
    mask = 0xFF << -numel % 8
    return packed[:-1] + bytes(last & mask for last in packed[-1:])


def _value(values: Mapping[str, Any], name: str, context: Context) -> bytes:
    if name not in values:
        raise ProtocolError(
            f"this client has not stored the data that phase '{context.phase}' needs, for example because it missed an earlier phase of "
            "the round; it can take part in the next round"
        )
    return values[name]


def _row(values: Mapping[str, Any], context: Context) -> CodeRow:
    return CodeRow.unpack(_value(values, ROW, context))


def _verifier(
    values: Mapping[str, Any], client: int, context: Context
) -> ec.EllipticCurvePublicKey:
    return verifier(_value(values, f"{KEY_OF}{client}", context))


# The server half.


class SealedRound:
    """The server's state in a round: the cards and ballots that it forwards, and the proofs against clients."""

    def __init__(self, ring: Keyring):
        self.ring, self.attempt = ring, secrets.token_hex(ATTEMPT_BYTES)
        self.options = ""  # options of the run, as the server announces them
        self.start(0, {}, 0, "")

    def start(self, round: int, rows: Mapping[int, CodeRow], numel: int, terms: str) -> None:
        """Start a new round. `rows`: the row of each voter."""
        self.round, self.rows, self.numel, self.terms = round, rows, numel, terms
        self.cards: dict[tuple[int, int], bytes] = {}  # card for each (voter, sender)
        self.ballots: dict[int, bytes] = {}  # ballot of each sender
        self.proofs: dict[int, Proof] = {}  # proof against a sender, by sender
        self.present: set[int] = set()  # clients that were accepted in the phase `cards`
        self.unknown_keys: dict[int, set[int]] = {}  # by voter: senders for which it sent no card
        # Public keys by client. Each key is read once, so that it stays the same throughout the round.
        self._keys: dict[int, bytes] = {}

    def announce(self, phase: str, client: int, before: AcceptedByPhase) -> dict[str, bytes]:
        """Return the announcements to a client at the start of a phase; see `RoundStrategy.announce`."""
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
        if client not in self._keys:
            self._keys[client] = self.ring.key(client)
        return self._keys[client]

    def without_known_key(self, present: Collection[int], f: int) -> dict[int, str]:
        """Return the clients to exclude after the phase `cards`, with the reasons.

        `present`: the clients whose cards were accepted. `f`: the largest number of Byzantine clients. If more
        than `f` voters do not know a sender's announced key, at least one of these voters is honest, so the sender is excluded. Otherwise,
        the voters that do not know the key are excluded.
        """
        counts = Counter(sender for voter in present for sender in self.unknown_keys.get(voter, ()))
        unknown = {sender for sender, count in counts.items() if count > f and sender in present}
        excluded = {
            sender: f"{counts[sender]} voters do not accept the key of this client: their --roster has another key or none for it, or "
            "they know another key from earlier in this run; if the key was renewed, the client can take part again from the next run on"
            for sender in unknown
        }
        for voter in sorted(set(present) - unknown):
            if others := (self.unknown_keys.get(voter, set()) & set(present)) - unknown:
                excluded[voter] = (
                    f"this client lacks the key of client {min(others)} that other voters know: its --roster has another key or none for "
                    f"client {min(others)}, or it knows another key from earlier in this run; give this client the newest --roster, or let "
                    "it take part in the next run"
                )
        return excluded

    def check_frame(self, phase: str, client: int, frame: bytes) -> None:
        """Store the cards or the ballot in a client's frame. Raises FrameError if no honest client would send this frame."""
        try:
            if phase == CARDS:
                self._store_cards(client, frame)
            elif phase == BALLOTS:
                self._store_ballot(client, frame)
        except ProtocolError as error:
            raise FrameError(str(error)) from error

    def check_complaints(self, votes: Sequence[AcceptedUpdate]) -> dict[int, str]:
        """Check the voters' complaints, and store the proofs. Return the senders and voters to exclude, with the reasons."""
        excluded: dict[int, str] = {}
        for vote in votes:
            voter, complaints = vote.client, split_vote(vote.frame)[0]
            if len(complaints) > (n_senders := len(self.rows[voter].senders)):
                excluded[voter] = (
                    f"the client sent {len(complaints)} complaints about only {n_senders} ballots, so it is excluded"
                )
                continue
            for sender, private in complaints:
                if proof := self._proof(voter, sender, private):
                    excluded.setdefault(
                        sender,
                        f"voter {voter} has proven that it cannot decrypt the client's ballot, so the client is excluded",
                    )
                    self.proofs.setdefault(sender, proof)
                else:
                    excluded[voter] = (
                        f"the client complained about the ballot of client {sender} without a valid proof, so the client is excluded"
                    )
        return excluded

    def _proof(self, voter: int, sender: int, private: bytes) -> Proof | None:
        """Return the proof against `sender` from a voter's complaint, or None if the complaint is false."""
        card, ballot = self.cards.get((voter, sender)), self.ballots.get(sender)
        if not card or not ballot:
            return None
        proof = Proof(voter, card, private, ballot)
        keys = verifier(self.key(voter)), verifier(self.key(sender))
        return proof if proof.is_valid(self._slot(sender), *keys) else None

    def _cards_for(self, sender: int) -> list[tuple[int, bytes]]:
        """Return the cards that the server forwards to a sender, as pairs (voter, card)."""
        return [
            (voter, card)
            for (voter, other), card in self.cards.items()
            if other == sender and voter in self.present
        ]

    def _store_cards(self, voter: int, frame: bytes) -> None:
        senders = self.rows[voter].senders
        if len(frame) != CARD * len(senders):
            raise FrameError(
                f"the client's cards (one-time keys) have {len(frame)} bytes; expected {CARD * len(senders)} bytes for {len(senders)} cards"
            )
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
                f"the ballot has {sealed.size} bytes; a model of {self.numel} parameters needs {(self.numel + 7) // 8}"
            )
        forwarded = {voter: card[:KEY] for voter, card in self._cards_for(sender)}
        if {voter: public for voter, (public, _) in sealed.wraps.items()} != forwarded:
            raise FrameError(
                "the ballot is encrypted for other voters than those whose cards (one-time keys) the server forwarded to the client"
            )
        self.ballots[sender] = frame

    def _slot(self, sender: int) -> Slot:
        return Slot(self.ring.run, self.attempt, self.round, sender, self.terms)
