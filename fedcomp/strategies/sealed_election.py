"""Elections with sealed ballots, which the server passes on without being able to read them. docs/explanation/elections.md is the protocol.

    cards     clients train; each makes a card for every sender of its row, and keeps the bits of its ballot
    ballots   each seals its bits for the voters of its column
    tally     each opens the ballots of its row, votes for the majority of the whole ones, and complains of the others;
              where too few are whole it complains and does not vote
    recount   senders whose ballots are proven not to open are left out, and all vote again

The server checks every signature and judges the complaints. A client gives each phase of a round one answer, whatever the server asks:
votes on several sets of ballots would tell what they are, and a sender that signed two ballots for one slot would count as Byzantine.

All rows of the code hold every client once, since a ballot that counts more than others shows in the vote. A voter makes no card for a
sender whose announced key is not the one that it knows; the server then leaves one of the two out.
"""

import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from .. import kernels
from ..codecs import Codec, Context
from ..codecs.checks import nonfinite_rows
from ..codecs.update import Dense
from ..errors import FrameError, ProtocolError
from ..keys.keyring import DerivedKeys, Keyring, PinnedKeys, UnknownKey, point_of, verifier
from ..keys.signature_log import SignatureLog
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
from . import signed_attempts
from .base import AcceptedUpdate
from .client_algorithm import ClientAlgorithm, RoundState
from .local_election import BALLOTS, ROW, TALLY, CodeRow, announcements, ballots_of_row, vote_of
from .sealed_messages import (
    ATTEMPT,
    CARDS,
    KEY_OF,
    MIN_PARTITIONS,
    NO_CARD,
    NO_COMPLAINTS,
    PROOF_OF,
    RECOUNT,
    TERMS,
    Proof,
    client_number,
    full_row,
    pack_complaints,
    partitions_with_ballots,
    slot_of,
    split_vote,
    terms_of,
    too_few,
)
from .signed_attempts import ATTEMPTS

# In RoundState.values, beside ROW, TERMS, ATTEMPTS and the keys of the others:
BITS, COMPLAINTS = "bits", "complaints"
CARD_FOR, BALLOT_OF = "card/", "ballot/"  # by sender: private half of the card, the opened ballot
ANSWERED = "answered/"  # by phase
UNREAD_UPDATE = Dense(np.empty(0, np.float32))  # the update in a frame that the server passes on


