"""Memories with a counterpart on the server: client and server store the same vectors, whatever messages are lost or repeated.

Each row of the table "How both sides stay in step" in docs/reference/interfaces.md has tests, which run with real and with virtual
clients.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import same_bits
from federation import AlteredTransport, Federation, virtual_clients
from torch import Tensor

from fedcomp import memory
from fedcomp.clients.replica import Replica
from fedcomp.clients.state import ClientState
from fedcomp.errors import ConfigError
from fedcomp.memories import Memory
from fedcomp.memories.laq import NUMBER, THRESHOLD
from fedcomp.messages import FAILED, UPDATE, Assignment, Report, failure, ticket
from fedcomp.sim.timing import random_work_s
from fedcomp.strategies import Asynchronous, Average, StrategyConfig

CLIENTS = 6
HALF = StrategyConfig(participation=0.5, downlink="stc:density=10%", seed=3)
PAIRED = [
    ("ef21", "stc:density=10%"),
    ("diana:alpha=1/4", "randomk:density=1/2,scaled=true@layer"),
    ("laq:patience=1", "fp16"),
    ("laq:errors=0,patience=2", "topk:density=1/2"),
]
EVERYBODY = [(client, round) for client in range(CLIENTS) for round in range(1, 30)]


class Paired(Federation):
    """A federation that checks, at every answer, that the client's vector equals the one that the server stores for it."""

    def __init__(self, rules: StrategyConfig, **strategy):
        super().__init__(rules, clients=CLIENTS, **strategy)
        # As (client, round):
        self.lost_assignments: set[tuple[int, int]] = set()
        self.repeated_assignments: set[tuple[int, int]] = set()
        self.received: list[Assignment] = []
        # As (client, round): clients that started again without state.
        self.restarted: list[tuple[int, int]] = []
        self.answers = 0

    def handle(self, assignments: Sequence[Assignment]) -> list[Report]:
        self.received += assignments
        heard = [a for a in assignments if (a.client, a.round) not in self.lost_assignments]
        self.answer([a for a in heard if (a.client, a.round) in self.repeated_assignments])
        reports = {report.client: report for report in self.answer(heard)}
        for report in reports.values():
            self.watch(report)
        sent = [
            reports.get(a.client) or failure(a, "link", "the message was lost") for a in assignments
        ]
        faults = [
            self.faults.get((r.client, r.round), keep) if r.kind == UPDATE else keep for r in sent
        ]
        return [
            fault(a, report) for fault, a, report in zip(faults, assignments, sent, strict=True)
        ]

    def watch(self, report: Report) -> None:
        if report.kind == UPDATE:
            row = self.strategy.counterpart.shift_of(report.client) if report.committed else None
            assert same_bits(dense(self.memory(report.client).shift, self), dense(row, self))
            assert report.committed in ("", self.loop.tickets.get(report.client, ""))
            self.answers += 1
            if not report.committed and report.client in self.loop.tickets:
                self.restarted.append((report.client, report.round))

    def run(self, first: int, last: int) -> list:
        return list(self.loop.rounds(range(first, last + 1)))

    def settled(self, client: int) -> Tensor:
        """Return the client's vector after it has learned whether its last answer was accepted."""
        own = copy.deepcopy(self.memory(client))
        if own.pending is not None:
            own.commit() if self.ticket(client) == self.loop.tickets.get(client) else own.rollback()
        return dense(own.shift, self)

    def in_step(self) -> bool:
        return all(
            same_bits(self.settled(c), dense(self.strategy.counterpart.shift_of(c), self))
            for c in self.loop.tickets
        )


class Real(Paired):
    def answer(self, assignments: Sequence[Assignment]) -> list[Report]:
        return [self.members[a.client].answer(a) for a in assignments]

    def memory(self, client: int) -> Memory:
        return self.members[client].memory

    def ticket(self, client: int) -> str:
        return self.members[client].ticket

    def lose_disk(self, client: int) -> None:
        member, rules = self.members[client], self.strategy.config
        empty = memory(rules.memory, self.strategy.uplink, self.layout.numel, self.layout)
        member.replica = Replica(self.initial.clone(), self.layout, self.strategy.downlink)
        member.states.by_client[client] = ClientState(empty, member.replica.version)
        member.rounds.clear()


