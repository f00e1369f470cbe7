"""Elections with sealed (encrypted) ballots, which the server forwards but cannot read.

Clients vote as in election.py with form=ballots (Sohn et al., NeurIPS 2020). The election code must be `deterministic` with b = (n − 1)/2
for n seats. With this code, every voter votes on all data partitions, and honest votes reveal no more than the result.
docs/explanation/elections.md specifies the protocol, and privacy/ballots.py implements the cryptography.

Glossary:

    Row:       the data partitions on which a voter votes; a voter opens the ballots of all clients (senders) in its row.
    Attempt:   a random name that the server draws at each start, so that no key is used again if a restarted server repeats a round.
    Terms:     a digest of the model and the options with which clients train in the round.
    Slot:      the identity of one ballot: run, attempt, round, sender and terms; every signature and every key is bound to a slot.
    Card:      a voter's one-time public key for one slot, signed by the voter.
    Ballot:    the signs of a sender's update, encrypted for the voters whose cards the sender received, and signed by the sender.
    Complaint: the private key of a card, which a voter reveals if it cannot open (decrypt) a ballot with this key.
    Proof:     a complaint, the card and the ballot; with these three, anybody can check that the ballot does not open.

The phases of a round are `cards`, `ballots`, `tally` and, only if a complaint is proven, `recount`. Server and clients check every
signature. Every row must contain each client exactly once: if a ballot had a larger weight than the others, the votes would reveal this
ballot. A client answers each phase of a round only once, even if the server asks again: several votes on different sets of ballots would
reveal the ballots. A sender that signs two ballots for one slot counts as Byzantine.
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
# Prefixes of the names of two announcements: a client's public key, and the proof that a client is Byzantine
KEY_OF, PROOF_OF = "key/", "proof/"
# A vote needs valid ballots of at least this number of partitions: a vote on fewer ballots would reveal them
MIN_PARTITIONS = 3
NO_CARD = bytes(CARD)  # placeholder for a card, sent by a voter that does not know the sender's key
MAX_ATTEMPTS = (
    1024  # maximum number of attempts in a run; each start of the server begins an attempt
)
ATTEMPT_BYTES = 16  # length of an attempt's name
COUNT = struct.Struct("<H")  # field at the start of a vote: the number of complaints
COMPLAINT = struct.Struct(f"<q{KEY}s")  # fields of a complaint: sender, private key of the card
# Fields of a proof before its ballot: the voter, the voter's card, and the card's private key
PROOF = struct.Struct(f"<q{CARD}s{KEY}s")
ROUND = struct.Struct("<q")  # field at the start of a result of `pack_signed`: the round number
NO_COMPLAINTS = COUNT.pack(0)

# Names of entries in RoundState.values, besides ROW, TERMS and KEY_OF:
ATTEMPTS = "attempts"  # attempts in which the client has signed messages, the newest last
BITS = "bits"  # the client's own signs (ballot before encryption)
COMPLAINTS = "complaints"  # packed complaints, until the client sends them
CARD_FOR = "card/"  # "card/<sender>": private key of the card for this sender
BALLOT_OF = "ballot/"  # "ballot/<sender>": the opened ballot of this sender
ANSWERED = "answered/"  # "answered/<phase>": the client has answered this phase


# Terms and messages.


def terms_of(options: str, fingerprint: str, lr: float, steps: int = 0, batch_size: int = 0) -> str:
    """Return the terms of a round: a digest (32 hexadecimal digits) of everything that determines how clients train.

    All clients must train with the same terms. If terms differed, a server could make the ballots of all clients but one predictable, for
    example with lr=0, and compute the remaining ballot from the votes.
    """
    return sha256(f"{fingerprint} {lr!r} {steps} {batch_size} {options}".encode()).hexdigest()[:32]


def too_few_ballots(row: CodeRow, senders: Collection[int]) -> str:
    """Return the reason why too few partitions of the row have ballots of these senders, or "" if there are enough for a vote."""
    partitions = sum(not set(part.clients).isdisjoint(senders) for part in row.partitions)
    if partitions >= MIN_PARTITIONS:
        return ""
    return f"only {partitions} partitions have valid ballots, and a vote on fewer than {MIN_PARTITIONS} partitions would reveal the ballots"


@dataclass(frozen=True)
class Proof:
    """Evidence against a sender: its ballot, and the card and private key of a voter that cannot open (decrypt) the ballot."""

    voter: int
    card: bytes
    private: bytes
    ballot: bytes

    def pack(self) -> bytes:
        return PROOF.pack(self.voter, self.card, self.private) + self.ballot

    @classmethod
    def unpack(cls, data: bytes) -> "Proof":
        """Read the proof that `pack` returned as bytes. Raises ProtocolError if `data` is too short."""
        if len(data) < PROOF.size:
            raise ProtocolError("the server's proof against a client is cut off and proves nothing")
        voter, card, private = PROOF.unpack_from(data)
        return cls(voter, card, private, data[PROOF.size :])

    def is_valid(
        self, slot: Slot, voter: ec.EllipticCurvePublicKey, sender: ec.EllipticCurvePublicKey
    ) -> bool:
        """Return whether the proof is valid: whether the ballot does not open (decrypt) with the private key of the card.

        `voter` and `sender`: their public keys. Raises ProtocolError if the voter did not sign the card, or if the sender did not sign the
        ballot.
        """
        public = card_key(self.card, slot, self.voter, voter)
        return SealedBallot.read(self.ballot, slot, sender).proven_bad(
            self.voter, public, self.private
        )


def pack_complaints(complaints: Mapping[int, bytes]) -> bytes:
    """Pack a voter's complaints about ballots. `complaints`: sender of a ballot → private key of the voter's card."""
    return COUNT.pack(len(complaints)) + b"".join(
        COMPLAINT.pack(sender, private) for sender, private in complaints.items()
    )


def split_vote(frame: bytes) -> tuple[Sequence[tuple[int, bytes]], bytes]:
    """Split a voter's answer into complaints (pairs of sender and private key of the voter's card) and a vote. Raises FrameError."""
    if len(frame) < COUNT.size:
        raise FrameError("the client's vote is cut off before its list of complaints")
    (count,) = COUNT.unpack_from(frame)
    end = COUNT.size + count * COMPLAINT.size
    if len(frame) < end:
        raise FrameError("the client's vote is cut off within its list of complaints")
    return list(COMPLAINT.iter_unpack(frame[COUNT.size : end])), frame[end:]


def attempt_of(announced: Mapping[str, bytes]) -> bytes:
    """Return the attempt (a random name of 16 bytes, drawn when the server starts) from the announcements. Raises ProtocolError."""
    attempt = announced.get(ATTEMPT, b"")
    if not re.fullmatch(rb"[0-9a-f]{32}", attempt):
        raise ProtocolError(
            "the announced attempt (name of a server start) is not 32 hexadecimal digits; "
            "server and client need the same version of fedcomp"
        )
    return bytes.fromhex(attempt.decode())


def client_number(name: str, prefix: str = "") -> int:
    """Return the client id (a decimal number) after `prefix` in the name of an announcement. Raises ProtocolError if there is no id."""
    if not re.fullmatch("0|[1-9][0-9]{0,17}", text := name.removeprefix(prefix)):
        raise ProtocolError(
            f"the server's announcement has the name {ascii(name)[:60]}, which does not end with a client id (a decimal number)"
        )
    return int(text)


def full_row(announced: Mapping[str, bytes]) -> CodeRow:
    """Return the announced row (the data partitions to vote on). Raises ProtocolError if a vote on this row could reveal ballots.

    The row must contain this client and an odd number of partitions, at least three. Partition sizes must differ by at most one client,
    since senders in smaller partitions have a larger weight.
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
            f"a vote on the announced data partitions would reveal ballots: the number of partitions must be odd and at least "
            f"{MIN_PARTITIONS}, and the sizes of the partitions may differ by at most one client"
        )
    return row