@dataclass(frozen=True)
class SealedElectionClient(ClientAlgorithm):
    """Vote on ballots that the server cannot read."""

    phases: tuple[str, ...] = (CARDS, BALLOTS, TALLY, RECOUNT)
    ring: Keyring = DerivedKeys(0)  # noqa: RUF009 — virtual clients share it; `with_keys` gives a device its own
    options: str = ""  # of the run, as the client was told them

    one_by_one: ClassVar[bool] = True

    def starts_round(self, assignment: Assignment, state: RoundState | None) -> bool:
        """Also raise ProtocolError for other terms than the client's, and for a round that it has signed in under this attempt."""
        starts = super().starts_round(assignment, state)
        if not starts:
            return False
        a, told = assignment, announcements(assignment)
        terms = terms_of(self.options, a.fingerprint, a.lr, a.steps, a.batch_size)
        if told.get(TERMS) != terms.encode():
            raise ProtocolError(
                "the server has this client train from another model, or by other options, than it announces to all"
            )
        signed_attempts.check(state, told, a.round)
        return True

    def initial_values(self, assignment: Assignment, previous: RoundState | None) -> dict[str, Any]:
        told = announcements(assignment)
        return {ATTEMPTS: signed_attempts.extended(previous, told), TERMS: told.get(TERMS, b"")}

    def seed(self, codec: Codec, run_seed: int, assignment: Assignment) -> int:
        return super().seed(codec, run_seed, assignment) if assignment.phase == CARDS else run_seed

    def later_update(
        self, memory: Memory, values: dict[str, Any], seed: int, context: Context
    ) -> Tensor | None:
        self._check_phase(values, context)
        if context.phase == BALLOTS:
            return None
        if context.phase == TALLY:
            self._open_ballots(memory, values, context)
        else:
            self._leave_out(values, context)
        row = _row(values, context)
        whole = {
            sender: values[name]
            for sender in row.senders
            if (name := f"{BALLOT_OF}{sender}") in values
        }
        if (partitions := partitions_with_ballots(row, whole)) < MIN_PARTITIONS:
            if values.get(COMPLAINTS, NO_COMPLAINTS) != NO_COMPLAINTS:
                return None
            raise ProtocolError(too_few(partitions))
        numel, round = memory.numel, context.round
        return vote_of(row, ballots_of_row(row, whole, numel, seed, round), numel, seed, round)

    def encode_one(
        self,
        memory: Memory,
        update: Tensor | None,
        values: dict[str, Any],
        seed: int,
        context: Context,
    ) -> bytes:
        if context.phase == CARDS:
            return self._cards(memory, update, values, seed, context)
        if context.phase == BALLOTS:
            return self._ballot(values, context)
        if memory.pending is not None:  # of the tally, before a recount
            memory.rollback()
        complaints = values.pop(COMPLAINTS, NO_COMPLAINTS)
        if update is None:
            return complaints
        return complaints + (memory.propose(update, seed=seed, context=context) or b"")

    def slot(self, context: Context, sender: int) -> Slot:
        """Return the slot of a sender's ballot in this round."""
        return slot_of(self.ring.run, context.announced, context.round, sender)

    def _check_phase(self, values: dict[str, Any], context: Context) -> None:
        """Raise ProtocolError for another attempt or other terms than the round began with, and for a phase that was answered.

        A client that is asked the same again, before another phase, sends the answer that it kept, and does not come here.
        """
        known = signed_attempts.digests({ATTEMPTS: _value(values, ATTEMPTS, context)})
        if known[-1:] != [signed_attempts.digest(context.announced)]:
            raise ProtocolError(
                f"the server asks for phase '{context.phase}' of another attempt than the one that this client has opened"
            )
        if values.get(TERMS) != context.announced.get(TERMS):
            raise ProtocolError(
                "the server announces another model, or other options, than this client has trained by"
            )
        if f"{ANSWERED}{context.phase}" in values:
            raise ProtocolError(
                f"the server asks again for phase '{context.phase}' of round {context.round}, which has one answer"
            )
        values[f"{ANSWERED}{context.phase}"] = b"1"

    def _cards(
        self, memory: Memory, update: Tensor, values: dict[str, Any], seed: int, context: Context
    ) -> bytes:
        (error,) = nonfinite_rows(update[None], memory.layout, "the update")
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
        if partitions_with_ballots(row, known) < MIN_PARTITIONS:
            raise ProtocolError(
                f"of the clients of its row this one knows the keys of {len(known)} alone; give it the newest --roster"
            )
        cards = {
            sender: Card.make(self.slot(context, sender), row.client, signer) for sender in known
        }
        values[ROW], values[BITS] = row.pack(), kernels.bits.signs(update, seed)
        values |= {f"{CARD_FOR}{sender}": card.private for sender, card in cards.items()}
        return b"".join(
            cards[sender].data if sender in cards else NO_CARD for sender in row.senders
        )

    def _ballot(self, values: dict[str, Any], context: Context) -> bytes:
        row = _row(values, context)
        slot, signer = self.slot(context, row.client), self.ring.signer(row.client)
        if values[f"{KEY_OF}{row.client}"] != point_of(signer.public_key()):
            raise ProtocolError(
                "this client has another key than at the start of the round; it takes part again in the next"
            )
        voters: dict[int, bytes] = {}
        for name, card in context.announced.items():
            if name in (ATTEMPT, TERMS):
                continue
            if (voter := client_number(name)) not in row.senders:
                raise ProtocolError(
                    f"the server wants this ballot sealed for client {voter}, which is not in the row that it announced"
                )
            voters[voter] = card_key(card, slot, voter, _verifier(values, voter, context))
        return seal(_value(values, BITS, context), slot, voters, signer)

    def _open_ballots(self, memory: Memory, values: dict[str, Any], context: Context) -> None:
        row, complaints = _row(values, context), {}
        for sender in row.senders:
            if (name := str(sender)) not in context.announced:
                continue  # missing
            private = _value(values, f"{CARD_FOR}{sender}", context)
            verify = _verifier(values, sender, context)
            sealed = SealedBallot.read(context.announced[name], self.slot(context, sender), verify)
            try:
                bits = sealed.open(row.client, private)
                values[f"{BALLOT_OF}{sender}"] = checked_bits(bits, memory.numel)
            except UnopenableBallot:
                complaints[sender] = private
        values[COMPLAINTS] = pack_complaints(complaints)

    def _leave_out(self, values: dict[str, Any], context: Context) -> None:
        """Remove the ballots of senders against which the server shows a proof. Raises ProtocolError for one that proves nothing."""
        for name, data in context.announced.items():
            if not name.startswith(PROOF_OF):
                continue
            sender, proof = client_number(name, PROOF_OF), Proof.unpack(data)
            key = self.ring.key(proof.voter, context.announced.get(f"{KEY_OF}{proof.voter}", b""))
            verify = _verifier(values, sender, context)
            if not proof.is_valid(self.slot(context, sender), verifier(key), verify):
                raise ProtocolError(
                    f"the server wants client {sender} left out, and what it shows proves nothing against it"
                )
            values.pop(f"{BALLOT_OF}{sender}", None)


