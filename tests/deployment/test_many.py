"""Many clients in one process: what each of them does is what it would do alone, and none of them ends another."""

import dataclasses
import json
import signal

import pytest
import torch
from deployment import TASK, stage
from fedcomp.deployment.multi_client import Crowd, named
from test_process import CPU, DATA, Members, a_loop, invitation, own, rounds
from tiny_task import task

from fedcomp import RunConfig
from fedcomp.deployment.handshake import Common, Own
from fedcomp.deployment.member import Member
from fedcomp.errors import FedcompError, UserError
from fedcomp.sim import simulate
from fedcomp.state_folder import StateFolder
from fedcomp.strategies import resolved


class Together(Members):
    """Members of one process."""

    def __init__(self, *told):
        super().__init__(*told)
        self.common = Common()

    def member(self, client):
        if client not in self.members:
            mine = own(client, common=self.common)
            self.members[client] = Member(mine, StateFolder(self.folder / str(client)))
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
        {},
        {"momentum": 0.9, "keep_momentum": True},
        {"memory": "dgc", "uplink": "topk:density=1/10"},
    ],
    ids=str,
)
def test_clients_that_share_a_model_to_train_in_do_what_they_would_do_alone(tmp_path, options):
    shape = {
        "clients": 4,
        "rounds": 4,
        "participation": 1.0,
        "partition": "dirichlet:1",
        "batch_size": 10,
    }
    config = resolved(RunConfig(**shape | options))
    alone, engines = weights(Members, tmp_path / "alone", config)
    together, engine = weights(Together, tmp_path / "together", config)
    assert torch.equal(alone, together) and (engines, engine) == (4, 1)


def test_a_run_with_another_seed_has_a_model_of_its_own():
    common, config = Common(), resolved(RunConfig(clients=2, batch_size=10))
    members = [Member(Own(task, DATA, CPU, i, i, common=common), None) for i in range(2)]
    for member, seed in zip(members, (0, 1), strict=True):
        other = dataclasses.replace(config, seed=seed)
        member.join(dataclasses.replace(invitation(other, a_loop(other)), run=str(seed)))
    first, second = (member.session for member in members)
    assert first.trainer.engine.engine is not second.trainer.engine.engine and not torch.equal(
        first.replica.weights, second.replica.weights
    )
    assert first.trainer.data is second.trainer.data


def test_clients_are_named_in_spans():
    assert (
        named([3]) == "client 3"
        and named([1, 0, 1]) == "clients 0, 1"
        and named(range(50)) == "clients 0 to 49"
    )
    assert named([7, 0, 4, 3, 5]) == "clients 0, 3 to 5, 7"


class Act:
    """In a crowd, what a client does, and that it was told to end."""

    def __init__(self, act=lambda: None):
        self.act, self.ended = act, False

    def run(self):
        self.act()

    def end(self):
        self.ended = True


def failing(error):
    def act():
        raise error

    return act


def test_what_one_client_says_has_its_name_and_what_all_say_is_said_once():
    heard, acts = [], {}
    for who in range(3):
        acts[who] = Act(
            lambda who=who: [acts[who].say("connected"), acts[who].say(f"round 1, loss {who}")]
        )
    Crowd(acts, heard.append).run()
    assert sorted(map(str, heard)) == [
        *(f"client {i}: round 1, loss {i}" for i in range(3)),
        "clients 0 to 2: connected",
    ]
    assert all(act.ended for act in acts.values())


def test_a_client_that_fails_is_told_of_and_the_others_go_on():
    heard, done = [], []
    acts = {
        0: Act(failing(UserError("give another --partition-id"))),
        1: Act(lambda: done.append(1)),
        2: Act(failing(ValueError("a bug"))),
    }
    with pytest.raises(FedcompError, match="2 of 3 clients could not go on: clients 0, 2; "):
        Crowd(acts, heard.append).run()
    assert (
        done == [1]
        and "client 0: ended: give another --partition-id" in heard
        and any(
            said.startswith("client 2: ended: ") and "ValueError: a bug" in said for said in heard
        )
    )


@pytest.mark.slow
@pytest.mark.deploy
@pytest.mark.timeout(300)
def test_a_host_that_is_killed_goes_on_with_the_simulated_outcome_and_a_signal_ends_all(tmp_path):
    options = {
        "clients": 3,
        "rounds": 8,
        "participation": 1.0,
        "partition": "dirichlet:1",
        "batch_size": 10,
        "seed": 5,
    }
    flags = [
        word
        for name, value in options.items()
        for word in ("--" + name.replace("_", "-"), str(value))
    ]
    with stage(tmp_path) as on:
        server = on.server("--insecure", *flags)
        host = on.client(0, "--insecure", "--count", "4", "--state-dir", "kept", name="first")
        host.wait_for(
            "client 3: ended: this would be client 3 of a run that has 3"
        )  # a fourth, of which the run knows nothing, ends alone
        host.wait_for("round 2")
        host.kill()
        again = on.client(
            0, "--insecure", "--count", "3", "--state-dir", "kept", "--stay", name="second"
        )
        assert server.end() == 0, server.said
        again.wait_for("nothing listens on")  # it stays, and looks for the next run
        assert (
            again.interrupt(signal.SIGTERM) == 128 + signal.SIGTERM
            and "Traceback" not in again.said
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