# The client half.


@dataclass(frozen=True)
class SealedElectionClient(ClientAlgorithm):
    """Client half: send cards (one-time keys), an encrypted ballot, a vote, and a second vote if the server excludes a sender."""

    phases: tuple[str, ...] = (CARDS, BALLOTS, TALLY, RECOUNT)
    ring: Keyring = DerivedKeys(0)  # noqa: RUF009 (DerivedKeys for simulated clients, PinnedKeys on devices)
    options: str = ""  # options of the run that the server announced to the client

    one_by_one: ClassVar[bool] = True

    def starts_round(self, assignment: Assignment, state: RoundState | None) -> bool:
        """Extend the base method: also raise ProtocolError if the assignment contradicts the terms, or repeats a round or an attempt."""
        if not super().starts_round(assignment, state):
            return False
        a, announced = assignment, assignment.announcements
        terms = terms_of(self.options, a.fingerprint, a.lr, a.steps, a.batch_size)
        if announced.get(TERMS) != terms.encode():
            raise ProtocolError(
                "the server makes this client train with another model or other options than it announces to all clients; "
                "this could reveal ballots"
            )
        attempt, known = attempt_of(announced), signed_attempts(state)
        if state and known and known[-1] == attempt and a.round <= state.round:
            raise ProtocolError(
                f"the server asks for round {a.round}, but this client has already signed messages of round "
                f"{state.round} since the server's last start"
            )
        if attempt in known[:-1]:
            raise ProtocolError(
                "the server reuses the name of an earlier attempt (server start) of this run; a server must draw a new name at each start"
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
        """Return the vote in the phase `tally` or `recount`. Return None in the phase `ballots`, or if the client only sends complaints."""
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
        """Return the slot (identity) of a sender's ballot in this round."""
        attempt = attempt_of(context.announced).hex()
        terms = context.announced.get(TERMS, b"").decode("ascii", "replace")
        return Slot(self.ring.run, attempt, context.round, sender, terms)

    def _start_phase(self, values: Values, context: Context) -> None:
        """Record that the client answers this phase (`ballots`, `tally` or `recount`).

        Raises ProtocolError if the client may not answer the phase. If the server repeats an assignment, the client sends its stored report
        without calling this method.
        """
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
                f"the server asks again for phase '{context.phase}' of round {context.round}, which a client answers only once"
            )
        values[f"{ANSWERED}{context.phase}"] = b"1"

    def _cards(
        self, memory: Memory, update: Tensor | None, values: Values, seed: int, context: Context
    ) -> bytes:
        """Store this client's signs and the private keys of its cards. Return a card (one-time key) per sender, in the order of ids."""
        assert update is not None  # clients train in the first phase, so there is an update
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
        """Return this client's ballot, encrypted for the voters whose cards (one-time keys) the server announced."""
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
                    f"the server asks for a ballot encrypted for client {voter}, which is not one of the voters that the server announced"
                )
            voters[voter] = card_key(card, slot, voter, _verifier(values, voter, context))
        return seal(_value(values, BITS, context), slot, voters, signer)

    def _open_ballots(self, memory: Memory, values: Values, context: Context) -> None:
        """Store the announced ballots that this voter can open (decrypt), and complaints about ballots that it cannot open."""
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
    """Return the clients whose announced public keys this client did not accept in the phase `cards`."""
    if assignment.phase != CARDS or state is None:
        return []
    return [
        client_number(name, KEY_OF)
        for name in assignment.announcements
        if name.startswith(KEY_OF) and name not in state.values
    ]