def with_keys(
    algorithm: ClientAlgorithm,
    run: str,
    options: str,
    client: int,
    key: ec.EllipticCurvePrivateKey,
    roster: Mapping[int, bytes] | None,
    log: SignatureLog,
) -> ClientAlgorithm:
    """Return the client half with a device's own keys, if it signs."""
    if not isinstance(algorithm, SealedElectionClient):
        return algorithm
    return replace(algorithm, ring=PinnedKeys(run, client, key, roster, log), options=options)


def unknown_keys(assignment: Assignment, state: RoundState | None) -> list[int]:
    """Return the clients whose keys, as just announced, are not those that this client takes for theirs."""
    if assignment.phase != CARDS or state is None:
        return []
    return [
        client_number(name, KEY_OF)
        for name in announcements(assignment)
        if name.startswith(KEY_OF) and name not in state.values
    ]


def checked_bits(packed: bytes, numel: int) -> bytes:
    """Return the bits of a ballot with zeros past the last coordinate. Raises Unopenable for a ballot of another size."""
    if len(packed) != (numel + 7) // 8:
        raise UnopenableBallot(f"a ballot of {len(packed)} bytes is not one of {numel} coordinates")
    if numel % 8 == 0:
        return packed
    bits = np.frombuffer(packed, np.uint8).copy()
    bits[-1] &= 256 - (1 << -numel % 8)
    return bits.tobytes()


def _value(values: Mapping[str, Any], name: str, context: Context) -> bytes:
    if name not in values:
        raise ProtocolError(
            f"this client holds nothing for a phase '{context.phase}' of this round; ask it again in the next round"
        )
    return values[name]


def _row(values: Mapping[str, Any], context: Context) -> CodeRow:
    return CodeRow.unpack(_value(values, ROW, context))


def _verifier(
    values: Mapping[str, Any], client: int, context: Context
) -> ec.EllipticCurvePublicKey:
    return verifier(_value(values, f"{KEY_OF}{client}", context))


