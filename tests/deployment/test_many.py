"""Many clients in one process: each has the same results as in a separate process, and a failing client does not end the others."""

import dataclasses
import signal

import pytest
import torch
from deployment import TASK, stage
from run_files import flags, outcome
from test_process import DeployedClients, invitation, new_loop, rounds, setup_of

from fedcomp import RunConfig
from fedcomp.deployment.deployed_client import DeployedClient
from fedcomp.deployment.handshake import SharedObjects
from fedcomp.sim import simulate
from fedcomp.strategies import resolved

USUAL = {
    "clients": 3,
    "rounds": 2,
    "participation": 1.0,
    "partition": "dirichlet:1",
    "batch_size": 10,
}


class ClientsOfOneProcess(DeployedClients):
    """Deployed clients that share the objects of one process."""

    def __init__(self, *settings):
        super().__init__(*settings)
        self.shared = {"shared": SharedObjects()}


def weights(kind, folder, config):
    """Return the weights after a run with clients of class `kind`, and the number of models in memory."""
    loop = new_loop(config)
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
    [{"momentum": 0.9, "keep_momentum": True}, {"memory": "dgc", "uplink": "topk:density=1/10"}],
    ids=str,
)
def test_clients_that_share_a_model_have_the_same_updates_as_separate_clients(tmp_path, options):
    config = resolved(RunConfig(**USUAL | options))
    alone, engines = weights(DeployedClients, tmp_path / "alone", config)
    together, engine = weights(ClientsOfOneProcess, tmp_path / "together", config)
    assert torch.equal(alone, together) and (engines, engine) == (3, 1)


def test_a_run_with_another_seed_has_another_initial_model():
    shared, config = SharedObjects(), resolved(RunConfig(clients=2, batch_size=10))
    members = [DeployedClient(setup_of(i, shared=shared), None) for i in range(2)]
    for member, seed in zip(members, (0, 1), strict=True):
        other = dataclasses.replace(config, seed=seed)
        member.join(dataclasses.replace(invitation(other, new_loop(other)), run=str(seed)))
    first, second = (member.session for member in members)
    assert first.trainer.engine.engine is not second.trainer.engine.engine
    assert not torch.equal(first.replica.weights, second.replica.weights)
    assert first.trainer.data is second.trainer.data


@pytest.mark.slow
@pytest.mark.deploy
@pytest.mark.timeout(300)
def test_a_killed_process_continues_with_the_simulated_result_and_a_signal_ends_it(tmp_path):
    options = USUAL | {"rounds": 8, "local_steps": 2, "seed": 5}
    many = ("--insecure", "--state-dir", "states", "--count")
    with stage(tmp_path) as on:
        server = on.server("--insecure", *flags(options))
        first = on.client(0, *many, "4", name="first", kill_at=9)  # killed in the second round
        assert first.end() == -signal.SIGKILL
        second = on.client(0, *many, "3", "--stay", name="second")
        assert server.end() == 0, server.output
        second.wait_for("nothing listens on")  # with --stay, it waits for the next run
        assert second.interrupt(signal.SIGTERM) == 128 + signal.SIGTERM
        assert "Traceback" not in second.output
    folders = {path.name for path in (tmp_path / "states").iterdir()}
    assert folders == {f"fedcomp-client-{i}" for i in range(4)}
    simulated = str(tmp_path / "simulated")
    simulate(RunConfig(task=TASK, engine="serial", device="cpu", out=simulated, **options))
    assert outcome(tmp_path / "run") == outcome(tmp_path / "simulated")