class Virtual(Paired):
    def __init__(self, rules: StrategyConfig, **strategy):
        super().__init__(rules, **strategy)
        self.virtual = virtual_clients(
            self,
            lambda: memory(rules.memory, self.strategy.uplink, self.layout.numel, self.layout),
            self.at_once,
        )

    def answer(self, assignments: Sequence[Assignment]) -> list[Report]:
        return self.virtual.handle(assignments)

    def memory(self, client: int) -> Memory:
        return self.virtual.states.at(client).memory

    def ticket(self, client: int) -> str:
        return self.virtual.states.at(client).ticket

    def lose_disk(self, client: int) -> None:
        self.virtual.states.by_client.pop(client, None)


def dense(vector: Tensor | None, federation: Federation) -> Tensor:
    return torch.zeros(federation.layout.numel) if vector is None else vector


every_memory = pytest.mark.parametrize(("name", "uplink"), PAIRED)
every_kind = pytest.mark.parametrize("kind", [Real, Virtual])
# Single faults are tested with two memories, each with one kind of client, and mixtures of faults with all memories.
one_each = pytest.mark.parametrize(
    ("kind", "name", "uplink"), [(Virtual, *PAIRED[0]), (Real, *PAIRED[3])]
)


def made(kind: type[Paired], name: str, uplink: str, strategy=Average, **changes) -> Paired:
    return kind(replace(HALF, memory=name, uplink=uplink, **changes), strategy=strategy)


# Faults: functions that change a report.

Fault = Callable[[Assignment, Report], Report]


def keep(a: Assignment, r: Report) -> Report:
    return r


def lose(a: Assignment, r: Report) -> Report:
    return replace(r, kind=FAILED, frame=b"", stage="link", reason="lost")


def damage(a: Assignment, r: Report) -> Report:
    return (
        replace(
            r, frame=r.frame[:-1] + bytes([r.frame[-1] ^ 1]), ticket=ticket(r.round, r.client, b"x")
        )
        if r.frame
        else lose(a, r)
    )


def another_version(a: Assignment, r: Report) -> Report:
    return replace(r, version="0" * 32)


def another_base(a: Assignment, r: Report) -> Report:
    return replace(r, committed="0123456789abcdef")


def another_ticket(a: Assignment, r: Report) -> Report:
    return replace(r, ticket="0123456789abcdef")


@one_each
def test_without_faults_both_sides_have_the_same_vectors(kind, name, uplink):
    federation = made(kind, name, uplink, lr_warmup=8)
    for round in range(1, 8):
        (outcome,) = federation.run(round, round)
        assert len(outcome.accepted) == 3 and not outcome.rejections
        assert federation.in_step()
    assert federation.answers == 21 and not federation.restarted
    assert all(
        bool(federation.strategy.counterpart.shift_of(client).any())
        for client in federation.loop.tickets
    )


@for_each("name, uplink", PAIRED)
def test_virtual_and_real_clients_compute_the_same_model(name, uplink):
    real, virtual = (made(kind, name, uplink, lr_warmup=6) for kind in (Real, Virtual))
    for round in range(1, 6):
        (mine,), (other,) = real.run(round, round), virtual.run(round, round)
        assert [a.frame for a in mine.accepted] == [
            a.frame for a in other.accepted
        ] and mine.traffic == other.traffic
    assert same_bits(real.loop.broadcasts.weights, virtual.loop.broadcasts.weights)


FAULTS = [lose, damage, another_version, another_base, another_ticket]


@one_each
def test_a_lost_or_rejected_reply_is_rolled_back_on_both_sides(kind, name, uplink):
    federation = made(kind, name, uplink, lr_warmup=8)
    federation.faults = {
        (client, round): FAULTS[round % 5] for client, round in EVERYBODY if (client + round) % 2
    }
    rejected = set()
    for round in range(1, 7):
        before = {
            client: dense(federation.strategy.counterpart.shift_of(client), federation).clone()
            for client in range(CLIENTS)
        }
        (outcome,) = federation.run(round, round)
        for refused in outcome.rejections:
            assert same_bits(
                dense(federation.strategy.counterpart.shift_of(refused.client), federation),
                before[refused.client],
            )
            rejected.add(round % 5)
        assert federation.in_step()
    assert rejected == {0, 1, 2, 3, 4} and not federation.restarted


