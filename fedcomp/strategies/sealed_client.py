"""The client half of elections with sealed ballots. sealed_election.py has the protocol, a glossary and the server half.

A client answers each phase of a round once, whatever the server asks. Votes on several sets of ballots would reveal the ballots, and a
sender that signed two ballots for one slot would count as Byzantine.
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from .. import kernels
from ..codecs import Codec, Context
from ..codecs.base import nonfinite_errors
from ..errors import ProtocolError
from ..keys.keyring import DerivedKeys, Keyring, UnknownKey, point_of, verifier
from ..memories import Memory
from ..messages import Assignment
from ..privacy.ballots import Card, SealedBallot, Slot, UnopenableBallot, card_key, seal
from .base import ClientAlgorithm, RoundState, Values
from .local_election import (
    BALLOTS,
    ROW,
    TALLY,
    CodeRow,
    announced_row,
    announcements,
    vote_on_ballots,
)
from .sealed_election import (
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
    pack_complaints,
    partitions_with_ballots,
    terms_of,
    too_few,
)

# Names in RoundState.values, besides ROW, TERMS and KEY_OF:
ATTEMPTS = "attempts"  # attempts of the run in which the client has signed, the newest last
BITS = "bits"  # the client's own ballot
COMPLAINTS = "complaints"  # packed, until they are sent
CARD_FOR = "card/"  # by sender: the private key of this client's card
BALLOT_OF = "ballot/"  # by sender: the opened ballot
ANSWERED = "answered/"  # by phase

SIGNED = "signed/"  # in a SignatureLog: the signed attempts of a run, by the client's logical id
MAX_ATTEMPTS, ATTEMPT_BYTES = 1024, 16  # attempts of a run, bytes of each
ROUND = struct.Struct("<q")


@dataclass(frozen=True)
class SealedElectionClient(ClientAlgorithm):
    """Client half: cards, a sealed ballot, a vote on the ballots of the row, and a second vote if the server excludes a sender."""

    phases: tuple[str, ...] = (CARDS, BALLOTS, TALLY, RECOUNT)
    ring: Keyring = DerivedKeys(0)  # noqa: RUF009 — for virtual clients; devices have PinnedKeys
    options: str = ""  # options of the run, as the server announced them to the client

    one_by_one: ClassVar[bool] = True

    def starts_round(self, assignment: Assignment, state: RoundState | None) -> bool:
        """Return whether the assignment is of the first phase.

        Also raises ProtocolError if the announced terms differ from those of the assignment, and if the client has already signed this
        round in the announced attempt.
        """
        if not super().starts_round(assignment, state):
            return False
        a, announced = assignment, announcements(assignment)
        terms = terms_of(self.options, a.fingerprint, a.lr, a.steps, a.batch_size)
        if announced.get(TERMS) != terms.encode():
            raise ProtocolError(
                "the server has this client train from another model, or by other options, than it announces to all clients"
            )
        if state is not None:
            _check_attempt(state, attempt_of(announced), a.round)
        return True

    def initial_values(self, assignment: Assignment, previous: RoundState | None) -> Values:
        announced = announcements(assignment)
        attempts, attempt = signed_attempts(previous), attempt_of(announced)
        if attempts[-1:] != [attempt]:
            attempts.append(attempt)
        return {ATTEMPTS: b"".join(attempts), TERMS: announced.get(TERMS, b"")}

    def seed(self, codec: Codec, run_seed: int, assignment: Assignment) -> int:
        return super().seed(codec, run_seed, assignment) if assignment.phase == CARDS else run_seed

    def later_update(
        self, memory: Memory, values: Values, seed: int, context: Context
    ) -> Tensor | None:
        """Return the vote of the tally or the recount; None to send a ballot, or complaints without a vote."""
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
        if (partitions := partitions_with_ballots(row, opened)) < MIN_PARTITIONS:
            if values.get(COMPLAINTS, NO_COMPLAINTS) != NO_COMPLAINTS:
                return None
            raise ProtocolError(too_few(partitions))
        return vote_on_ballots(row, opened, memory.numel, seed, context.round)

    def encode_one(
        self, memory: Memory, update: Tensor | None, values: Values, seed: int, context: Context
    ) -> bytes:
        if context.phase == CARDS:
            return self._cards(memory, update, values, seed, context)
        if context.phase == BALLOTS:
            return self._ballot(values, context)
        if memory.pending is not None:  # the vote of the tally, which the recount replaces
            memory.rollback()
        complaints = values.pop(COMPLAINTS, NO_COMPLAINTS)
        if update is None:
            return complaints
        return complaints + (memory.propose(update, seed=seed, context=context) or b"")

    def slot(self, context: Context, sender: int) -> Slot:
        """Return the slot of a sender's ballot in this round."""
        attempt = attempt_of(context.announced).hex()
        terms = context.announced.get(TERMS, b"").decode("ascii", "replace")
        return Slot(self.ring.run, attempt, context.round, sender, terms)

    def _start_phase(self, values: Values, context: Context) -> None:
        """Mark a phase after the first as answered.

        Raises ProtocolError if the attempt or the terms differ from those at the start of the round, and if the phase was answered
        before. (An assignment that is repeated before the next phase gets the stored answer and does not come here.)
        """
        if not _value(values, ATTEMPTS, context).endswith(attempt_of(context.announced)):
            raise ProtocolError(
                f"the server asks for phase '{context.phase}' of another attempt than the one in which this client started the round"
            )
        if values.get(TERMS) != context.announced.get(TERMS):
            raise ProtocolError(
                "the server announces another model, or other options, than this client has trained by"
            )
        if f"{ANSWERED}{context.phase}" in values:
            raise ProtocolError(
                f"the server asks again for phase '{context.phase}' of round {context.round}, which a client answers only once"
            )
        values[f"{ANSWERED}{context.phase}"] = b"1"

    def _cards(
        self, memory: Memory, update: Tensor | None, values: Values, seed: int, context: Context
    ) -> bytes:
        """Store the ballot and the private keys of the cards. Return one card for each sender of the row, ascending."""
        assert update is not None  # the first phase has an update
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
        if partitions_with_ballots(row, known) < MIN_PARTITIONS:
            raise ProtocolError(
                f"this client knows the keys of {len(known)} clients of its row, which are too few; give it the newest --roster"
            )
        cards = {s: Card.make(self.slot(context, s), row.client, signer) for s in known}
        values[ROW], values[BITS] = row.pack(), kernels.bits.signs(update, seed)
        values |= {f"{CARD_FOR}{sender}": card.private for sender, card in cards.items()}
        return b"".join(cards[s].data if s in cards else NO_CARD for s in row.senders)

    def _ballot(self, values: Values, context: Context) -> bytes:
        """Return this client's ballot, sealed for the voters whose cards the server announced."""
        row = _row(values, context)
        slot, signer = self.slot(context, row.client), self.ring.signer(row.client)
        if values[f"{KEY_OF}{row.client}"] != point_of(signer.public_key()):
            raise ProtocolError(
                "this client has another key than at the start of the round; it takes part again in the next round"
            )
        voters: dict[int, bytes] = {}
        for name, card in context.announced.items():
            if name in (ATTEMPT, TERMS):
                continue
            if (voter := client_number(name)) not in row.senders:
                raise ProtocolError(
                    f"the server asks for a ballot sealed for client {voter}, which is not in the row that it announced"
                )
            voters[voter] = card_key(card, slot, voter, _verifier(values, voter, context))
        return seal(_value(values, BITS, context), slot, voters, signer)

    def _open_ballots(self, memory: Memory, values: Values, context: Context) -> None:
        """Store the announced ballots that open, and complaints about those that do not."""
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
        """Remove the ballots of senders that the server excludes. Raises ProtocolError for a proof that is not valid."""
        for name, data in context.announced.items():
            if not name.startswith(PROOF_OF):
                continue
            sender, proof = client_number(name, PROOF_OF), Proof.unpack(data)
            key = self.ring.key(proof.voter, context.announced.get(f"{KEY_OF}{proof.voter}", b""))
            verify = _verifier(values, sender, context)
            if not proof.is_valid(self.slot(context, sender), verifier(key), verify):
                raise ProtocolError(
                    f"the server excludes client {sender}, and its proof proves nothing against that client"
                )
            values.pop(f"{BALLOT_OF}{sender}", None)


