"""A client of a sealed election answers each phase of a round once and reveals no ballot, even to a malicious server."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from cases import for_each

from fedcomp.codecs import Context, codec
from fedcomp.errors import FedcompError, FrameError, ProtocolError
from fedcomp.keys.keyring import DerivedKeys, verifier
from fedcomp.layout import Layout
from fedcomp.memories import memory
from fedcomp.messages import UP_TO_DATE, Assignment
from fedcomp.privacy.ballots import CARD, KEY, Card, SealedBallot, Slot
from fedcomp.sim.attacks.equivocation import replace_wraps
from fedcomp.strategies import sealed_election
from fedcomp.strategies.base import DataPartition, RoundState
from fedcomp.strategies.codes import BALLOTS, ROW, TALLY, CodeRow
from fedcomp.strategies.sealed_election import (
    ATTEMPT,
    BITS,
    CARDS,
    KEY_OF,
    RECOUNT,
    TERMS,
    SealedElectionClient,
    pack_complaints,
    split_vote,
    terms_of,
)

NUMEL, ALL = 10, (0, 1, 2, 3, 4)
A, B, C, D = (letter * 32 for letter in "abcd")  # attempts
RING = DerivedKeys(1)
LAYOUT = Layout.from_shapes({"w": (NUMEL,)})


def slot(attempt: str, round: int, sender: int) -> Slot:
    return Slot(RING.run, attempt, round, sender, terms_of("", "", 1.0))


@dataclass
class One:
    """A client of an election of five, with hand-made assignments."""

    who: int
    round_state: RoundState | None = None
    algorithm: SealedElectionClient = field(default_factory=lambda: SealedElectionClient(ring=RING))

    def ask(self, phase: str, told: Mapping[str, bytes], attempt: str = A, round: int = 1) -> bytes:
        announced = {ATTEMPT: attempt.encode(), TERMS: terms_of("", "", 1.0).encode(), **told}
        flat = [part for name, value in announced.items() for part in (name.encode(), value)]
        assignment = Assignment(round, phase, self.who, UP_TO_DATE, "", "v", "", [], "", flat)
        opens = self.algorithm.starts_round(assignment, self.round_state)
        held = (
            RoundState(round, 0.0, self.algorithm.initial_values(assignment, self.round_state))
            if opens
            else self.round_state
        )
        context, keeps = (
            Context(round=round, phase=phase, announced=announced),
            memory("none", codec("sign"), NUMEL, LAYOUT),
        )
        x = (
            torch.randn(NUMEL, generator=torch.Generator().manual_seed(self.who))
            if opens
            else self.algorithm.later_update(keeps, held.values, 1, context)
        )
        x = None if x is None else x[None]
        (frame,) = self.algorithm.encode([keeps], x, [held.values], [1], context)
        if isinstance(frame, FedcompError):
            raise frame
        self.round_state = held
        return frame

    def open(
        self, attempt: str = A, round: int = 1, senders: tuple[int, ...] = ALL
    ) -> dict[int, bytes]:
        row = CodeRow(self.who, self.who, tuple(DataPartition(s, (s,)) for s in senders))
        keys = {f"{KEY_OF}{who}": RING.key(who) for who in (*ALL, 9)}
        cards = self.ask(CARDS, {ROW: row.pack()} | keys, attempt, round)
        size = len(cards) // len(senders)
        return {sender: cards[i * size : (i + 1) * size] for i, sender in enumerate(senders)}


@pytest.fixture
def opened() -> tuple[list[One], list[dict[int, bytes]]]:
    clients = [One(who) for who in ALL]
    return clients, [client.open() for client in clients]


def ballots_of(clients, cards) -> dict[str, bytes]:
    return {
        str(c.who): c.ask(BALLOTS, {str(v): cards[v][c.who] for v in range(len(clients))})
        for c in clients
    }


def test_a_client_makes_no_ballot_if_the_server_did_not_announce_its_own_key():
    client = One(0)
    row = CodeRow(0, 0, tuple(DataPartition(s, (s,)) for s in ALL))
    client.ask(CARDS, {ROW: row.pack()} | {f"{KEY_OF}{who}": RING.key(who) for who in ALL[1:]})
    with pytest.raises(ProtocolError, match="data that phase 'ballots' needs"):
        client.ask(BALLOTS, {})


def test_a_voter_votes_only_on_one_set_of_ballots(opened):
    """Votes on growing sets would reveal the ballot that was added last."""
    clients, cards = opened
    sealed = ballots_of(clients, cards)
    assert clients[0].ask(TALLY, {s: sealed[s] for s in "012"})
    for more in ("0123", "01234", "012"):
        with pytest.raises(ProtocolError, match="a client answers only one"):
            clients[0].ask(TALLY, {s: sealed[s] for s in more})
    assert clients[0].ask(RECOUNT, {})
    with pytest.raises(ProtocolError, match="a client answers only one"):
        clients[0].ask(RECOUNT, {})


def test_a_voter_does_not_vote_after_it_refused_to_vote(opened):
    clients, cards = opened
    sealed = ballots_of(clients, cards)
    with pytest.raises(ProtocolError, match="would reveal the ballots"):
        clients[0].ask(TALLY, {s: sealed[s] for s in "01"})
    with pytest.raises(ProtocolError, match="a client answers only one"):
        clients[0].ask(TALLY, {s: sealed[s] for s in "01234"})


def test_a_sender_signs_one_ballot_for_a_slot(opened):
    clients, cards = opened
    ballots_of(clients, cards)
    with pytest.raises(ProtocolError, match="a client answers only one"):
        clients[0].ask(BALLOTS, {str(v): cards[v][0] for v in ALL})


def test_a_client_starts_no_round_twice_in_an_attempt_or_in_an_earlier_attempt(opened):
    client = opened[0][0]
    for round in (1, 0):
        with pytest.raises(ProtocolError, match="server starts round"):
            client.open(round=round)
    client.open(B, round=1)  # a server that was restarted
    client.open(B, round=2)
    with pytest.raises(ProtocolError, match="an earlier attempt"):
        client.open(A, round=3)
    with pytest.raises(ProtocolError, match="server was restarted"):
        client.ask(BALLOTS, {}, C, 2)


def test_more_attempts_than_the_limit_are_refused(monkeypatch):
    """A server could repeat an attempt that the client forgot."""
    monkeypatch.setattr(sealed_election, "MAX_ATTEMPTS", 3)
    client = One(0)
    for attempt in (A, B, C):
        client.open(attempt)
    with pytest.raises(ProtocolError, match="at least 4 times"):
        client.open(D)
    client.open(C, round=2)


def test_a_restarted_client_knows_which_phases_it_answered(opened):
    """A client stores `RoundState` with its report."""
    clients, cards = opened
    ballots_of(clients, cards)
    again = One(
        0,
        RoundState(
            1, 0.0, {name: bytes(value) for name, value in clients[0].round_state.values.items()}
        ),
    )
    with pytest.raises(ProtocolError, match="a client answers only one"):
        again.ask(BALLOTS, {str(v): cards[v][0] for v in ALL})
    with pytest.raises(ProtocolError, match="client signed messages of round 1"):
        again.open()


def test_a_ballot_is_sealed_only_for_voters_in_the_announced_row(opened):
    clients, cards = opened
    foreign = Card.make(slot(A, 1, 0), 9, RING.signer(9))
    with pytest.raises(ProtocolError, match="for client 9, which is not a voter"):
        clients[0].ask(BALLOTS, {str(v): cards[v][0] for v in ALL} | {"9": foreign.data})


def test_a_voter_reveals_no_key_for_a_ballot_sealed_for_another_card(opened):
    clients, cards = opened
    sealed = {
        str(c.who): c.ask(BALLOTS, {str(v): cards[v][c.who] for v in ALL[1:]}) for c in clients
    }
    with pytest.raises(ProtocolError, match="not encrypted with the public key"):
        clients[0].ask(TALLY, sealed)
    assert len(cards[0][1]) > KEY


@for_each("parts", [
    [(0,), (1,), (2,), (2,), (2,)], [(0, 1, 2, 2, 2)],  # one ballot outvotes the others
    [(0,), (1,), (2,), (3, 4)], [(0,), (1, 2, 3, 4)], [(0, 1, 2, 3, 4)],  # random signs of ties are known to the server; too few partitions
    [(2,), (0, 1, 3), (4,)],  # one client alone in a partition weighs more than three that share one
    [(1,), (2,), (3,)],  # without the voter
])  # fmt: skip
def test_a_row_with_unequal_weights_is_refused(parts):
    client = One(0)
    row = CodeRow(0, 0, tuple(DataPartition(number, sets) for number, sets in enumerate(parts)))
    with pytest.raises(ProtocolError, match="announced row"):
        client.ask(CARDS, {ROW: row.pack()} | {f"{KEY_OF}{who}": RING.key(who) for who in ALL})


@for_each("numbers", [(0, 1, 1), (0, 1, 3), (1, 0, 2), (0, 1, -1)])
def test_partitions_must_have_the_numbers_of_the_code(numbers):
    """The random signs of a missing ballot depend on the number: a server that chooses the number would choose the signs."""
    row = CodeRow(0, 0, tuple(DataPartition(number, (who,)) for who, number in enumerate(numbers)))
    with pytest.raises(ProtocolError, match="announced row"):
        One(0).ask(CARDS, {ROW: row.pack()} | {f"{KEY_OF}{who}": RING.key(who) for who in ALL})


def test_three_ballots_in_one_partition_are_too_few_to_vote_on():
    """The other partitions would get random signs that the server knows."""
    clients = [One(who) for who in range(9)]
    row = [tuple(DataPartition(j, (3 * j, 3 * j + 1, 3 * j + 2)) for j in range(3))] * 9
    keys = {f"{KEY_OF}{who}": RING.key(who) for who in range(9)}
    cards = []
    for client in clients:
        sent = client.ask(
            CARDS, {ROW: CodeRow(client.who, client.who, row[client.who]).pack()} | keys
        )
        cards.append({sender: sent[sender * CARD : (sender + 1) * CARD] for sender in range(9)})
    sealed = ballots_of(clients, cards)
    with pytest.raises(ProtocolError, match="partitions with valid ballots is 1"):
        clients[0].ask(TALLY, {s: sealed[s] for s in "012"})
    assert clients[1].ask(TALLY, {s: sealed[s] for s in "036"})


@for_each(
    "name",
    [
        b"\x80" * 32,
        b"\x81" * 32,
        b"",
        b"a",
        b"A" * 32,
        b"a" * 33,
        b"a" * 31 + b"\n",
        b"a" * 32 + b"\n",
    ],
)
def test_the_name_of_an_attempt_must_have_32_hexadecimal_digits(name):
    """Two spellings of one name would give one slot in signatures, but two attempts in the client's records."""
    keys = {f"{KEY_OF}{who}": RING.key(who) for who in ALL}
    row = CodeRow(0, 0, tuple(DataPartition(s, (s,)) for s in ALL))
    with pytest.raises(ProtocolError, match="32 hexadecimal digits"):
        One(0).ask(CARDS, {ROW: row.pack()} | keys | {ATTEMPT: name})