def signed_attempts(state: RoundState | None) -> list[bytes]:
    """Return the attempts (starts of the server) in which a client has signed messages, the newest last."""
    known = state.values.get(ATTEMPTS, b"") if state else b""
    return [known[at : at + ATTEMPT_BYTES] for at in range(0, len(known), ATTEMPT_BYTES)]


def pack_signed(state: RoundState | None) -> bytes:
    """Return a client's entry in the log of signatures: the last signed round and all attempts, or b"" if the client signed nothing."""
    attempts = b"".join(signed_attempts(state))
    return ROUND.pack(state.round) + attempts if state and attempts else b""


def unpack_signed(record: bytes) -> RoundState:
    """Return a client's state with only the values that `pack_signed` stored: the last round, and the attempts (starts of the server)."""
    return RoundState(ROUND.unpack_from(record)[0], 0.0, {ATTEMPTS: record[ROUND.size :]})


def checked_bits(packed: bytes, numel: int) -> bytes:
    """Return the bits of a ballot, with the padding bits at its end set to zero. Raises UnopenableBallot for a ballot of another size."""
    if len(packed) != (numel + 7) // 8:
        raise UnopenableBallot(
            f"the ballot has {len(packed)} bytes, which do not fit a model of {numel} parameters"
        )
    mask = 0xFF << -numel % 8
    return packed[:-1] + bytes(last & mask for last in packed[-1:])