def unknown_keys(assignment: Assignment, state: RoundState | None) -> list[int]:
    """Return the clients whose announced keys this client did not accept in phase CARDS."""
    if assignment.phase != CARDS or state is None:
        return []
    return [
        client_number(name, KEY_OF)
        for name in announcements(assignment)
        if name.startswith(KEY_OF) and name not in state.values
    ]


def signed_attempts(state: RoundState | None) -> list[bytes]:
    """Return the attempts of the run in which a client has signed, the newest last. It signs each round of an attempt once."""
    known = state.values.get(ATTEMPTS, b"") if state else b""
    return [known[at : at + ATTEMPT_BYTES] for at in range(0, len(known), ATTEMPT_BYTES)]


def pack_signed(state: RoundState | None) -> bytes:
    """Return the record of a run for a client's SignatureLog when it takes part in another run; b"" if it has signed nothing."""
    attempts = b"".join(signed_attempts(state))
    return ROUND.pack(state.round) + attempts if state and attempts else b""


def unpack_signed(record: bytes) -> RoundState:
    """Return the round state of a client that comes back to a run. It holds only the round and the attempts of the record."""
    return RoundState(ROUND.unpack_from(record)[0], 0.0, {ATTEMPTS: record[ROUND.size :]})


def _check_attempt(state: RoundState, attempt: bytes, round: int) -> None:
    """Raise ProtocolError if the client may not start this round of an attempt, given the state of its previous round."""
    known = signed_attempts(state)
    if known and known[-1] == attempt and round <= state.round:
        raise ProtocolError(
            f"the server asks again for round {round} of an attempt, after round {state.round} of it"
        )
    if attempt in known[:-1]:
        raise ProtocolError(
            "the server returns to an earlier attempt of this run; a new attempt needs a new name"
        )
    if len(known) >= MAX_ATTEMPTS and known[-1] != attempt:
        raise ProtocolError(
            f"this is attempt {len(known) + 1} of the run, and at most {MAX_ATTEMPTS} are allowed; give the run a new name"
        )


def attempt_of(announced: Mapping[str, bytes]) -> bytes:
    """Return the announced attempt [16 bytes]. Raises ProtocolError."""
    attempt = announced.get(ATTEMPT, b"")
    if not re.fullmatch(rb"[0-9a-f]{32}", attempt):
        raise ProtocolError(
            "the name of the attempt is not 32 hexadecimal digits; both sides need the same version of fedcomp"
        )
    return bytes.fromhex(attempt.decode())


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


def checked_bits(packed: bytes, numel: int) -> bytes:
    """Return the bits of a ballot with zeros after the last coordinate. Raises UnopenableBallot for a ballot of another size."""
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
            f"this client has no state for phase '{context.phase}' of this round; ask it again in the next round"
        )
    return values[name]


def _row(values: Mapping[str, Any], context: Context) -> CodeRow:
    return CodeRow.unpack(_value(values, ROW, context))


def _verifier(
    values: Mapping[str, Any], client: int, context: Context
) -> ec.EllipticCurvePublicKey:
    return verifier(_value(values, f"{KEY_OF}{client}", context))