@one_each
def test_a_late_or_missing_reply_is_rolled_back_on_both_sides(kind, name, uplink):
    federation = made(kind, name, uplink, timeout_s=0.001)
    calls = 0

    def lose_some(deliveries):
        nonlocal calls
        calls += 1
        return deliveries[calls % 2 :]

    federation.use(AlteredTransport(federation, lose_some))
    rejected = 0
    for round in range(1, 9):
        (outcome,) = federation.run(round, round)
        rejected += len(outcome.rejections)
        assert {(r.stage, r.reason) for r in outcome.rejections} <= {
            ("deadline", "no reply within 0.001 s (--deadline)")
        }
        assert federation.in_step()
    assert rejected and not federation.restarted


@pytest.mark.filterwarnings("ignore:overflow encountered")
@one_each
def test_updates_with_a_nonfinite_sum_do_not_change_either_side(kind, name, uplink):
    federation = made(kind, name, uplink)
    federation.run(1, 3)

    def huge(a, r):
        frame = federation.strategy.uplink.encode(
            torch.full((federation.layout.numel,), 3e38), layout=federation.layout
        )
        return replace(r, frame=frame, ticket=ticket(r.round, r.client, frame))

    federation.faults = {(client, 4): huge for client in range(CLIENTS)}
    tickets, rows = (
        dict(federation.loop.tickets),
        copy.deepcopy(federation.strategy.counterpart.shifts),
    )
    (outcome,) = federation.run(4, 4)
    assert {r.stage for r in outcome.rejections} == {"aggregate"} and len(outcome.rejections) == 3
    assert federation.loop.tickets == tickets
    assert all(
        same_bits(row, federation.strategy.counterpart.shift_of(client))
        for client, row in rows.items()
    )
    federation.run(5, 7)
    assert federation.in_step() and not federation.restarted


@one_each
def test_lost_and_repeated_assignments_take_effect_once(kind, name, uplink):
    federation = made(kind, name, uplink)
    federation.lost_assignments = {
        (client, round) for client, round in EVERYBODY if (client + round) % 4 == 0
    }
    federation.repeated_assignments = {
        (client, round) for client, round in EVERYBODY if (client + round) % 4 == 1
    }
    for round in range(1, 10):
        federation.run(round, round)
        assert federation.in_step()
    assert not federation.restarted


@one_each
def test_a_repeated_reply_is_accepted_once(kind, name, uplink):
    once, again = made(kind, name, uplink), made(kind, name, uplink)
    again.use(AlteredTransport(again, lambda deliveries: [d for d in deliveries for _ in range(2)]))
    once.run(1, 4), again.run(1, 4)
    assert (
        same_bits(once.loop.broadcasts.weights, again.loop.broadcasts.weights) and again.in_step()
    )


@one_each
def test_a_server_restored_before_clients_settled_keeps_their_state(kind, name, uplink):
    federation = made(kind, name, uplink)
    federation.run(1, 5)
    kept = federation.copy_of_loop()
    federation.run(6, 6)
    federation.loop = kept
    for round in range(7, 10):
        (outcome,) = federation.run(round, round)
        assert len(outcome.accepted) == 3 and federation.in_step()
    assert not federation.restarted


@one_each
def test_a_server_restored_further_back_resets_clients_that_went_on(kind, name, uplink):
    federation = made(kind, name, uplink, participation=1.0)
    federation.faults = {(0, round): lose for round in (6, 7, 8)}  # client 0 stays at round 5
    federation.run(1, 5)
    kept = federation.copy_of_loop()
    before = {client: federation.settled(client) for client in range(CLIENTS)}
    federation.run(6, 8)
    ahead = {
        client
        for client in range(CLIENTS)
        if not same_bits(before[client], federation.settled(client))
    }
    federation.loop = kept
    (outcome,) = federation.run(9, 9)
    begun = {client for client, round in federation.restarted if round == 9}
    assert len(outcome.accepted) == CLIENTS
    assert begun and begun <= ahead and 0 not in begun
    assert {a.client for a in outcome.accepted if a.fresh} == begun
    for client in begun:
        alone = torch.zeros(federation.layout.numel)
        next(a.update for a in outcome.accepted if a.client == client).add_to(
            alone, federation.strategy.counterpart.step
        )
        assert same_bits(federation.strategy.counterpart.shift_of(client), alone)
    federation.run(10, 11)
    assert federation.in_step() and {round for _, round in federation.restarted} == {9}


