"""Many clients in one process: each has the same results as in a separate process, and a failing client does not end the others."""

import dataclasses
import json
import signal

import pytest
import torch
from deployment import TASK, stage
from test_process import CPU, DATA, Members, a_loop, invitation, own, rounds
from tiny_task import task

from fedcomp import RunConfig
from fedcomp.deployment.deployed_client import DeployedClient
from fedcomp.deployment.handshake import ClientSetup, SharedObjects
from fedcomp.sim import simulate
from fedcomp.state_folder import StateFolder
from fedcomp.strategies import resolved


class Together(Members):
    """A population of deployed clients that share one process."""

    def __init__(self, *announced):
        super().__init__(*announced)
        self.common = SharedObjects()

    def member(self, client):
        if client not in self.members:
            mine = own(client, shared=self.common)
            self.members[client] = DeployedClient(mine, StateFolder(self.folder / str(client)))
            assert not self.members[client].join(invitation(self.config, self.loop)).reason
        return self.members[client]


def weights(kind, folder, config):
    loop = a_loop(config)
    members = kind(folder, config, loop)
    assert all(
        len(o.accepted) == config.clients
        for o in rounds(loop, members, range(1, config.rounds + 1))
    )
    engines = {id(member.session.trainer.engine.engine) for member in members.members.values()}
    members.close()
    return loop.broadcasts.weights, len(engines)


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9, "keep_momentum": True},
        {"memory": "dgc", "uplink": "topk:density=1/10"},
    ],
    ids=str,
)
def test_clients_that_share_a_model_have_the_same_updates_as_separate_clients(tmp_path, options):
    shape = {
        "clients": 3,
        "rounds": 2,
        "participation": 1.0,
        "partition": "dirichlet:1",
        "batch_size": 10,
    }
    config = resolved(RunConfig(**shape | options))
    alone, engines = weights(Members, tmp_path / "alone", config)
    together, engine = weights(Together, tmp_path / "together", config)
    assert torch.equal(alone, together) and (engines, engine) == (3, 1)


def test_a_run_with_another_seed_has_another_initial_model():
    common, config = SharedObjects(), resolved(RunConfig(clients=2, batch_size=10))
    members = [
        DeployedClient(ClientSetup(task, DATA, CPU, i, i, shared=common), None) for i in range(2)
    ]
    for member, seed in zip(members, (0, 1), strict=True):
        other = dataclasses.replace(config, seed=seed)
        member.join(dataclasses.replace(invitation(other, a_loop(other)), run=str(seed)))
    first, second = (member.session for member in members)
    assert first.trainer.engine.engine is not second.trainer.engine.engine and not torch.equal(
        first.replica.weights, second.replica.weights
    )
    assert first.trainer.data is second.trainer.data


@pytest.mark.slow
@pytest.mark.deploy
@pytest.mark.timeout(300)
def test_a_killed_process_continues_with_the_simulated_result_and_a_signal_ends_it(tmp_path):
    options = {
        "clients": 3,
        "rounds": 8,
        "participation": 1.0,
        "partition": "dirichlet:1",
        "batch_size": 10,
        "local_steps": 2,
        "seed": 5,
    }
    flags = [
        word
        for name, value in options.items()
        for word in ("--" + name.replace("_", "-"), str(value))
    ]
    with stage(tmp_path) as on:
        server = on.server("--insecure", *flags)
        many = ("--insecure", "--count", "4", "--state-dir", "kept")
        host = on.client(0, *many, name="first", kill_at=9)  # killed in the second round
        assert host.end() == -signal.SIGKILL
        again = on.client(
            0, "--insecure", "--count", "3", "--state-dir", "kept", "--stay", name="second"
        )
        assert server.end() == 0, server.output
        again.wait_for("nothing listens on")  # with --stay, it waits for the next run
        assert (
            again.interrupt(signal.SIGTERM) == 128 + signal.SIGTERM
            and "Traceback" not in again.output
        )
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [
        f"fedcomp-client-{i}" for i in range(4)
    ]
    simulate(
        RunConfig(
            task=TASK, engine="serial", device="cpu", out=str(tmp_path / "simulated"), **options
        )
    )
    same = (
        "round",
        "accuracy",
        "loss",
        "train_loss",
        "cohort",
        "accepted",
        "rejected",
        "uplink_bytes",
        "uplink_nonzeros",
    )
    deployed, simulated = (
        [
            {name: json.loads(line)[name] for name in same}
            for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        ]
        for run in ("run", "simulated")
    )
    assert deployed == simulated
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (
        tmp_path / "simulated" / "model.safetensors"
    ).read_bytes()
