"""What a client signs and tells under sealed ballots, whatever its server asks: one answer to each phase of a round."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch

from fedcomp.clients import sealed_election
from fedcomp.clients.ballots import KEY, Card
from fedcomp.clients.election import BALLOTS, TALLY, Row
from fedcomp.clients.keyring import DerivedKeys
from fedcomp.clients.sealed_election import ATTEMPT, CARDS, KEY_OF, RECOUNT, ROW, SealedElection, slot_of
from fedcomp.clients.work import Held, Part
from fedcomp.codecs import Context, codec
from fedcomp.errors import ProtocolError
from fedcomp.layout import Layout
from fedcomp.memories import memory
from fedcomp.messages import UP_TO_DATE, Assignment

NUMEL, ALL = 10, (0, 1, 2, 3, 4)
RING = DerivedKeys(1)
LAYOUT = Layout.from_shapes({"w": (NUMEL,)})


@dataclass
class One:
    """A client of an election of five, asked by hand."""

    who: int
    held: Held | None = None
    work: SealedElection = field(default_factory=lambda: SealedElection(ring=RING))

    def ask(self, phase: str, told: Mapping[str, bytes], attempt: str = "a", round: int = 1) -> bytes:
        announced = {ATTEMPT: attempt.encode(), **told}
        flat = [part for name, value in announced.items() for part in (name.encode(), value)]
        assignment = Assignment(round, phase, self.who, UP_TO_DATE, "", "v", "", [], "", flat)
        opens = self.work.opens(assignment, self.held)
        held = Held(round, 0.0, self.work.outlasting(self.held, assignment)) if opens else self.held
        context, keeps = Context(round=round, phase=phase, announced=announced), memory("none", codec("sign"), NUMEL, LAYOUT)
        x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(self.who)) if opens else self.work.hear(keeps, held.kept, 1, context)
        frame = self.work.answer(keeps, None if x is None else x[None], held.kept, 1, context)
        self.held = held
        return frame

    def open(self, attempt: str = "a", round: int = 1, senders: tuple[int, ...] = ALL) -> dict[int, bytes]:
        row = Row(self.who, self.who, tuple(Part(s, (s,)) for s in senders))
        keys = {f"{KEY_OF}{who}": RING.key(who) for who in (*ALL, 9)}
        cards = self.ask(CARDS, {ROW: row.pack()} | keys, attempt, round)
        size = len(cards) // len(senders)
        return {sender: cards[i * size : (i + 1) * size] for i, sender in enumerate(senders)}


@pytest.fixture
def opened() -> tuple[list[One], list[dict[int, bytes]]]:
    clients = [One(who) for who in ALL]
    return clients, [client.open() for client in clients]


def ballots_of(clients, cards) -> dict[str, bytes]:
    return {str(c.who): c.ask(BALLOTS, {str(v): cards[v][c.who] for v in ALL}) for c in clients}


def test_a_voter_votes_once_on_one_set_of_ballots(opened):
    """Votes on growing sets would tell what is in the last that came."""
    clients, cards = opened
    sealed = ballots_of(clients, cards)
    assert clients[0].ask(TALLY, {s: sealed[s] for s in "012"})
    for more in ("0123", "01234", "012"):
        with pytest.raises(ProtocolError, match="which has one answer"):
            clients[0].ask(TALLY, {s: sealed[s] for s in more})
    assert clients[0].ask(RECOUNT, {})
    with pytest.raises(ProtocolError, match="which has one answer"):
        clients[0].ask(RECOUNT, {})


def test_nor_after_a_vote_that_it_refused(opened):
    clients, cards = opened
    sealed = ballots_of(clients, cards)
    with pytest.raises(ProtocolError, match="would tell what they are"):
        clients[0].ask(TALLY, {s: sealed[s] for s in "01"})
    with pytest.raises(ProtocolError, match="which has one answer"):
        clients[0].ask(TALLY, {s: sealed[s] for s in "01234"})


def test_a_sender_signs_one_ballot_for_a_slot(opened):
    clients, cards = opened
    ballots_of(clients, cards)
    with pytest.raises(ProtocolError, match="which has one answer"):
        clients[0].ask(BALLOTS, {str(v): cards[v][0] for v in ALL})


def test_a_round_is_not_opened_again_under_its_attempt_nor_under_one_that_was_given_up(opened):
    client = opened[0][0]
    for round in (1, 0):
        with pytest.raises(ProtocolError, match="asks again for round"):
            client.open(round=round)
    client.open("b", round=1)  # a server that began anew
    client.open("b", round=2)
    with pytest.raises(ProtocolError, match="given up"):
        client.open("a", round=3)
    with pytest.raises(ProtocolError, match="another attempt"):
        client.ask(BALLOTS, {}, "c", 2)


def test_attempts_without_end_are_not_remembered_but_refused(monkeypatch):
    """One that was forgotten could be come back to."""
    monkeypatch.setattr(sealed_election, "MOST_ATTEMPTS", 3)
    client = One(0)
    for attempt in "abc":
        client.open(attempt)
    with pytest.raises(ProtocolError, match="attempt 4 of the run"):
        client.open("d")
    client.open("c", round=2)


def test_what_was_answered_is_told_from_what_is_kept_on_the_disk(opened):
    """A client keeps `Held` with its report: after a restart it stands where it stood."""
    clients, cards = opened
    ballots_of(clients, cards)
    again = One(0, Held(1, 0.0, {name: bytes(value) for name, value in clients[0].held.kept.items()}))
    with pytest.raises(ProtocolError, match="which has one answer"):
        again.ask(BALLOTS, {str(v): cards[v][0] for v in ALL})
    with pytest.raises(ProtocolError, match="asks again"):
        again.open()


def test_a_ballot_is_sealed_for_nobody_but_the_row_that_was_announced(opened):
    clients, cards = opened
    foreign = Card.make(slot_of(RING.run, {ATTEMPT: b"a"}, 1, 0), 9, RING.signer(9))
    with pytest.raises(ProtocolError, match="for client 9, which is not in the row"):
        clients[0].ask(BALLOTS, {str(v): cards[v][0] for v in ALL} | {"9": foreign.data})


def test_a_voter_that_is_passed_a_ballot_for_another_card_gives_no_key_away(opened):
    clients, cards = opened
    sealed = {str(c.who): c.ask(BALLOTS, {str(v): cards[v][c.who] for v in ALL[1:]}) for c in clients}
    with pytest.raises(ProtocolError, match="not sealed for the card"):
        clients[0].ask(TALLY, sealed)
    assert len(cards[0][1]) > KEY