@one_each
def test_only_a_client_that_lost_its_disk_starts_without_state(kind, name, uplink):
    federation = made(kind, name, uplink, participation=1.0)
    federation.run(1, 5)
    others = {
        client: dense(federation.strategy.counterpart.shift_of(client), federation).clone()
        for client in range(CLIENTS)
    }
    federation.lose_disk(2)
    federation.faults[2, 6] = lose  # its first answer is lost as well
    federation.run(6, 6)
    assert same_bits(federation.strategy.counterpart.shift_of(2), others[2])
    (outcome,) = federation.run(7, 7)
    assert federation.restarted == [(2, 6), (2, 7)] and [
        a.client for a in outcome.accepted if a.fresh
    ] == [2]
    alone = torch.zeros(federation.layout.numel)
    outcome.accepted[2].update.add_to(alone, federation.strategy.counterpart.step)
    assert same_bits(federation.strategy.counterpart.shift_of(2), alone)
    federation.run(8, 8)
    assert federation.in_step() and len(federation.restarted) == 2


@every_kind
@every_memory
def test_any_mixture_of_faults_leaves_both_sides_equal(kind, name, uplink):
    drawn, federation = np.random.default_rng(0), made(kind, name, uplink)
    federation.faults = {at: [keep, keep, keep, *FAULTS][drawn.integers(8)] for at in EVERYBODY}
    federation.lost_assignments = {at for at in EVERYBODY if drawn.random() < 0.1}
    federation.repeated_assignments = {at for at in EVERYBODY if drawn.random() < 0.1}
    kept = federation.copy_of_loop()
    for round in range(1, 16):
        federation.run(round, round)
        mishap = drawn.random()
        if mishap < 0.1:
            federation.lose_disk(int(drawn.integers(CLIENTS)))
        elif mishap < 0.2:
            federation.loop = federation.copy_of_loop(kept)
        elif mishap < 0.4:
            kept = federation.copy_of_loop()
    assert federation.answers > 20
    assert bool(federation.loop.broadcasts.weights.isfinite().all())


# Aggregation by the strategy.


def test_without_a_counterpart_clients_keep_their_state_after_a_restored_server():
    federation = Federation(replace(HALF, participation=1.0))
    list(federation.loop.rounds(range(1, 3)))
    kept = federation.copy_of_loop()
    list(federation.loop.rounds(range(3, 5)))
    federation.loop = kept
    (outcome,) = federation.loop.rounds([5])
    assert len(outcome.accepted) == CLIENTS and not any(a.fresh for a in outcome.accepted)


@for_each("name", ["ef21", "laq"])
def test_absent_clients_count_with_their_shifts(name):
    federation = made(Real, name, "identity", downlink="identity")
    federation.run(1, 6)
    before = federation.loop.broadcasts.weights.clone()
    federation.run(7, 7)
    rows = [federation.strategy.counterpart.shift_of(client) for client in federation.loop.tickets]
    assert len(rows) > 3
    torch.testing.assert_close(
        federation.loop.broadcasts.weights - before, torch.stack(rows).mean(0)
    )


def test_diana_adds_the_differences_of_the_cohort_to_the_mean_shift_of_all_clients():
    federation = made(Real, "diana", "identity", downlink="identity", clients=CLIENTS)
    federation.run(1, 2)
    counterpart, before = (
        federation.strategy.counterpart,
        federation.loop.broadcasts.weights.clone(),
    )
    shifts = torch.stack([counterpart.shift_of(client).clone() for client in counterpart.clients])
    assert 3 < len(shifts) <= CLIENTS
    (outcome,) = federation.run(3, 3)
    differences = torch.stack([a.update.dense() for a in outcome.accepted])
    torch.testing.assert_close(
        federation.loop.broadcasts.weights - before,
        shifts.sum(0) / CLIENTS + differences.mean(0),
    )


def test_shifts_of_absent_clients_are_weighted_by_examples():
    federation = made(Real, "ef21", "identity", downlink="identity", weights="examples")
    for client, member in enumerate(federation.members):
        member.shard = member.shard[: 10 + 5 * client]
    federation.run(1, 6)
    before = federation.loop.broadcasts.weights.clone()
    federation.run(7, 7)
    taken = sorted(federation.loop.tickets)
    weights = torch.tensor([10.0 + 5 * client for client in taken])
    rows = torch.stack([federation.strategy.counterpart.shift_of(client) for client in taken])
    assert len(taken) > 3
    torch.testing.assert_close(
        federation.loop.broadcasts.weights - before,
        (weights[:, None] * rows).sum(0) / weights.sum(),
    )


