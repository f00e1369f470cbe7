"""Clients in sealed elections: they keep their signatures across runs, and a changed key excludes its client."""

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from test_process import invitation, new_config, new_loop, rounds, setup_of, up_to_date

from fedcomp import UserError
from fedcomp.deployment import log_messages
from fedcomp.deployment.deployed_client import DeployedClient
from fedcomp.errors import ProtocolError
from fedcomp.keys import signature_log
from fedcomp.keys.keyring import point_of
from fedcomp.keys.signature_log import SignatureLog
from fedcomp.messages import UPDATE
from fedcomp.privacy.ballots import CARD, Card, SealedBallot, Slot
from fedcomp.state_folder import StateFolder
from fedcomp.strategies.base import DataPartition
from fedcomp.strategies.codes import BALLOTS, ROW, CodeRow
from fedcomp.strategies.sealed_election import CARDS, KEY_OF, terms_of, unknown_keys

CONFIG = new_config(clients=5, strategy="election:byzantine=2,form=ballots,sealed=true,f=1")
KEYS, FALSE = ([ec.generate_private_key(ec.SECP384R1()) for _ in range(5)] for _ in range(2))
A, B = "a" * 32, "b" * 32  # attempts


class Server:
    """A malicious server that sends assignments to client 0 (`member`). `folder`: the client's state folder, or None."""

    def __init__(self, folder):
        self.folder, self.loop, self.state = folder, new_loop(CONFIG), None
        self.restart()

    def restart(self, key: ec.EllipticCurvePrivateKey = KEYS[0]) -> None:
        if self.state is not None:
            self.state.close()
        self.state = StateFolder(self.folder) if self.folder else None
        self.member = DeployedClient(setup_of(0), self.state)
        self.member.key = key

    def invite(self, run: str, client: int = -1) -> None:
        self.member.join(replace(invitation(CONFIG, self.loop, client), run=run))

    def ask(self, phase: str, announced: dict[str, bytes], attempt: str = A, round: int = 1):
        announced = {"attempt": attempt.encode(), "terms": self.terms.encode(), **announced}
        flat = [part for name, value in announced.items() for part in (name.encode(), value)]
        self.asked = replace(up_to_date(self.loop), round=round, phase=phase, announced=flat)
        return self.member.answer(self.asked)

    @property
    def terms(self) -> str:
        options = self.member.session.algorithm.options
        return terms_of(options, self.loop.broadcasts.fingerprint, 1.0)

    def cards(self, attempt: str = A, round: int = 1, keys=KEYS):
        """Ask for the client's cards (signed keys), and announce the clients' public keys."""
        row = CodeRow(0, 0, tuple(DataPartition(j, (j,)) for j in range(5)))
        points = [point_of(key.public_key()) for key in (KEYS[0], *keys[1:])]
        announced = {f"{KEY_OF}{client}": point for client, point in enumerate(points)}
        return self.ask(CARDS, {ROW: row.pack()} | announced, attempt, round)

    def ballot(self, run: str, cards: bytes, attempt: str = A, round: int = 1) -> SealedBallot:
        """Ask for the client's sealed ballot, and return it."""
        slot = Slot(run, attempt, round, 0, self.terms)
        report = self.ask(BALLOTS, cards_for(slot, cards[:CARD]), attempt, round)
        assert report.kind == UPDATE, report.reason
        return SealedBallot.read(report.frame, slot, KEYS[0].public_key())


def cards_for(slot: Slot, first: bytes) -> dict[str, bytes]:
    """Return the card of client 0, and new cards of the others."""
    return {"0": first} | {str(i): Card.make(slot, i, KEYS[i]).data for i in range(1, 5)}


@pytest.fixture(params=["with a state folder", "without", "started again"])
def server(request, tmp_path):
    made = Server(None if request.param == "without" else tmp_path)
    if request.param == "started again":
        invite = made.invite
        made.invite = lambda run, client=-1: (made.restart(), invite(run, client))
    return made


def test_a_client_signs_no_second_ballot_for_a_slot_after_another_run(server):
    server.invite("A")
    server.ballot("A", server.cards().frame)
    server.invite("B")
    server.ballot("B", server.cards().frame)
    for run in ("A", "B", "A"):
        server.invite(run)
        again = server.cards()
        assert (again.kind, again.stage) == ("failed", "phase")
        assert "client signed messages of round 1" in again.reason


def test_a_returning_client_joins_new_rounds_but_no_abandoned_attempt(server):
    server.invite("A")
    server.cards()
    server.cards(B)
    server.invite("B")
    server.cards()
    server.invite("A")
    assert "an earlier attempt" in server.cards(A, 2).reason
    server.ballot("A", server.cards(B, 2).frame, B, 2)


def test_the_first_announced_keys_of_a_run_are_pinned(server):
    server.invite("A")
    server.cards()
    server.invite("B")
    # The keys that were pinned in run A do not apply to run B.
    assert server.cards(keys=[*KEYS[:2], *FALSE[2:]]).kind == UPDATE
    server.invite("A")
    refused = server.cards(B, keys=FALSE)
    assert refused.kind == "failed"
    assert "knows the keys of only 1 of the clients whose ballots" in refused.reason


