"""The client half of elections with sealed ballots: docs/ballots.md is the protocol, ballots.py the cryptography.

    cards     trains; a card for each sender of its row, and its ballot's bits, are kept for the round
    ballots   seals the bits for the voters of its column
    tally     opens the ballots of its row, votes for the majority of those that are whole, complains of the others;
              where too few are whole it complains and does not vote
    recount   leaves out those who are proven to have sent a ballot that does not open, and votes again

What was opened is kept until the next round begins. Each phase of a round has one answer, whatever a server asks: votes on several sets of
ballots would tell what they are, and a sender that signed two ballots for one slot would be a liar. What was signed in a run is
remembered when another begins (`signed_of`, `remembered`).

A row is one of the deterministic code that counts everybody, each once: a ballot that counts more than others shows in the vote. Whose key
is not what this client holds for it, it makes no card for: a server that follows the protocol then leaves one of the two out.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from .. import kernels
from ..codecs import Codec, Context
from ..codecs.base import nonfinite_rows
from ..errors import FrameError, ProtocolError, UserError
from ..keys.keyring import DerivedKeys, PinnedKeys, Ring, UnknownKey, point_of, verifier
from ..keys.signature_log import Past
from ..memories import Memory
from ..messages import Assignment
from ..privacy.ballots import CARD, KEY, Card, Sealed, Slot, Unopenable, card_key, seal
from .announcements import (
    ATTEMPT,
    FEWEST,
    TERMS,
    attempt_of,
    full_row,
    number,
    slot_of,
    terms_of,
    too_few,
    with_ballots,
)
from .client_algorithm import ClientAlgorithm, Frame, RoundState, encode_each
from .local_election import BALLOTS, TALLY, Row, elected, of_partitions, told

CARDS, RECOUNT = "cards", "recount"  # phases
KEY_OF, PROOF_OF = "key/", "proof/"  # what is announced, by client: its key, what convicts it
ROW, BITS, CARD_FOR, BALLOT_OF, COMPLAINTS = (
    "row",
    "bits",
    "card/",
    "ballot/",
    "complaints",
)  # what is held for the round
NO_CARD = bytes(
    CARD
)  # in the place of a card: for a seat that nobody holds, or one whose key is not known
ATTEMPTS, ANSWERED = (
    "attempts",
    "answered/",
)  # likewise held: digests of a run's attempts, the newest last; by phase that it was asked
MOST_ATTEMPTS, DIGEST = 1024, 16  # that a client takes part in; bytes of each digest
SIGNED = "signed/"  # remembered of a run: by the client's logical id, in which attempts it has signed, and up to which round
ROUND = struct.Struct("<q")
COUNT = struct.Struct("<H")  # of complaints, before the vote
NONE = COUNT.pack(0)
COMPLAINT = struct.Struct(f"<q{KEY}s")  # sender, private half of the voter's card for it
PROOF = struct.Struct(
    f"<q{CARD}s{KEY}s"
)  # voter, its card, the card's private half; the ballot follows


@dataclass(frozen=True)
class SealedElection(ClientAlgorithm):
    """Votes on ballots that the server cannot read."""

    phases: tuple[str, ...] = (CARDS, BALLOTS, TALLY, RECOUNT)
    ring: Ring = DerivedKeys(0)  # noqa: RUF009 — shared by virtual clients; a real one gets its own
    options: str = ""  # of the run, as this client was told them

    def starts_round(self, assignment: Assignment, held: RoundState | None) -> bool:
        """Nor is a round opened twice under one attempt: what it has signed in its slot, a client signs nothing else for."""
        opens = super().starts_round(assignment, held)
        if opens and TERMS not in told(assignment):
            raise ProtocolError(
                "this client was not told by what the others train; both sides need the same version of fedcomp"
            )
        a = assignment
        if (
            opens
            and told(a)[TERMS]
            != terms_of(self.options, a.fingerprint, a.lr, a.steps, a.batch_size).encode()
        ):
            raise ProtocolError(
                "the server has this client train from another model, or by other options, than it announces to all"
            )
        if opens and held is not None:
            attempt, known = digest_of(told(assignment)), _digests(held.values)
            if known and known[-1] == attempt and assignment.round <= held.round:
                raise ProtocolError(
                    f"the server asks again for round {assignment.round} of an attempt, after round {held.round}"
                )
            if attempt in known[:-1]:
                raise ProtocolError(
                    "the server comes back to an attempt that it had given up; a new one needs another name"
                )
            if len(known) >= MOST_ATTEMPTS and known[-1] != attempt:
                raise ProtocolError(
                    f"this is attempt {len(known) + 1} of the run, more than {MOST_ATTEMPTS}; give the run a new name"
                )
        return opens

    def initial_values(self, assignment: Assignment, previous: RoundState | None) -> dict[str, Any]:
        known = _digests(previous.values) if previous else []
        attempt = digest_of(told(assignment))
        return {
            ATTEMPTS: b"".join(known if known[-1:] == [attempt] else [*known, attempt]),
            TERMS: told(assignment).get(TERMS, b""),
        }

    def seed(self, codec: Codec, run_seed: int, assignment: Assignment) -> int:
        return super().seed(codec, run_seed, assignment) if assignment.phase == CARDS else run_seed

    def later_update(
        self, memory: Memory, held: dict[str, Any], seed: int, context: Context
    ) -> Tensor | None:
        self._once(held, context)
        if context.phase == BALLOTS:
            return None
        if context.phase == TALLY:
            self._open(memory, held, context)
        else:
            self._leave_out(held, context)
        row = Row.unpack(_held(held, ROW, context))
        whole = {
            sender: held[name] for sender in row.senders if (name := f"{BALLOT_OF}{sender}") in held
        }
        if (there := with_ballots(row, whole)) < FEWEST:
            if held.get(COMPLAINTS, NONE) != NONE:
                return None
            raise ProtocolError(too_few(there))
        return elected(
            row,
            of_partitions(row, whole, memory.numel, seed, context.round),
            memory.numel,
            seed,
            context.round,
        )

    def encode(
        self,
        memories: Sequence[Memory],
        updates: Tensor | None,
        values: Sequence[dict[str, Any]],
        seeds: Sequence[int],
        context: Context,
    ) -> list[Frame]:
        return encode_each(self._encode_one, memories, updates, values, seeds, context)

    def _encode_one(
        self, memory: Memory, x: Tensor | None, held: dict[str, Any], seed: int, context: Context
    ) -> bytes:
        if context.phase == CARDS:
            return self._cards(memory, x, held, seed, context)
        if context.phase == BALLOTS:
            return self._ballot(held, context)
        if memory.pending is not None:  # of the tally, before a recount
            memory.rollback()
        complaints = held.pop(COMPLAINTS, NONE)
        return (
            complaints
            if x is None
            else complaints + (memory.propose(x, seed=seed, context=context) or b"")
        )

    def slot(self, context: Context, sender: int) -> Slot:
        return slot_of(self.ring.run, context.announced, context.round, sender)

    def _once(self, held: dict[str, Any], context: Context) -> None:
        """Raise ProtocolError where this phase was asked for before: two votes on different ballots tell them, two ballots convict.

        Who is asked the same again before another phase gives the answer that it kept (process.py).
        """
        if _held(held, ATTEMPTS, context)[-DIGEST:] != digest_of(context.announced):
            raise ProtocolError(
                f"the server asks for phase '{context.phase}' of another attempt than the one that this client has opened"
            )
        if held.get(TERMS) != context.announced.get(TERMS):
            raise ProtocolError(
                "the server announces another model, or other options, than this client has trained by"
            )
        if f"{ANSWERED}{context.phase}" in held:
            raise ProtocolError(
                f"the server asks again for phase '{context.phase}' of round {context.round}, which has one answer"
            )
        held[f"{ANSWERED}{context.phase}"] = b"1"

    def _cards(
        self, memory: Memory, x: Tensor, held: dict[str, Any], seed: int, context: Context
    ) -> bytes:
        (error,) = nonfinite_rows(x[None], memory.layout, "the update")
        if error is not None:
            raise error
        row = full_row(context.announced)
        signer = self.ring.signer(row.client)
        self._meet(held, context)
        known = [sender for sender in row.senders if f"{KEY_OF}{sender}" in held]
        if with_ballots(row, known) < FEWEST:
            raise ProtocolError(
                f"of the clients of its row this one knows the keys of {len(known)} alone; give it the newest --roster"
            )
        cards = {
            sender: Card.make(self.slot(context, sender), row.client, signer) for sender in known
        }
        held[ROW], held[BITS] = row.pack(), kernels.bits.signs(x, seed)
        held |= {f"{CARD_FOR}{sender}": card.private for sender, card in cards.items()}
        return b"".join(
            cards[sender].data if sender in cards else NO_CARD for sender in row.senders
        )

    def _meet(self, held: dict[str, Any], context: Context) -> None:
        """Hold the keys that were announced, but for those that are not what this client holds fixed."""
        for name, point in context.announced.items():
            if name.startswith(KEY_OF):
                try:
                    held[name] = self.ring.key(number(name, KEY_OF), point)
                except UnknownKey:
                    continue

    def _ballot(self, held: dict[str, Any], context: Context) -> bytes:
        row = Row.unpack(_held(held, ROW, context))
        slot, publics, signer = self.slot(context, row.client), {}, self.ring.signer(row.client)
        if held[f"{KEY_OF}{row.client}"] != point_of(signer.public_key()):
            raise ProtocolError(
                "this client has another key than at the start of the round; it takes part again in the next"
            )
        for name, card in context.announced.items():
            if name in (ATTEMPT, TERMS):
                continue
            if (voter := number(name)) not in row.senders:
                raise ProtocolError(
                    f"the server wants this ballot sealed for client {voter}, which is not in the row that it announced"
                )
            publics[voter] = card_key(card, slot, voter, self._verifier(held, voter, context))
        return seal(_held(held, BITS, context), slot, publics, signer)

    def _open(self, memory: Memory, held: dict[str, Any], context: Context) -> None:
        row, complaints = Row.unpack(_held(held, ROW, context)), []
        for sender in row.senders:
            if (name := str(sender)) not in context.announced:
                continue  # missing
            private = _held(held, f"{CARD_FOR}{sender}", context)
            sealed = Sealed.read(
                context.announced[name],
                self.slot(context, sender),
                self._verifier(held, sender, context),
            )
            try:
                held[f"{BALLOT_OF}{sender}"] = trimmed(
                    sealed.open(row.client, private), memory.numel
                )
            except Unopenable:
                complaints.append(COMPLAINT.pack(sender, private))
        held[COMPLAINTS] = COUNT.pack(len(complaints)) + b"".join(complaints)

    def _leave_out(self, held: dict[str, Any], context: Context) -> None:
        for name, proof in context.announced.items():
            if not name.startswith(PROOF_OF):
                continue
            sender = number(name, PROOF_OF)
            if len(proof) < PROOF.size:
                raise ProtocolError(f"what is to convict client {sender} is cut off")
            voter, card, private = PROOF.unpack_from(proof)
            slot = self.slot(context, sender)
            key = self.ring.key(voter, context.announced.get(f"{KEY_OF}{voter}", b""))
            public = card_key(card, slot, voter, verifier(key))
            if not Sealed.read(
                proof[PROOF.size :], slot, self._verifier(held, sender, context)
            ).proven_bad(voter, public, private):
                raise ProtocolError(
                    f"the server wants client {sender} left out, and what it shows proves nothing against it"
                )
            held.pop(f"{BALLOT_OF}{sender}", None)

    def _verifier(self, held: dict[str, Any], client: int, context: Context) -> Any:
        return verifier(_held(held, f"{KEY_OF}{client}", context))


def with_keys(
    work: ClientAlgorithm,
    run: str,
    options: str,
    who: int,
    key: ec.EllipticCurvePrivateKey | None,
    roster: Mapping[int, bytes] | None,
    past: Past,
) -> ClientAlgorithm:
    """A client half with this client's keys, if it signs. Raises UserError for a client that holds no key."""
    if not isinstance(work, SealedElection):
        return work
    if key is None:
        raise UserError(
            "sealed ballots are signed with the key with which a client comes to the server, and under --stock Flower's "
            "SuperNode alone has it; leave --stock out"
        )
    return replace(work, ring=PinnedKeys(run, who, key, roster, past), options=options)