class SealedRound:
    """The server's side of one round after the other: the cards and ballots that it passes on, and the proofs.

    The attempt is a new one whenever a server starts, so that a repeated round shares no key with the first time.
    """

    def __init__(self, ring: Keyring):
        self.ring, self.attempt = ring, secrets.token_hex(16)
        self.options = ""  # of the run, as clients are told them
        self.start(0, {}, 0, "")

    def start(self, round: int, rows: Mapping[int, CodeRow], numel: int, terms: str) -> None:
        """Start a round of these clients, by logical id."""
        self.round, self.rows, self.numel, self.terms = round, rows, numel, terms
        self.cards: dict[tuple[int, int], bytes] = {}  # by voter and sender
        self.ballots: dict[int, bytes] = {}  # by sender
        self.proofs: dict[int, Proof] = {}  # by the sender that they convict
        self.present: set[int] = set()  # clients that take part after the cards
        self.unknown: dict[int, set[int]] = {}  # by voter, senders whose key it does not know
        self._keys: dict[int, bytes] = {}

    def announce(
        self, phase: str, client: int, before: Mapping[str, Sequence[AcceptedUpdate]]
    ) -> dict[str, bytes]:
        """Return what a client is told at the start of a phase."""
        told, row = {ATTEMPT: self.attempt.encode(), TERMS: self.terms.encode()}, self.rows[client]
        if phase == CARDS:
            voters = {voter for voter, other in self.rows.items() if client in other.senders}
            concerned = {client, *voters} | (set(row.senders) & self.rows.keys())
            keys = {f"{KEY_OF}{other}": self.key(other) for other in sorted(concerned)}
            return told | {ROW: row.pack()} | keys
        if phase == BALLOTS:
            self.present = {a.client for a in before[CARDS]}
            return told | {
                str(voter): card
                for (voter, sender), card in sorted(self.cards.items())
                if sender == client and voter in self.present
            }
        if phase == TALLY:
            sent = {a.client for a in before[BALLOTS]}
            return told | {str(s): self.ballots[s] for s in row.senders if s in sent}
        proofs = {s: proof for s, proof in sorted(self.proofs.items()) if s in row.senders}
        witnesses = sorted({proof.voter for proof in proofs.values()})
        return (
            told
            | {f"{KEY_OF}{voter}": self.key(voter) for voter in witnesses}
            | {f"{PROOF_OF}{sender}": proof.pack() for sender, proof in proofs.items()}
        )

    def key(self, client: int) -> bytes:
        """Return a client's public key, the same throughout a round."""
        if client not in self._keys:
            self._keys[client] = self.ring.key(client)
        return self._keys[client]

    def without_known_key(self, present: Collection[int], f: int) -> dict[int, str]:
        """Return the clients to leave out because some do not know each other's keys, each with the reason.

        A client that more than `f` voters do not know is unknown to an honest one, and left out. Else the voters that do not know it are.
        """
        times = Counter(sender for voter in present for sender in self.unknown.get(voter, ()))
        unknown = {sender for sender, count in times.items() if count > f and sender in present}
        left_out = {
            sender: f"{times[sender]} voters have another key of it, from earlier in this run or in their --roster, or none; a client "
            "whose key is renewed takes part again in the next run"
            for sender in unknown
        }
        for voter in sorted(set(present) - unknown):
            if others := (self.unknown.get(voter, set()) & set(present)) - unknown:
                left_out[voter] = (
                    f"it has another key of client {min(others)} than others, from earlier in this run or in its --roster, or "
                    "none; give it the newest list, or let it take part in the next run"
                )
        return left_out

    def too_few(self, sent: Collection[int]) -> str:
        """Return why nobody votes on the ballots of these senders, less the convicted; "" if they are enough."""
        row = next(iter(self.rows.values()))
        partitions = partitions_with_ballots(row, set(sent) - self.proofs.keys())
        return too_few(partitions) if partitions < MIN_PARTITIONS else ""

    def check(self, phase: str, client: int, frame: bytes) -> None:
        """Check what can be seen of an answer without reading it. Raises FrameError for one that no honest client sends."""
        try:
            if phase == CARDS:
                self._take_cards(client, frame)
            elif phase == BALLOTS:
                self._take_ballot(client, frame)
            else:
                split_vote(frame)
        except ProtocolError as error:
            raise FrameError(str(error)) from error

    def judge(self, answers: Sequence[AcceptedUpdate]) -> dict[int, str]:
        """Return the clients that the complaints beside these votes convict, with reasons: senders, or voters without cause."""
        convicted: dict[int, str] = {}
        for answer in answers:
            voter, complaints = answer.client, split_vote(answer.frame)[0]
            if len(complaints) > (most := len(self.rows[voter].senders)):
                convicted[voter] = (
                    f"it complained {len(complaints)} times of {most} ballots; it is left out"
                )
                continue
            for sender, private in complaints:
                card, ballot = self.cards.get((voter, sender)), self.ballots.get(sender)
                proof = card and ballot and Proof(voter, card, private, ballot)
                if proof and proof.is_valid(
                    self._slot(sender), verifier(self.key(voter)), verifier(self.key(sender))
                ):
                    convicted.setdefault(
                        sender,
                        f"its ballot does not open for voter {voter}, as that one proved; it is left out",
                    )
                    self.proofs.setdefault(sender, proof)
                else:
                    convicted[voter] = (
                        f"it complained of the ballot of client {sender}, which it could open; it is left out"
                    )
        return convicted

    def _take_cards(self, voter: int, frame: bytes) -> None:
        senders = self.rows[voter].senders
        if len(frame) != CARD * len(senders):
            raise FrameError(f"{len(frame)} bytes are not the cards for {len(senders)} ballots")
        cards = {
            (voter, sender): frame[i * CARD : (i + 1) * CARD] for i, sender in enumerate(senders)
        }
        made = {pair: card for pair, card in cards.items() if card != NO_CARD}
        for (_, sender), card in made.items():
            refuse_low_order(card_key(card, self._slot(sender), voter, verifier(self.key(voter))))
        self.cards |= made
        self.unknown[voter] = {sender for _, sender in cards.keys() - made.keys()}

    def _take_ballot(self, sender: int, frame: bytes) -> None:
        sealed = SealedBallot.read(frame, self._slot(sender), verifier(self.key(sender)))
        if sealed.size != (self.numel + 7) // 8:
            raise FrameError(
                f"a ballot of {sealed.size} bytes is not one of {self.numel} coordinates"
            )
        passed_on = {
            voter: card[:KEY]
            for (voter, other), card in self.cards.items()
            if other == sender and voter in self.present
        }
        if {voter: public for voter, (public, _) in sealed.wraps.items()} != passed_on:
            raise FrameError(
                "the ballot is sealed for others than those whose cards were passed on"
            )
        self.ballots[sender] = frame

    def _slot(self, sender: int) -> Slot:
        return Slot(self.ring.run, self.attempt, self.round, sender, self.terms)
