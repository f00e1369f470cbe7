"""Faults of clients in every phase of a round: the run continues, no update is lost, and none counts twice."""

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from faults import DELAYED, FAULTS, HARMLESS
from federation import sum_updates
from networked import Networked

from fedcomp import RunConfig
from fedcomp.memories.lowrank import LEFT, RIGHT
from fedcomp.server.round_loop import RoundResult
from fedcomp.strategies import Phase
from fedcomp.strategies.base import DEADLINE, PhaseEnd, Progress, RoundCompletion

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(300)]
CLIENTS = 4
CONFIG = RunConfig(
    clients=CLIENTS, participation=1.0, partition="dirichlet:1", batch_size=10, seed=5, rounds=100
)


class Books:
    """Sums of each client's updates and of its accepted updates. Checks that no update is accepted twice."""

    def __init__(self, run: Networked):
        self.run, self.tickets = run, set()
        self.inputs, self.accepted = (
            [torch.zeros(run.layout.numel) for _ in range(run.config.clients)] for _ in range(2)
        )
        run.clients.on_join, run.on_round = self._count, self._take

    def _count(self, member) -> None:
        sum_updates(member.session, self.inputs[member.client_id])

    def _take(self, outcome: RoundResult) -> None:
        strategy = self.run.strategy
        for a in outcome.accepted:
            assert a.ticket not in self.tickets
            self.tickets.add(a.ticket)
            update = a.update
            if hasattr(strategy, "factor_layout"):
                update = strategy.factor_layout.update(strategy.basis, update.values)
            update.add_to(self.accepted[a.client])

    def balance(self) -> None:
        """Check that accepted updates plus residual equal the client's updates. Call this method when no client trains."""
        for client in range(self.run.config.clients):
            own = self.run.clients.member(client).session.states.at(client)
            if own.memory.pending is not None:
                accepted = own.ticket == self.run.loop.tickets.get(client, "")
                own.memory.commit() if accepted else own.memory.rollback()
            residual, updates = own.memory.state_dict()["residual"], self.inputs[client]
            torch.testing.assert_close(
                self.accepted[client] + residual, updates, rtol=1e-4, atol=1e-5
            )
            assert residual.any() and updates.any()


@dataclass(frozen=True)
class Others(RoundCompletion):
    """A rule that ends a phase, as a deadline does, when all clients except `but` clients have answered."""

    but: int = 0

    def check(self, progress: Progress) -> PhaseEnd | None:
        ended = progress.answered >= progress.asked - self.but
        return PhaseEnd(DEADLINE, "too late") if ended else None


class Plan:
    """Rounds in which three different clients have one fault each, and a last round without faults."""

    def __init__(self, run: Networked, cases: list[tuple[str, str]]):
        self.run, self.happens = run, {}
        self.late: dict[tuple[int, str], int] = Counter()
        self.where: dict[tuple[str, str], tuple[int, int]] = {}  # (how, phase) → client, round
        for i, (how, phase) in enumerate(cases):
            client, round = i % 3 + i // 3 % 2, 2 + i // 3
            run.faults.fail_at(client, round, phase, how)
            self.late[round, phase] += how in DELAYED
            self.where[how, phase] = client, round
        self.last = 3 + (len(cases) - 1) // 3
        phases = list(dict.fromkeys(phase for _, phase in cases))
        run.strategy.phases = lambda round: [
            Phase(phase, Others(but=self.late[round, phase])) for phase in phases
        ]

    def carry_out(self) -> dict[int, RoundResult]:
        outcomes = {}
        for round in range(1, self.last + 1):
            (outcomes[round],) = self.run.rounds(round, round)
            for client in [r.client for r in outcomes[round].rejections if r.stage == DEADLINE]:
                self.run.wait_until_responsive(client)
        return outcomes

    def check(self, outcomes: dict[int, RoundResult]) -> None:
        """Check that each fault has no effect but a rejection of its client in its round."""
        for (how, phase), (client, round) in self.where.items():
            case, rejected = (how, phase), {r.client: r for r in outcomes[round].rejections}
            if how in HARMLESS:
                assert client not in rejected, case
            else:
                stage = "deadline" if how in DELAYED else "reply"
                assert rejected[client].stage == stage and rejected[client].reason, case
            faulty = {where[0] for where in self.where.values() if where[1] == round}
            assert rejected.keys() <= faulty, case
            accepted = {a.client for a in outcomes[round].accepted}
            assert accepted == set(range(CLIENTS)) - rejected.keys(), case
            assert client in {a.client for a in outcomes[self.last].accepted}, case


# One fault of each kind, for strategies whose rounds have several phases.
ONE_EACH = [
    "killed before its reply",
    "killed amid its reply",
    "slow before training",
    "cut after its reply",
    "a reply of another size",
    "not a number",
]
RUNS = {
    "average": ({"uplink": "topk:density=1/4"}, [(how, "train") for how in FAULTS]),
    "powersgd:rank=1": ({}, [(how, phase) for phase in (LEFT, RIGHT) for how in ONE_EACH]),
}


@pytest.mark.parametrize("strategy", RUNS)
def test_a_fault_only_causes_a_rejection_of_its_client_in_its_round(network, strategy):
    options, cases = RUNS[strategy]
    with network.federation(replace(CONFIG, strategy=strategy, **options)) as run:
        books, plan = Books(run), Plan(run, cases)
        outcomes = plan.carry_out()
        run.send_farewell()
        books.balance()
        weights = [run.weights_of(client) for client in range(CLIENTS)]
        assert all(torch.equal(mine, run.loop.broadcasts.weights) for mine in weights)
        assert not run.faults.planned and not run.callback.warnings
    plan.check(outcomes)