@pytest.mark.parametrize("name", ["ef21", "diana", "laq"])
def test_with_a_lossless_codec_all_memories_give_the_plain_mean(name):
    options = ":weight=0,errors=0" if name == "laq" else ""
    paired = made(Real, name + options, "identity", participation=1.0)
    plain = Federation(
        replace(HALF, uplink="identity", participation=1.0, memory="none"), clients=CLIENTS
    )
    paired.run(1, 5), list(plain.loop.rounds(range(1, 6)))
    torch.testing.assert_close(
        paired.loop.broadcasts.weights, plain.loop.broadcasts.weights, rtol=1e-4, atol=1e-6
    )


@every_kind
def test_a_client_that_skips_a_round_sends_nothing_and_counts_with_its_shift(kind):
    federation = made(kind, "laq:weight=1000", "identity", downlink="identity", participation=1.0)
    federation.run(1, 1)
    rows = copy.deepcopy(federation.strategy.counterpart.shifts)
    before = federation.loop.broadcasts.weights.clone()
    (outcome,) = federation.run(2, 2)
    assert [a.update for a in outcome.accepted] == [
        None
    ] * CLIENTS and outcome.traffic.uplink == dict.fromkeys(range(CLIENTS), 0)
    torch.testing.assert_close(
        federation.loop.broadcasts.weights - before,
        torch.stack([rows[c] for c in range(CLIENTS)]).mean(0),
    )
    assert all(
        same_bits(row, federation.strategy.counterpart.shift_of(client))
        for client, row in rows.items()
    )


def test_the_threshold_from_the_last_steps_is_announced_and_counted():
    federation = made(
        Real,
        "laq:window=2,weight=0.5",
        "fp16",
        downlink="identity",
        participation=1.0,
        server_lr=0.5,
    )
    moved = [0.0, 0.0]
    for round in range(1, 6):
        before = federation.loop.broadcasts.weights.clone()
        newest = federation.loop.broadcasts.newest_bytes
        federation.received.clear()
        (outcome,) = federation.run(round, round)
        (announced,) = {tuple(a.announced) for a in federation.received}
        assert announced[0] == THRESHOLD.encode()
        (threshold,) = NUMBER.unpack(announced[1])
        assert threshold == pytest.approx(0.25 * sum(moved[-2:]) / 0.5**2, rel=1e-4)
        assert outcome.traffic.downlink == dict.fromkeys(
            range(CLIENTS), newest + len(b"".join(announced))
        )
        moved.append(float((federation.loop.broadcasts.weights - before).square().sum()))


def test_a_round_without_accepted_updates_does_not_move_the_model():
    federation = made(Real, "ef21", "stc:density=10%")
    federation.run(1, 4)
    federation.faults = {(client, 5): lose for client in range(CLIENTS)}
    (outcome,) = federation.run(5, 5)
    assert outcome.broadcast is None


@for_each("name", ["ef21", "laq"])
def test_the_downlink_refuses_memories_with_state_on_both_sides(name):
    with pytest.raises(
        ConfigError,
        match=f"--downlink-memory {name} needs state on the server and on clients, .* use --downlink-memory residual",
    ):
        Federation(replace(HALF, downlink="identity", downlink_memory=name))


@one_each
def test_memories_and_counterparts_agree_in_asynchronous_rounds(kind, name, uplink):
    impatient = partial(Asynchronous, options=Asynchronous.Options(wait=0.0, staleness=4))
    federation = made(kind, name, uplink, strategy=impatient)
    federation.loop.work_s = random_work_s(3)
    federation.faults = {
        (client, round): lose
        for client in range(6)
        for round in range(1, 12)
        if (client + round) % 5 == 0
    }
    for round in range(1, 12):
        federation.run(round, round)
        resting = federation.loop.tickets.keys() - federation.loop.started_in.keys()
        assert all(
            same_bits(federation.settled(c), federation.strategy.counterpart.shift_of(c))
            for c in resting
        )
    assert federation.answers >= 10 and not federation.restarted