@for_each("which", [" 1", "+1", "01", "1_0", "-1", "x", "", "²", "١", "1\n", "9" * 19])
def test_the_number_of_a_client_has_one_spelling(which):
    row = CodeRow(0, 0, tuple(DataPartition(s, (s,)) for s in ALL))
    with pytest.raises(ProtocolError, match="does not end with a client id"):
        One(0).ask(
            CARDS,
            {ROW: row.pack(), f"{KEY_OF}{which}": RING.key(1)}
            | {f"{KEY_OF}{who}": RING.key(who) for who in ALL},
        )


@pytest.mark.parametrize("name", ["01", "+1", "١", "x", ""])
def test_the_number_of_a_voter_has_one_spelling(opened, name):
    clients, cards = opened
    with pytest.raises(ProtocolError, match="does not end with a client id"):
        clients[0].ask(BALLOTS, {str(v): cards[v][0] for v in ALL} | {name: cards[1][0]})


def test_a_vote_that_is_cut_off_within_its_complaints_is_refused():
    head = pack_complaints({1: bytes(32), 2: bytes([7]) * 32})
    assert split_vote(head + b"vote") == ([(1, bytes(32)), (2, bytes([7]) * 32)], b"vote")
    for length in range(len(head)):
        with pytest.raises(FrameError, match="its list of complaints"):
            split_vote(head[:length])