def signed_of(held: RoundState | None) -> bytes:
    """What is to be remembered of a run in which a client has signed, b"" where it has not."""
    return (
        ROUND.pack(held.round) + held.values[ATTEMPTS] if held and ATTEMPTS in held.values else b""
    )


def remembered(signed: bytes) -> RoundState:
    """What a client holds that comes back to a run: nothing of its rounds, but what it must not sign again."""
    return RoundState(ROUND.unpack_from(signed)[0], 0.0, {ATTEMPTS: signed[ROUND.size :]})


def strangers(assignment: Assignment, held: RoundState | None) -> list[int]:
    """Clients whose keys, as they were just announced to this client, are not those that it takes for theirs."""
    if assignment.phase != CARDS or held is None:
        return []
    return [
        number(name, KEY_OF)
        for name in told(assignment)
        if name.startswith(KEY_OF) and name not in held.values
    ]


def digest_of(announced: Mapping[str, bytes]) -> bytes:
    """What is remembered of an attempt."""
    return sha256(attempt_of(announced).encode()).digest()[:DIGEST]


def _digests(held: Mapping[str, Any]) -> list[bytes]:
    known = held.get(ATTEMPTS, b"")
    return [known[at : at + DIGEST] for at in range(0, len(known), DIGEST)]


def with_complaints(frame: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """The complaints of a vote, (sender, private half of the voter's card), and the vote's frame. Raises FrameError."""
    if len(frame) < COUNT.size:
        raise FrameError("a vote is cut off")
    (count,) = COUNT.unpack_from(frame)
    end = COUNT.size + count * COMPLAINT.size
    if len(frame) < end:
        raise FrameError("the complaints beside a vote are cut off")
    return list(COMPLAINT.iter_unpack(frame[COUNT.size : end])), frame[end:]


def trimmed(packed: bytes, numel: int) -> bytes:
    """Bits of a ballot of the right size, with zeros past the last coordinate, whatever its sender put there. Raises Unopenable."""
    if len(packed) != (numel + 7) // 8:
        raise Unopenable(f"a ballot of {len(packed)} bytes is not one of {numel} coordinates")
    if numel % 8 == 0:
        return packed
    bits = np.frombuffer(packed, np.uint8).copy()
    bits[-1] &= 256 - (1 << -numel % 8)
    return bits.tobytes()


def _held(held: Mapping[str, Any], name: str, context: Context) -> bytes:
    if name not in held:
        raise ProtocolError(
            f"this client holds nothing for a phase '{context.phase}' of this round; ask it again in the next round"
        )
    return held[name]
