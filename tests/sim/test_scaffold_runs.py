"""SCAFFOLD equals the paper's algorithm without compression, and works with codecs, after interruptions and in every engine."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import for_each
from federation import Federation
from small_runs import TINY, StopsAt, assert_refused, assert_the_same_when_stopped, out, rounds_of
from tiny_task import task

from fedcomp import RunConfig
from fedcomp.deployment.start import Endpoint, serve
from fedcomp.errors import ConfigError
from fedcomp.sim import simulate
from fedcomp.strategies import StrategyConfig, resolved
from fedcomp.strategies.base import cohort_size, draw_cohort
from fedcomp.strategies.scaffold import Scaffold
from fedcomp.tasks import initial_model
from fedcomp.training.local_sgd import LocalSGD, plan_batches

DENSE = StrategyConfig(participation=0.5, uplink="identity", downlink="identity", seed=3, clients=6)
SGD = LocalSGD(steps=2, batch_size=10, lr=0.1)  # options of the clients of a Federation
RUN = replace(TINY, strategy="scaffold", local_steps=4)


def test_the_default_codecs_have_the_scope_layer():
    own = resolved(RunConfig(strategy="scaffold", rounds=3))
    assert (own.uplink, own.downlink) == ("stc:density=1/100@layer",) * 2
    assert (
        resolved(RunConfig(strategy="scaffold", uplink="stc:density=1/100")).uplink
        == "stc:density=1/100"
    )


class Oracle:
    """Algorithm 1 of the paper, option II, with gradients by torch."""

    def __init__(self, rules: StrategyConfig, clients: int, sgd: LocalSGD = SGD):
        self.sgd = sgd
        self.rules, self.model, self.data = rules, initial_model(task, rules.seed), task.train()
        self.shards = np.array_split(np.arange(len(self.data)), clients)
        self.x = torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().double()
        self.c, self.own = (
            torch.zeros_like(self.x),
            torch.zeros(clients, self.x.numel(), dtype=torch.float64),
        )

    def gradient(self, y: torch.Tensor, batch: np.ndarray) -> torch.Tensor:
        torch.nn.utils.vector_to_parameters(y.float(), self.model.parameters())
        loss = task.criterion(self.model(self.data.inputs[batch]), self.data.targets[batch])
        return torch.cat(
            [g.reshape(-1) for g in torch.autograd.grad(loss, list(self.model.parameters()))]
        ).double()

    def round(self, round: int) -> list[int]:
        clients = range(len(self.shards))
        count = cohort_size(self.rules.participation, len(clients))
        cohort = draw_cohort(clients, count, self.rules.seed, round)
        moves, changes = [], []
        for client in cohort:
            y, batches = (
                self.x.clone(),
                plan_batches(self.sgd, self.shards[client], self.rules.seed, round, client),
            )
            for batch in batches:
                y -= SGD.lr * (self.gradient(y, batch) - self.own[client] + self.c)
            changes.append(-self.c + (self.x - y) / (len(batches) * SGD.lr))
            moves.append(y - self.x)
            self.own[client] += changes[-1]
        self.x += self.rules.server_lr * torch.stack(moves).mean(0)
        self.c += torch.stack(changes).sum(0) / len(self.shards)
        return cohort


@for_each("server_lr, epochs", [(1.0, 0), (0.5, 0), (1.0, 1)])
def test_without_compression_results_equal_the_papers_algorithm(server_lr, epochs):
    """With local steps, or with epochs, where the paper's K is the number of steps in the epochs."""
    rules, sgd = replace(DENSE, server_lr=server_lr), replace(SGD, epochs=epochs)
    federation, oracle = Federation(rules, strategy=Scaffold), Oracle(rules, 6, sgd)
    for member in federation.members:
        member.sgd = sgd
    for round in range(1, 9):
        (outcome,) = federation.loop.rounds([round])
        assert outcome.cohort == oracle.round(round)
        n, unit = oracle.x.numel(), SGD.lr * SGD.steps
        torch.testing.assert_close(federation.loop.model, oracle.x.float(), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(
            federation.loop.broadcasts.weights[n:] / unit, oracle.c.float(), rtol=1e-3, atol=1e-4
        )


def test_the_servers_control_variate_is_the_clients_mean_minus_residuals():
    rules = replace(DENSE, uplink="stc:density=10%", participation=1.0)
    federation = Federation(rules, strategy=Scaffold)
    list(federation.loop.rounds(range(1, 8)))
    n, members = federation.layout.numel, federation.members
    for client, member in enumerate(members):
        if member.memory.pending is not None and member.ticket == federation.loop.tickets[client]:
            member.memory.commit()
    told = [
        m.state.buffers["scaffold/control"] - m.memory.state_dict()["residual"][n:] for m in members
    ]
    torch.testing.assert_close(
        federation.loop.broadcasts.weights[n:], torch.stack(told).mean(0), rtol=1e-3, atol=1e-5
    )


@pytest.mark.parametrize(
    ("stop", "every", "layer"), [(StopsAt(3, 2), 1, ""), (StopsAt(5), 4, "@layer")]
)
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(tmp_path, stop, every, layer):
    config = replace(RUN, checkpoint_every=every, uplink=f"stc:density=10%{layer}")
    assert_the_same_when_stopped(tmp_path, config, stop)


@pytest.mark.parametrize("engine", ["serial"])
def test_engines_agree(tmp_path, engine):
    config = replace(RUN, uplink="identity", downlink="identity")
    losses = []
    for each in ("batched", engine):
        simulate(replace(config, engine=each, out=out(tmp_path, each)))
        losses.append([line["loss"] for line in rounds_of(out(tmp_path, each))])
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_a_frame_is_as_long_as_one_of_a_model_twice_as_large(tmp_path):
    twice, once = (
        simulate(replace(RUN, strategy=name, uplink="identity", out=out(tmp_path, name)))
        for name in ("scaffold", "average")
    )
    payload = 4 * 42 * once.client_updates
    assert twice.uplink_bytes - once.uplink_bytes == payload


@pytest.mark.slow
def test_drift_is_smaller_than_that_of_averaging(tmp_path):
    config = RunConfig(
        task="digits",
        participation=1.0,
        partition="classes:1",
        rounds=8,
        local_steps=30,
        lr=0.1,
        uplink="identity",
        downlink="identity",
        eval_every=8,
        checkpoint_every=8,
    )
    loss = {
        name: simulate(replace(config, strategy=name, out=out(tmp_path, name))).loss
        for name in ("average", "scaffold")
    }
    assert loss["scaffold"] < 0.7 * loss["average"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"memory": "none"}, "does not work with memory 'none'; leave --memory out"),
        ({"weights": "examples"}, "gives every client the same weight; leave --weights out"),
        ({"momentum": 0.9}, "momentum 0.9 would scale; leave --momentum out"),
        (
            {"server_optimizer": "sgd:momentum=0.9"},
            "would alter this change; leave --server-optimizer out",
        ),
        ({"clip_update": 1.0}, "leave --clip-update out"),
        ({"relays": 2, "uplink": "identity"}, "needs each update"),
    ],
)
def test_errors_in_options_are_raised_before_anything_is_written(tmp_path, change, says):
    assert_refused(tmp_path, replace(RUN, **change), says)


def test_a_deployment_refuses_the_same_options(tmp_path):
    with pytest.raises(ConfigError, match="leave --momentum out"):
        serve(replace(RUN, momentum=0.9, out=out(tmp_path, "run")), Endpoint(port=0))