def test_bits_after_the_last_coordinate_of_a_ballot_are_cleared(opened):
    """Otherwise, one sender could prevent all voters from voting."""
    clients, cards = opened
    values = clients[1].round_state.values
    values[BITS] = values[BITS][:-1] + bytes([values[BITS][-1] | 0x3F])
    sealed = ballots_of(clients, cards)
    frames = [client.ask(TALLY, sealed) for client in clients]
    for frame in frames:
        complaints, vote = split_vote(frame)
        assert not complaints and codec("sign").decode(vote, numel=NUMEL).abs().eq(1).all()


def test_complaints_are_sent_even_if_too_few_ballots_open(opened):
    clients, cards = opened
    sealed = ballots_of(clients, cards)
    bad = replace_wraps(sealed["1"], [0], slot(A, 1, 1), RING.signer(1), lambda size: bytes(size))
    complaints, vote = split_vote(
        clients[0].ask(TALLY, {"0": sealed["0"], "1": bad, "2": sealed["2"]})
    )
    ((sender, private),) = complaints
    assert vote == b"" and sender == 1
    assert SealedBallot.read(bad, slot(A, 1, 1), verifier(RING.key(1))).proven_bad(
        0, cards[0][1][:KEY], private
    )
    with pytest.raises(ProtocolError, match="partitions with valid ballots is 2"):
        clients[0].ask(RECOUNT, {})


def test_a_client_refuses_to_train_with_other_terms():
    """A server that can predict all ballots but one, for example with lr=0, could read the remaining one from the votes."""
    keys = {f"{KEY_OF}{who}": RING.key(who) for who in ALL}
    row = {ROW: CodeRow(0, 0, tuple(DataPartition(s, (s,)) for s in ALL)).pack()}
    for other in (terms_of("", "", 0.5), terms_of("", "f", 1.0), terms_of("{}", "", 1.0), ""):
        with pytest.raises(
            ProtocolError, match="model or the options of this client.s assignment differ"
        ):
            One(0).ask(CARDS, row | keys | {TERMS: other.encode()})


def test_a_client_refuses_cards_and_phases_with_other_terms(opened):
    clients, cards = opened
    other = Slot(RING.run, A, 1, 0, terms_of("", "f", 1.0))
    foreign = Card.make(other, 1, RING.signer(1)).data
    with pytest.raises(ProtocolError, match="of voter 1 for the ballot"):
        clients[0].ask(BALLOTS, {str(v): cards[v][0] if v != 1 else foreign for v in ALL})
    with pytest.raises(ProtocolError, match="differ from those with which this client has trained"):
        clients[2].ask(BALLOTS, {TERMS: other.terms.encode()} | {str(v): cards[v][2] for v in ALL})