def test_a_client_logs_announced_keys_that_differ_from_pinned_ones(tmp_path):
    server = Server(tmp_path)

    def unknown() -> list[int]:
        return unknown_keys(server.asked, server.member.round_state)

    server.invite("A")
    assert server.cards().kind == UPDATE and unknown() == []
    assert server.cards(round=2, keys=[*KEYS[:3], FALSE[3], KEYS[4]]).kind == UPDATE
    assert unknown() == [3]
    output = log_messages.unknown(server.asked, unknown())
    assert (output.event, output.values["clients"]) == ("unknown_key", [3])
    assert "does not accept the key that the server announces for client 3" in output


def test_a_client_that_returns_from_another_run_seals_no_ballot_for_its_old_card(server):
    server.invite("A")
    cards = server.cards().frame
    server.invite("B")
    server.cards()
    server.invite("A")
    slot = Slot("A", A, 1, 0, server.terms)
    assert server.ask(BALLOTS, cards_for(slot, cards[:CARD])).kind == "failed"


def test_pinned_keys_survive_a_run_with_another_strategy(tmp_path):
    server, config = Server(tmp_path), new_config(clients=5, strategy="average")
    server.invite("A")
    server.cards()
    server.restart()
    loop = new_loop(config)
    server.member.join(replace(invitation(config, loop), run="A"))
    assert server.member.answer(up_to_date(loop)).kind == UPDATE
    server.restart()
    server.invite("A")
    assert "client signed messages of round 1" in server.cards().reason


def test_a_client_has_one_id_in_a_run(server):
    server.invite("A", 0)
    server.cards()
    server.invite("B", 0)
    with pytest.raises(ProtocolError, match="this client was client 0 earlier in this run"):
        server.invite("A", 1)


def test_a_client_seals_no_ballot_for_a_key_that_changes_within_a_round(tmp_path):
    server = Server(tmp_path)
    server.invite("A")
    server.cards()
    server.restart(FALSE[0])
    server.invite("A")
    report = server.ask(BALLOTS, {})
    assert report.kind == "failed" and "the key of this client has changed" in report.reason


def test_too_many_runs_are_refused_and_none_is_forgotten(monkeypatch, tmp_path):
    monkeypatch.setattr(signature_log, "MAX_RUNS", 2)
    for log in (SignatureLog(StateFolder(tmp_path)), SignatureLog()):
        log.add("A", {"x": b"1"})
        log.add("B", {"x": b"2"})
        with pytest.raises(UserError, match="--state-dir"):
            log.add("C", {"x": b"3"})
        log.add("A", {"y": b"4"})
        assert [log.entries(run) for run in "ABC"] == [{"x": b"1", "y": b"4"}, {"x": b"2"}, {}]


def test_a_sealed_client_refuses_other_strategies():
    """Otherwise a server could read updates by choosing another strategy."""
    for strategy in ("election:byzantine=2,form=ballots", "average"):
        config = new_config(clients=5, strategy=strategy)
        with pytest.raises(UserError, match=f"--sealed.*{strategy}.*leave --sealed out"):
            DeployedClient(setup_of(0, sealed=True), None).join(
                invitation(config, new_loop(config))
            )
    member = DeployedClient(setup_of(0, sealed=True), None)
    member.key = KEYS[0]
    assert not member.join(invitation(CONFIG, new_loop(CONFIG))).reason


class SealedClients:
    """Five clients in this process, which may have a roster or get another key."""

    at_once, clients = 1, 5

    def __init__(self, rosters=None):
        self.loop, self.keys = new_loop(CONFIG), dict(enumerate(KEYS))
        self.invited = invitation(CONFIG, self.loop)
        self.loop.strategy.set_identity(
            self.invited.run,
            lambda client: point_of(self.keys[client].public_key()),
            self.invited.options,
        )
        self.members = {}
        for client in range(5):
            self._start(client, roster=(rosters or {}).get(client))
        self.rounds = rounds(self.loop, self, range(1, 100))

    def _start(self, client: int, log: SignatureLog | None = None, **settings) -> None:
        member = self.members[client] = DeployedClient(setup_of(client, **settings), None)
        member.key, member.log = self.keys[client], log or member.log
        member.join(self.invited)

    def renew(self, client: int) -> None:
        """Replace a client by one with a new key and the signature log of the old one."""
        self.keys[client] = FALSE[client]
        self._start(client, self.members[client].log)

    def handle(self, assignments):
        return [self.members[a.client].answer(a) for a in assignments]


def only_rejection(result, client: int) -> str:
    """Return the reason for the rejection of a client in a round that accepts all other clients."""
    (rejection,) = result.rejections
    assert rejection.client == client and result.broadcast is not None
    assert [a.client for a in result.accepted] == [i for i in range(5) if i != client]
    return rejection.reason


def test_a_renewed_key_excludes_only_its_client():
    members = SealedClients()
    assert len(next(members.rounds).accepted) == 5
    members.renew(1)
    for _ in range(2):
        reason = only_rejection(next(members.rounds), 1)
        assert "4 voters do not accept the key of this client" in reason and "next run" in reason


def test_a_roster_without_a_client_excludes_only_that_client():
    points = {client: point_of(key.public_key()) for client, key in enumerate(KEYS) if client != 3}
    only_rejection(next(SealedClients({client: points for client in (0, 1, 2, 4)}).rounds), 3)
    reason = only_rejection(next(SealedClients({2: points}).rounds), 2)
    assert "this client lacks the key of client 3" in reason and "newest --roster" in reason
