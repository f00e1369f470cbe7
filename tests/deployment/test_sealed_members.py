"""Clients with keys in sealed elections: signatures are remembered across runs, and a changed key excludes its client."""

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from test_process import a_loop, invitation, own, rounds

from fedcomp import RunConfig, UserError
from fedcomp.deployment import log_messages
from fedcomp.deployment.deployed_client import DeployedClient
from fedcomp.errors import ProtocolError
from fedcomp.keys import signature_log
from fedcomp.keys.keyring import point_of
from fedcomp.keys.signature_log import SignatureLog
from fedcomp.messages import UPDATE, Assignment
from fedcomp.privacy.ballots import CARD, Card, SealedBallot, Slot
from fedcomp.state_folder import StateFolder
from fedcomp.strategies import resolved
from fedcomp.strategies.base import DataPartition
from fedcomp.strategies.codes import BALLOTS, ROW, CodeRow
from fedcomp.strategies.sealed_election import CARDS, KEY_OF, terms_of, unknown_keys

CONFIG = resolved(
    RunConfig(
        clients=5,
        participation=1.0,
        batch_size=10,
        strategy="election:byzantine=2,form=ballots,sealed=true,f=1",
    )
)
KEYS, FALSE = ([ec.generate_private_key(ec.SECP384R1()) for _ in range(5)] for _ in range(2))
A, B = "a" * 32, "b" * 32  # attempts


class Server:
    """A malicious server that sends any assignment to client 0, `member`, which has a state folder or none."""

    def __init__(self, folder):
        self.folder, self.loop, self.state = folder, a_loop(CONFIG), None
        self.restart()

    def restart(self, key: ec.EllipticCurvePrivateKey = KEYS[0]) -> None:
        if self.state is not None:
            self.state.close()
        self.state = StateFolder(self.folder) if self.folder else None
        self.member = DeployedClient(own(0), self.state)
        self.member.key = key

    def invite(self, run: str, client: int = -1) -> None:
        self.member.join(replace(invitation(CONFIG, self.loop, client), run=run))

    def ask(self, phase: str, announced: dict[str, bytes], attempt: str = A, round: int = 1):
        b = self.loop.broadcasts
        announced = {"attempt": attempt.encode(), "terms": self.terms.encode(), **announced}
        flat = [part for name, value in announced.items() for part in (name.encode(), value)]
        self.asked = Assignment(
            round, phase, 0, "up-to-date", b.version, b.version, b.fingerprint, [], "", flat
        )
        return self.member.answer(self.asked)

    @property
    def terms(self) -> str:
        options = self.member.session.algorithm.options
        return terms_of(options, self.loop.broadcasts.fingerprint, 1.0)

    def cards(self, attempt: str = A, round: int = 1, keys=KEYS):
        points = {
            f"{KEY_OF}{i}": point_of((KEYS[0] if i == 0 else key).public_key())
            for i, key in enumerate(keys)
        }
        return self.ask(
            CARDS,
            {ROW: CodeRow(0, 0, tuple(DataPartition(j, (j,)) for j in range(5))).pack()} | points,
            attempt,
            round,
        )

    def ballot(self, run: str, cards: bytes, attempt: str = A, round: int = 1) -> SealedBallot:
        slot = Slot(run, attempt, round, 0, self.terms)
        announced = {"0": cards[:CARD]} | {
            str(i): Card.make(slot, i, KEYS[i]).data for i in range(1, 5)
        }
        report = self.ask(BALLOTS, announced, attempt, round)
        assert report.kind == UPDATE, report.reason
        return SealedBallot.read(report.frame, slot, KEYS[0].public_key())


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
        assert (again.kind, again.stage) == (
            "failed",
            "phase",
        ) and "client signed messages of round 1" in again.reason


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
    assert server.cards(keys=[*KEYS[:2], *FALSE[2:]]).kind == UPDATE, (
        "the pinned keys are those of another run"
    )
    server.invite("A")
    refused = server.cards(B, keys=FALSE)
    assert (
        refused.kind == "failed"
        and "knows the keys of only 1 of the clients whose ballots" in refused.reason
    )


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
    report = server.ask(
        BALLOTS,
        {"0": cards[:CARD]} | {str(i): Card.make(slot, i, KEYS[i]).data for i in range(1, 5)},
    )
    assert report.kind == "failed"


