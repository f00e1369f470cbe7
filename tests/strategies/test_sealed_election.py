"""Sealed ballots in rounds: the vote equals that of open ballots, the server reads none, and cheating clients are proven and excluded."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from cases import for_each
from plugins import install

from fedcomp import RunConfig, UserError
from fedcomp.callbacks import Callback
from fedcomp.clients.session import ClientSession
from fedcomp.codecs import Context
from fedcomp.errors import ProtocolError
from fedcomp.keys.keyring import DerivedKeys, point_of
from fedcomp.layout import Layout
from fedcomp.messages import Report
from fedcomp.privacy import ballots
from fedcomp.sim import attacks, simulate
from fedcomp.sim.clients import VirtualClients
from fedcomp.strategies import StrategyConfig, strategy
from fedcomp.strategies.codes import BALLOTS, TALLY
from fedcomp.strategies.sealed_election import (
    BITS,
    CARDS,
    COMPLAINT,
    COUNT,
    KEY_OF,
    PROOF,
    PROOF_OF,
    RECOUNT,
    SealedElectionClient,
    SealedRound,
)

TASK = Path(__file__).parents[1] / "tiny_task.py"
OPEN = RunConfig(
    task=f"{TASK}:task",
    clients=5,
    participation=1.0,
    rounds=3,
    local_steps=1,
    batch_size=1,
    lr=0.02,
    partition="classes:1",
    strategy="election:byzantine=2,form=ballots",
)
SEALED = replace(OPEN, strategy="election:byzantine=2,form=ballots,sealed=true")


@dataclass
class Heard:
    """The reports that a server received, and the ballots of its clients."""

    reports: list[Report]
    ballots: dict[tuple[int, int], bytes]  # by round and client
    summary: object = None
    model: bytes = b""

    def of(self, phase: str) -> list[Report]:
        return [report for report in self.reports if report.phase == phase]


def run(
    monkeypatch, tmp_path, config: RunConfig, name: str = "run", callback: Callback | None = None
) -> Heard:
    heard, handle = Heard([], {}), VirtualClients.handle

    def listened(self, assignments):
        reports = handle(self, assignments)
        heard.reports += reports
        heard.ballots |= {
            (h.round, client): h.values[BITS]
            for client, h in self.rounds.items()
            if BITS in h.values
        }
        return reports

    with monkeypatch.context() as patch:
        patch.setattr(VirtualClients, "handle", listened)
        heard.summary = simulate(replace(config, out=str(tmp_path / name)), callback)
    heard.model = Path(tmp_path, name, "model.safetensors").read_bytes()
    return heard


def complement(packed: bytes) -> bytes:
    return bytes(255 - byte for byte in packed)


def test_the_model_equals_that_of_open_ballots(monkeypatch, tmp_path):
    models = [
        run(
            monkeypatch,
            tmp_path,
            replace(config, rounds=2, attack="inverted:1+random-sign:1"),
            config.strategy,
        ).model
        for config in (OPEN, SEALED)
    ]
    assert models[0] == models[1]


def test_the_server_never_receives_a_readable_ballot(monkeypatch, tmp_path):
    """The received bytes contain no sealed ballot in any form, but all open ballots."""
    wide = f"{TASK}:wide"
    sealed = run(monkeypatch, tmp_path, replace(SEALED, task=wide, rounds=2))
    received = b"\x00".join(report.pack() for report in sealed.reports)
    assert (
        len(sealed.ballots) == 2 * 5
        and len(set(sealed.ballots.values())) == 10
        and len(received) > 2 * 5 * 1251
    )
    for packed in sealed.ballots.values():
        for piece in (
            packed[:-1],
            complement(packed[:-1]),
            packed[100:140],
            complement(packed[100:140]),
        ):
            assert len(set(piece)) > 4 and (piece not in received or is_voted(sealed, piece))
        assert packed[:-1] not in received and complement(packed[:-1]) not in received
    opened = b"\x00".join(
        report.pack()
        for report in run(monkeypatch, tmp_path, replace(OPEN, task=wide, rounds=2), "open").reports
    )
    assert all(packed[:-1] in opened for packed in sealed.ballots.values())


def is_voted(heard: Heard, piece: bytes) -> bool:
    """Return whether part of a ballot occurs only in votes, which is possible if the majority equals it."""
    return all(
        piece not in report.pack() for phase in (CARDS, BALLOTS) for report in heard.of(phase)
    )


def test_a_ballot_costs_its_bits_once_and_a_fixed_amount_for_each_voter(monkeypatch, tmp_path):
    heard = run(monkeypatch, tmp_path, replace(SEALED, rounds=1))
    assert {len(report.frame) for report in heard.of(BALLOTS)} == {6 + 210 + 5 * 84}
    assert {len(report.frame) for report in heard.of(CARDS)} == {5 * ballots.CARD}


def test_an_equivocating_sender_is_named_and_excluded(monkeypatch, tmp_path):
    lied = run(
        monkeypatch,
        tmp_path,
        replace(SEALED, rounds=2, attack="equivocation:clients=1,share=0.4"),
        "lied",
    )
    (rejections,) = lied.summary.rejections
    assert (list(rejections.clients), rejections.updates) == (
        [1],
        2,
    ) and "cannot decrypt the client's ballot" in rejections.reason
    assert len(lied.of(RECOUNT)) == 2 * 5
    silent = run(
        monkeypatch, tmp_path, replace(SEALED, rounds=2, attack="malformed:clients=1"), "silent"
    )
    assert lied.model == silent.model, "the model equals that without its ballot"
    assert not silent.of(RECOUNT)


def test_two_equivocating_senders_are_tolerated(monkeypatch, tmp_path):
    heard = run(monkeypatch, tmp_path, replace(SEALED, rounds=1, attack="equivocation:2"))
    assert heard.summary.client_updates == 3 and {
        c for r in heard.summary.rejections for c in r.clients
    } == set(attacked(2))


def attacked(count: int) -> list[int]:
    return sorted(attacks.ByzantineClients(attacks.attacks(f"equivocation:{count}"), 5, 0).fixed)


@dataclass(frozen=True)
class FalseComplaint(attacks.Attack):
    """An attack that complains about every ballot with random keys."""

    times: int = 1
    name = "false-complaint"

    def reply(self, report, sender):
        if report.phase != TALLY:
            return report
        complaints = (
            b"".join(COMPLAINT.pack(client, sender.generator.bytes(32)) for client in range(5))
            * self.times
        )
        return replace(
            report, frame=COUNT.pack(5 * self.times) + complaints + report.frame[COUNT.size :]
        )


@dataclass(frozen=True)
class Replay(attacks.Attack):
    """An attack that repeats the frame of the first round."""

    phase: str = BALLOTS
    name = "replay"

    def reply(self, report, sender):
        return (
            replace(report, frame=SENT.setdefault((report.client, report.phase), report.frame))
            if report.phase == self.phase
            else report
        )


@dataclass(frozen=True)
class Copycat(attacks.Attack):
    """An attack that sends the ballot of client 0."""

    name = "copycat"

    def reply(self, report, sender):
        return replace(report, frame=COPIED[-1]) if report.phase == BALLOTS and COPIED else report


@dataclass(frozen=True)
class LowOrder(attacks.Attack):
    """An attack that signs cards with a point of low order, for which nobody can encrypt a ballot."""

    name = "low-order"

    def reply(self, report, sender):
        if report.phase != CARDS:
            return report
        key, frames = sender.algorithm.ring.signer(report.client), []
        for to in range(5):
            slot = sender.algorithm.slot(sender.codec_context, to)
            frames.append(
                bytes(32) + ballots.sign(key, slot.bytes("card", report.client, bytes(32)))
            )
        return replace(report, frame=b"".join(frames))


@dataclass(frozen=True)
class Bad(attacks.Attack):
    """An attack that sends an empty, truncated or random frame in one phase."""

    phase: str = TALLY
    how: str = "empty"
    name = "bad"

    def reply(self, report, sender):
        if report.phase != self.phase:
            return report
        frames = {
            "empty": b"",
            "one": report.frame[:1],
            "short": report.frame[:-1],
            "noise": sender.generator.bytes(len(report.frame)),
        }
        return replace(report, frame=frames[self.how])


SENT: dict = {}
COPIED: list[bytes] = []


@pytest.fixture(autouse=True)
def own_attacks(monkeypatch, tmp_path_factory):
    SENT.clear()
    COPIED.clear()
    own = [
        f"{cls.name} = {__name__}:{cls.__name__}"
        for cls in (FalseComplaint, Replay, Copycat, LowOrder, Bad)
    ]
    monkeypatch.syspath_prepend(install(tmp_path_factory.mktemp("own"), "theirs", attacks=own))


def test_an_unjustified_complaint_excludes_the_voter(monkeypatch, tmp_path):
    once = replace(SEALED, rounds=1)
    heard = run(monkeypatch, tmp_path, replace(once, attack="false-complaint:clients=3"))
    (rejections,) = heard.summary.rejections
    assert (
        list(rejections.clients) == [3]
        and "without a valid proof" in rejections.reason
        and not heard.of(RECOUNT)
    )
    assert heard.model == run(monkeypatch, tmp_path, once, "honest").model


def test_no_votes_are_requested_on_too_few_ballots(monkeypatch, tmp_path):
    few = replace(SEALED, rounds=1, strategy=f"{SEALED.strategy},f=0", attack="abstention:3")
    heard = run(monkeypatch, tmp_path, few)
    assert (
        len(heard.of(BALLOTS)) == 5 - 3
        and not heard.of(TALLY)
        and heard.summary.client_updates == 0
    )
    assert any("partitions with valid ballots is 2" in r.reason for r in heard.summary.rejections)


@pytest.mark.parametrize(("clients", "strategy", "attack"), [
    (3, "election:byzantine=1,form=ballots,sealed=true,f=0", "equivocation:clients=1,share=0.4"),
    (5, "election:byzantine=2,form=ballots,sealed=true,f=1", "equivocation:clients=1,share=1+abstention:clients=3/4"),
])  # fmt: skip
def test_an_equivocating_sender_is_named_even_if_too_few_ballots_remain(
    monkeypatch, tmp_path, clients, strategy, attack
):
    """Voters send complaints without votes. The round is skipped, without a recount."""
    before = run(
        monkeypatch,
        tmp_path,
        replace(SEALED, clients=clients, strategy=strategy, rounds=1),
        "honest",
    )
    heard = run(
        monkeypatch,
        tmp_path,
        replace(SEALED, clients=clients, strategy=strategy, rounds=2, attack=attack),
    )
    named = [
        r for r in heard.summary.rejections if "cannot decrypt the client's ballot" in r.reason
    ]
    assert [(list(r.clients), r.updates) for r in named] == [([1], 2)]
    assert (
        before.summary.client_updates == clients
        and heard.summary.client_updates == 0
        and not heard.of(RECOUNT)
    )
    assert any(
        "partitions with valid ballots is 2" in r.reason and 1 not in r.clients
        for r in heard.summary.rejections
    )
    assert (
        sum("partitions with valid ballots is 2" in warning for warning in heard.summary.warnings)
        == 1
    )


def test_options_with_which_one_byzantine_client_stops_every_vote_are_refused():
    for clients in (3, 4, 5):
        with pytest.raises(UserError, match="partitions with valid ballots; give a smaller 'f'"):
            made("election:byzantine=1,seats=3,form=ballots,sealed=true", clients)
    assert made("election:byzantine=1,seats=3,form=ballots,sealed=true,f=0", 3).code.all()
    assert made("election:byzantine=1,seats=3,form=ballots,sealed=true", 6).code.all(), (
        "each partition has two clients"
    )
    with pytest.raises(UserError, match="partitions with valid ballots; give a smaller 'f'"):
        made("election:byzantine=1,seats=3,form=ballots,sealed=true,f=2", 6)


def test_the_notice_says_what_the_server_sees_and_how_many_may_be_absent():
    sealed, one = (
        made(f"election:byzantine={b},f=1,form=ballots,sealed=true", 2 * b + 1).notice
        for b in (2, 3)
    )
    assert (
        "against up to 1 Byzantine client in a round, " in sealed
        and "the server sees votes, message sizes and times" in sealed
    )
    assert "more than 2 clients absent" in sealed and "more than 4 clients absent" in one
    assert (
        "any client absent" in made("election:byzantine=2", 5).notice
        and "sealed" not in made("election:byzantine=2", 5).notice
    )
    assert "more than 2 clients absent, a round" in made("election:byzantine=2,f=1", 5).notice


def test_no_ballots_are_requested_in_a_round_that_cannot_close(monkeypatch, tmp_path):
    heard = run(monkeypatch, tmp_path, replace(SEALED, rounds=2, attack="abstention:1"))
    assert len(heard.of(CARDS)) == 2 * 5 and not heard.of(BALLOTS) and not heard.of(TALLY)
    assert "failed" in heard.summary.warnings[0] and {
        r.stage for r in heard.summary.rejections
    } == {"reply", "aggregate"}


def test_too_many_complaints_are_rejected_without_checking_them(monkeypatch, tmp_path):
    judged, proven_bad = [], ballots.SealedBallot.proven_bad
    monkeypatch.setattr(
        ballots.SealedBallot, "proven_bad", lambda *given: judged.append(1) or proven_bad(*given)
    )
    heard = run(
        monkeypatch,
        tmp_path,
        replace(SEALED, rounds=1, attack="false-complaint:clients=3,times=10000"),
    )
    assert not judged and [list(r.clients) for r in heard.summary.rejections] == [[3]]
    assert "50000 complaints about only 5" in heard.summary.rejections[0].reason


@pytest.mark.parametrize("phase", [CARDS, BALLOTS])
def test_a_frame_of_another_round_is_rejected(monkeypatch, tmp_path, phase):
    heard = run(
        monkeypatch, tmp_path, replace(SEALED, rounds=2, attack=f"replay:clients=3,phase={phase}")
    )
    assert [(list(r.clients), r.updates) for r in heard.summary.rejections] == [([3], 1)]
    assert "not signed by" in heard.summary.rejections[0].reason


@pytest.mark.parametrize(
    ("phase", "how"),
    [
        (CARDS, "empty"),
        (CARDS, "noise"),
        (BALLOTS, "one"),
        (BALLOTS, "noise"),
        (TALLY, "empty"),
        (TALLY, "short"),
        (RECOUNT, "one"),
        (RECOUNT, "short"),
    ],
)
def test_no_invalid_answer_ends_a_run(monkeypatch, tmp_path, phase, how):
    """Another client equivocates, so that there is a recount."""
    heard = run(
        monkeypatch,
        tmp_path,
        replace(
            SEALED, rounds=1, attack=f"bad:clients=3,phase={phase},how={how}+equivocation:clients=1"
        ),
    )
    assert {c for r in heard.summary.rejections for c in r.clients} == {
        1,
        3,
    } and heard.summary.client_updates == 3
    assert not any("Error" in r.reason for r in heard.summary.rejections)


@pytest.mark.parametrize("strategy", [OPEN.strategy, "election:byzantine=2"])
def test_an_empty_answer_does_not_end_a_run_with_open_ballots(monkeypatch, tmp_path, strategy):
    for phase in (BALLOTS, TALLY, "train"):
        heard = run(
            monkeypatch,
            tmp_path,
            replace(OPEN, rounds=1, strategy=strategy, attack=f"bad:clients=3,phase={phase}"),
            phase,
        )
        asked = phase in {report.phase for report in heard.reports}
        assert (
            heard.summary.client_updates == 5 - asked
            and [list(r.clients) for r in heard.summary.rejections] == [[3]] * asked
        )


def test_the_attack_infinity_replaces_sealed_frames_by_noise(monkeypatch, tmp_path):
    """The noise is not longer than the honest frames."""
    once = replace(SEALED, rounds=1)
    honest = run(monkeypatch, tmp_path, once, "honest")
    heard = run(monkeypatch, tmp_path, replace(once, attack="infinity:clients=3"), "attacked")
    assert [(list(r.clients), r.updates) for r in heard.summary.rejections] == [([3], 1)]
    assert max(len(r.frame) for r in heard.reports) == max(len(r.frame) for r in honest.reports)


def test_a_copied_ballot_of_another_client_is_rejected(monkeypatch, tmp_path):
    encode = ClientSession.encode

    def watched(self, asked, *given):
        frames = encode(self, asked, *given)
        told = zip(asked, frames, strict=True)
        COPIED.extend(frame for a, frame in told if a.client == 0 and a.phase == BALLOTS)
        return frames

    monkeypatch.setattr(ClientSession, "encode", watched)
    heard = run(monkeypatch, tmp_path, replace(SEALED, rounds=1, attack="copycat:clients=4"))
    assert COPIED and [list(r.clients) for r in heard.summary.rejections] == [[4]]
    assert "not signed by that client for this round" in heard.summary.rejections[0].reason


def test_a_card_for_which_no_sender_could_seal_is_refused(monkeypatch, tmp_path):
    heard = run(monkeypatch, tmp_path, replace(SEALED, rounds=1, attack="low-order:clients=2"))
    assert [list(r.clients) for r in heard.summary.rejections] == [
        [2]
    ] and "low order" in heard.summary.rejections[0].reason
    assert heard.summary.client_updates == 4


class Stop(Exception):
    pass


class StopsIn(Callback):
    """Stops a run after a number of answers in a round."""

    def __init__(self, round: int, answers: int):
        self.round, self.left = round, answers

    def on_progress(self, round: int, answered: int, cohort: int) -> None:
        self.left -= round == self.round
        if not self.left:
            raise Stop


def test_a_repeated_round_uses_new_keys_and_gives_the_same_model(monkeypatch, tmp_path):
    twice = replace(SEALED, rounds=2)
    whole = run(monkeypatch, tmp_path, twice, "whole")
    first, handle = Heard([], {}), VirtualClients.handle

    def listened(self, assignments):
        reports = handle(self, assignments)
        first.reports += reports
        return reports

    for answers in (3, 7, 12):  # in the phases cards, ballots, tally
        with monkeypatch.context() as patch, pytest.raises(Stop):
            patch.setattr(VirtualClients, "handle", listened)
            simulate(
                replace(twice, out=str(tmp_path / "stopped"), resume=answers > 3),
                StopsIn(2, answers),
            )
    resumed = run(monkeypatch, tmp_path, replace(twice, resume=True), "stopped")
    assert resumed.model == whole.model
    used = [keys_of(report) for heard in (first, resumed) for report in heard.reports]
    flat = [key for keys in used for key in keys]
    assert len(flat) == len(set(flat)) and len(flat) > 4 * 5 * 5


def keys_of(report: Report) -> list[bytes]:
    """Return the parts of a frame that must be used only once: the keys of cards, or the point, hash, wraps and content of a ballot."""
    data = report.frame
    if report.phase == CARDS:
        return [data[at : at + ballots.KEY] for at in range(0, len(data), ballots.CARD)]
    if report.phase != BALLOTS:
        return []
    point, held, _, count = ballots.HEAD.unpack_from(data)
    end = ballots.HEAD.size + count * ballots.WRAP.size
    return [
        point,
        held,
        *(wrap for _, _, wrap in ballots.WRAP.iter_unpack(data[ballots.HEAD.size : end])),
        data[end:],
    ]


@for_each("options, clients", [
    ("byzantine=1,form=ballots", 5),
    ("code=uncoded,byzantine=1,form=ballots", 5),
    ("code=bernoulli,redundancy=5,byzantine=1,form=ballots", 7),
    ("code=bernoulli,redundancy=3,byzantine=1,seats=3,form=ballots", 7),
    ("byzantine=0,seats=1,form=ballots", 5),
])  # fmt: skip
def test_codes_whose_votes_reveal_ballots_are_refused(options, clients):
    with pytest.raises(UserError, match=r"give code=deterministic.* and byzantine=\(seats - 1\)/2"):
        made(f"election:{options},sealed=true", clients)


def test_sealed_ballots_need_form_ballots():
    with pytest.raises(UserError, match="form=ballots"):
        made("election:byzantine=1,sealed=true", 5)


def made(text: str, clients: int):
    rules = StrategyConfig(
        participation=1.0,
        uplink="sign",
        downlink="efsign",
        memory="none",
        downlink_memory="none",
        seed=3,
        lr=0.02,
        clients=clients,
    )
    return strategy(text, rules, Layout.flat(8))


def test_every_voter_counts_every_ballot():
    for n in (5, 7, 15):
        assert made(f"election:byzantine={n // 2},form=ballots,sealed=true", n).code.all()
    assert made("election:byzantine=1,seats=3,form=ballots,sealed=true", 20).code.all()


def test_a_client_excludes_a_sender_only_with_a_valid_proof():
    """An invalid proof from the server does not remove a ballot."""
    ring, announced = DerivedKeys(1), {"attempt": b"a" * 32}
    slot = ballots.Slot(ring.run, "a" * 32, 4, 0)
    cards = {voter: ballots.Card.make(slot, voter, ring.signer(voter)) for voter in (1, 2)}
    publics = {voter: card.data[: ballots.KEY] for voter, card in cards.items()}
    sealed = ballots.seal(bytes(6), slot, publics, ring.signer(0))
    proof = PROOF.pack(1, cards[1].data, cards[1].private) + sealed
    context = Context(round=4, phase=RECOUNT, announced=announced | {f"{PROOF_OF}0": proof})
    held = {f"{KEY_OF}0": ring.key(0), "ballot/0": bytes(6)}
    with pytest.raises(ProtocolError, match="with an invalid proof"):
        SealedElectionClient(ring=ring)._remove_excluded(held, context)
    assert "ballot/0" in held


def test_a_key_renewed_during_a_round_is_used_from_the_next_round_on():
    """Signatures of a round are checked with the key announced in that round."""
    rings = [DerivedKeys(1), DerivedKeys(2)]
    sealed = SealedRound(rings[0])
    sealed.start(1, {}, 8, "")
    assert sealed.key(3) == rings[0].key(3)
    sealed.ring = rings[1]
    assert sealed.key(3) == rings[0].key(3)
    sealed.start(2, {}, 8, "")
    assert sealed.key(3) == rings[1].key(3)


def test_each_virtual_client_has_its_own_key():
    ring = DerivedKeys(7)
    assert len({ring.key(client) for client in range(50)}) == 50 and ring.key(3) == point_of(
        ring.signer(3).public_key()
    )
    assert ring.key(0) != DerivedKeys(8).key(0)