def _value(values: Mapping[str, Any], name: str, context: Context) -> bytes:
    if name not in values:
        raise ProtocolError(
            f"this client has no state for phase '{context.phase}' of this round; it can take part in the next round"
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
        self.options = ""  # options of the run that the server announces to clients
        self.start(0, {}, 0, "")

    def start(self, round: int, rows: Mapping[int, CodeRow], numel: int, terms: str) -> None:
        """Start a new round. `rows`: for each voter, the data partitions on which it votes."""
        self.round, self.rows, self.numel, self.terms = round, rows, numel, terms
        self.cards: dict[tuple[int, int], bytes] = {}  # card for each (voter, sender)
        self.ballots: dict[int, bytes] = {}  # ballot of each sender
        self.proofs: dict[int, Proof] = {}  # sender → proof that its ballot does not open (decrypt)
        self.present: set[int] = set()  # clients that were accepted in the phase `cards`
        self.unknown_keys: dict[int, set[int]] = {}  # voter → senders whose keys it lacks
        self._keys: dict[int, bytes] = {}

    def announce(self, phase: str, client: int, before: AcceptedByPhase) -> dict[str, bytes]:
        """Return the announcements to a client at the start of a phase, by name. `before`: accepted answers in earlier phases."""
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
        """Return a client's public key, which stays the same throughout a round."""
        if client not in self._keys:
            self._keys[client] = self.ring.key(client)
        return self._keys[client]

    def without_known_key(self, present: Collection[int], f: int) -> dict[int, str]:
        """Return the clients to exclude after the phase `cards`, as a dict from client to reason.

        `f` is the largest number of malicious clients. If more than `f` voters do not know a sender's announced key, at least one of these
        voters is honest, so the sender is excluded. If at most `f` voters do not know the key, these voters are excluded instead.
        """
        counts = Counter(sender for voter in present for sender in self.unknown_keys.get(voter, ()))
        unknown = {sender for sender, count in counts.items() if count > f and sender in present}
        excluded = {
            sender: f"{counts[sender]} voters have another key for this client (from earlier in this run or from their --roster), or "
            "no key; if the key of this client was renewed, it can take part again from the next run on"
            for sender in unknown
        }
        for voter in sorted(set(present) - unknown):
            if others := (self.unknown_keys.get(voter, set()) & set(present)) - unknown:
                excluded[voter] = (
                    f"this client lacks the key of client {min(others)} that other voters know: it has no key for that client, or a "
                    "different key from earlier in this run or from its --roster; give this client the newest --roster, or let it take "
                    "part in the next run"
                )
        return excluded

    def check_frame(self, phase: str, client: int, frame: bytes) -> None:
        """Check a client's frame, and store its cards or ballot. Raises FrameError if no honest client would send this frame."""
        try:
            if phase == CARDS:
                self._store_cards(client, frame)
            elif phase == BALLOTS:
                self._store_ballot(client, frame)
        except ProtocolError as error:
            raise FrameError(str(error)) from error

    def judge(self, votes: Sequence[AcceptedUpdate]) -> dict[int, str]:
        """Return the clients to exclude, with reasons: senders whose ballots do not open, and voters that complain without cause."""
        convicted: dict[int, str] = {}
        for vote in votes:
            voter, complaints = vote.client, split_vote(vote.frame)[0]
            if len(complaints) > (n_senders := len(self.rows[voter].senders)):
                convicted[voter] = (
                    f"the client sent {len(complaints)} complaints about only {n_senders} ballots, so it is excluded"
                )
                continue
            for sender, private in complaints:
                if proof := self._proof(voter, sender, private):
                    convicted.setdefault(
                        sender,
                        f"the client's ballot does not open for voter {voter}, as a proof shows; the client is excluded",
                    )
                    self.proofs.setdefault(sender, proof)
                else:
                    convicted[voter] = (
                        f"the client complained about the ballot of client {sender}, but this ballot opens; the client is excluded"
                    )
        return convicted

    def _proof(self, voter: int, sender: int, private: bytes) -> Proof | None:
        """Return the proof against `sender` that a voter's complaint gives, or None if the complaint is not justified."""
        card, ballot = self.cards.get((voter, sender)), self.ballots.get(sender)
        if not card or not ballot:
            return None
        proof = Proof(voter, card, private, ballot)
        keys = verifier(self.key(voter)), verifier(self.key(sender))
        return proof if proof.is_valid(self._slot(sender), *keys) else None

    def _cards_for(self, sender: int) -> list[tuple[int, bytes]]:
        """Return the cards (one-time keys of voters) that the server forwards to a sender, as pairs (voter, card)."""
        return [
            (voter, card)
            for (voter, other), card in self.cards.items()
            if other == sender and voter in self.present
        ]

    def _store_cards(self, voter: int, frame: bytes) -> None:
        senders = self.rows[voter].senders
        if len(frame) != CARD * len(senders):
            raise FrameError(
                f"the client's message has {len(frame)} bytes, but {len(senders)} cards (one-time keys) have {CARD * len(senders)} bytes"
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
                f"the ballot has {sealed.size} bytes, which do not fit a model of {self.numel} parameters"
            )
        forwarded = {voter: card[:KEY] for voter, card in self._cards_for(sender)}
        if {voter: public for voter, (public, _) in sealed.wraps.items()} != forwarded:
            raise FrameError(
                "the ballot is encrypted for other voters than those whose cards (one-time keys) the server forwarded to the client"
            )
        self.ballots[sender] = frame

    def _slot(self, sender: int) -> Slot:
        return Slot(self.ring.run, self.attempt, self.round, sender, self.terms)