def test_pinned_keys_survive_a_run_with_another_strategy(tmp_path):
    server, strategy = Server(tmp_path), "average"
    server.invite("A")
    server.cards()
    server.restart()
    config = resolved(RunConfig(clients=5, participation=1.0, batch_size=10, strategy=strategy))
    plain = a_loop(config)
    server.member.join(replace(invitation(config, plain), run="A"))
    b = plain.broadcasts
    assert (
        server.member.answer(
            Assignment(1, "train", 0, "up-to-date", b.version, b.version, b.fingerprint, [], "")
        ).kind
        == UPDATE
    )
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
    for kept in (SignatureLog(StateFolder(tmp_path)), SignatureLog()):
        kept.add("A", {"x": b"1"})
        kept.add("B", {"x": b"2"})
        with pytest.raises(UserError, match="--state-dir"):
            kept.add("C", {"x": b"3"})
        kept.add("A", {"y": b"4"})
        assert (kept.entries("A"), kept.entries("B"), kept.entries("C")) == (
            {"x": b"1", "y": b"4"},
            {"x": b"2"},
            {},
        )


def test_a_sealed_client_refuses_other_strategies():
    """Otherwise a server could read updates by choosing another strategy."""
    for strategy in ("election:byzantine=2,form=ballots", "average"):
        config = resolved(RunConfig(clients=5, participation=1.0, batch_size=10, strategy=strategy))
        with pytest.raises(UserError, match=f"--sealed.*{strategy}.*leave --sealed out"):
            DeployedClient(own(0, sealed=True), None).join(invitation(config, a_loop(config)))
    member = DeployedClient(own(0, sealed=True), None)
    member.key = KEYS[0]
    assert not member.join(invitation(CONFIG, a_loop(CONFIG))).reason


class Members:
    """Clients 0..4 in this process, which may have a roster or get another key."""

    at_once, clients = 1, 5

    def __init__(self, rosters=None):
        self.loop, self.keys = a_loop(CONFIG), dict(enumerate(KEYS))
        self.invited = invitation(CONFIG, self.loop)
        self.loop.strategy.set_identity(
            self.invited.run,
            lambda client: point_of(self.keys[client].public_key()),
            self.invited.options,
        )
        self.members = {}
        for client in range(5):
            self.members[client] = DeployedClient(
                own(client, roster=(rosters or {}).get(client)), None
            )
            self.members[client].key = KEYS[client]
            self.members[client].join(self.invited)
        self.rounds = rounds(self.loop, self, range(1, 100))

    def renew(self, client: int) -> None:
        """Replace a client by one with a new key and the signature log of the old one."""
        kept, self.keys[client] = self.members[client].log, FALSE[client]
        self.members[client] = DeployedClient(own(client), None)
        self.members[client].key, self.members[client].log = FALSE[client], kept
        self.members[client].join(self.invited)

    def handle(self, assignments):
        return [self.members[a.client].answer(a) for a in assignments]


def test_a_renewed_key_excludes_only_its_client():
    members = Members()
    assert len(next(members.rounds).accepted) == 5
    members.renew(1)
    for _ in range(2):
        outcome = next(members.rounds)
        (rejection,) = outcome.rejections
        assert outcome.broadcast is not None and [a.client for a in outcome.accepted] == [
            0,
            2,
            3,
            4,
        ]
        assert (
            rejection.client == 1
            and "4 voters do not accept the key of this client" in rejection.reason
            and "next run" in rejection.reason
        )


def test_a_roster_without_a_client_excludes_only_that_client():
    points = {client: point_of(key.public_key()) for client, key in enumerate(KEYS) if client != 3}
    everybody = next(Members({client: points for client in (0, 1, 2, 4)}).rounds)
    assert (
        [r.client for r in everybody.rejections] == [3]
        and len(everybody.accepted) == 4
        and everybody.broadcast is not None
    )
    alone = next(Members({2: points}).rounds)
    assert (
        [r.client for r in alone.rejections] == [2]
        and len(alone.accepted) == 4
        and alone.broadcast is not None
    )
    assert (
        "this client lacks the key of client 3" in alone.rejections[0].reason
        and "newest --roster" in alone.rejections[0].reason
    )
