"""Deployed clients and their state on disk: if a client is killed at any moment, no update is lost or counted twice."""

import dataclasses
import json
import weakref

import pytest
import torch
from cases import for_each
from cryptography.hazmat.primitives.asymmetric import ec
from tiny_task import task

from fedcomp import RunConfig
from fedcomp.clients.device_state import MAX_PAST_VERSIONS
from fedcomp.deployment import log_messages
from fedcomp.deployment.deployed_client import DeployedClient
from fedcomp.deployment.handshake import ClientSetup, pack_options
from fedcomp.errors import CheckpointError, FedcompError, ProtocolError, UserError
from fedcomp.keys.keyring import verifier
from fedcomp.layout import Layout
from fedcomp.messages import FAILED, UP_TO_DATE, UPDATE, Assignment, Invitation
from fedcomp.server.asynchronous_loop import make_loop
from fedcomp.server.broadcasts import Broadcasts
from fedcomp.server.results import make_strategy
from fedcomp.state_folder import StateFolder
from fedcomp.strategies import resolved
from fedcomp.tasks import Task, initial_model
from fedcomp.transports.inprocess import InProcessTransport

CPU = torch.device("cpu")
DATA = task.train()


def invitation(config, loop, client=-1):
    strategy = loop.strategy
    options = pack_options(dataclasses.replace(config, uplink=str(strategy.uplink)))
    layout = strategy.model_layout.fingerprint
    return Invitation("a run", client, options, layout, loop.broadcasts.first)


def up_to_date(loop, client=0):
    """Return an assignment for a client whose model is the newest."""
    b = loop.broadcasts
    return Assignment(1, "train", client, UP_TO_DATE, b.version, b.version, b.fingerprint, [], "")


def joined(config, loop, folder=None):
    """Return client 0, which has joined the run."""
    client = DeployedClient(setup_of(0), folder)
    client.join(invitation(config, loop))
    return client


def new_config(**options):
    usual = {"clients": 2, "rounds": 1, "participation": 1.0, "batch_size": 10}
    return resolved(RunConfig(**usual | options))


def new_loop(config):
    model = initial_model(task, config.seed)
    strategy = make_strategy(config, Layout.of(model))
    broadcasts = Broadcasts.of(strategy, strategy.model_layout.gather(model))
    return make_loop(strategy, broadcasts, InProcessTransport(None))


def rounds(loop, population, numbers):
    """Run the rounds `numbers` with the clients of a population."""
    loop.transport.population = population
    return loop.rounds(numbers)


def setup_of(client, **changes):
    """Return the ClientSetup of a client."""
    return dataclasses.replace(ClientSetup(task, DATA, CPU, client, client), **changes)


class DeployedClients:
    """Deployed clients with state folders.

    `killed(round, client)` returns when to kill a client in a round: "before" its answer, "after" its answer was saved, or "" (never).
    """

    at_once = 1
    shared = {}  # settings that are the same for all clients

    def __init__(self, folder, config, loop, killed=lambda round, client: ""):
        self.folder, self.config, self.loop, self.killed = folder, config, loop, killed
        self.clients, self.members = config.clients, {}

    def member(self, client):
        if client not in self.members:
            folder = StateFolder(self.folder / str(client))
            self.members[client] = DeployedClient(setup_of(client, **self.shared), folder)
            assert not self.members[client].join(invitation(self.config, self.loop)).reason
        return self.members[client]

    def kill(self, client):
        self.members.pop(client).folder.close()

    def close(self):
        for client in [*self.members]:
            self.kill(client)

    def handle(self, assignments):
        reports = []
        for a in assignments:
            self.member(a.client)
            when = self.killed(a.round, a.client)
            if when == "before":
                self.kill(a.client)
            report = self.member(a.client).answer(a)
            if when == "after":
                self.kill(a.client)
                assert self.member(a.client).answer(a) == report
            reports.append(report)
        return reports


def trained(folder, config, killed=lambda round, client: ""):
    """Return the weights and the results of a run with deployed clients."""
    loop = new_loop(config)
    members = DeployedClients(folder, config, loop, killed)
    results = list(rounds(loop, members, range(1, config.rounds + 1)))
    members.close()
    return loop.broadcasts.weights, results


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "keep_momentum": True},
        {"memory": "dgc", "uplink": "topk:density=1/10"},
        {"memory": "ef21"},
        {"downlink": "topk:density=1/4,values=fp16", "participation": 2 / 3, "rounds": 4},
        {"strategy": "gtopk"},
        {"strategy": "powersgd:rank=1"},
        {"strategy": "sketched-sgd:density=1/8", "uplink": "sketch:rows=3,columns=12"},
        {"strategy": "shared-scale"},
    ],
    ids=str,
)
def test_a_kill_before_or_after_any_answer_changes_nothing(tmp_path, options):
    config = new_config(**{"clients": 3, "rounds": 2} | options)
    weights, expected = trained(tmp_path / "a", config)
    moments = ("before", "after", "", "after", "before")
    disturbed, results = trained(
        tmp_path / "b", config, lambda round, client: moments[(round + 2 * client) % 5]
    )
    assert all(len(result.accepted) == len(result.cohort) for result in results)
    assert torch.equal(weights, disturbed)
    assert [result.traffic for result in results] == [result.traffic for result in expected]


def test_a_client_starts_another_run_without_earlier_state(tmp_path):
    config = new_config(rounds=2)
    trained(tmp_path, config)
    folder = StateFolder(tmp_path / "0")
    member = DeployedClient(setup_of(0), folder)
    invited = dataclasses.replace(invitation(config, new_loop(config)), run="another run")
    assert member.join(invited).version == new_loop(config).broadcasts.first
    assert member.session.states.at(member.client_id).memory.pending is None
    folder.close()


def test_a_client_that_failed_tries_again_for_the_same_assignment():
    config = new_config()
    loop = new_loop(config)
    member, asked = joined(config, loop), up_to_date(loop)
    trainer = member.session.trainer
    sgd, trainer.sgd = trainer.sgd, dataclasses.replace(trainer.sgd, lr=1e38)
    assert member.answer(asked).kind == FAILED
    trainer.sgd = sgd
    assert member.answer(asked).kind == UPDATE


def test_a_client_without_a_state_folder_repeats_its_report():
    config = new_config()
    loop = new_loop(config)
    member, asked = joined(config, loop), up_to_date(loop)
    report = member.answer(asked)
    assert report.kind == UPDATE and member.answer(asked) is report


def test_a_client_does_not_answer_an_assignment_for_another_client():
    config = new_config()
    loop = new_loop(config)
    assert joined(config, loop).answer(up_to_date(loop, client=1)) is None


def test_a_client_frees_a_saved_report_and_repeats_it_from_its_state_folder(tmp_path):
    config = new_config(clients=1, uplink="identity")
    loop, folder = new_loop(config), StateFolder(tmp_path)
    member, asked = joined(config, loop, folder), up_to_date(loop)
    report = member.answer(asked)
    copy, alive = dataclasses.replace(report), weakref.ref(report)
    del report
    assert copy.kind == UPDATE and alive() is None
    assert member.answer(asked) == copy
    damaged = bytearray((tmp_path / "state.bin").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "state.bin").write_bytes(damaged)
    with pytest.raises(CheckpointError, match="damaged.*remove"):
        member.answer(asked)
    folder.close()


def test_an_earlier_phase_can_be_answered_again():
    """A restarted server begins the round again."""
    config = new_config(clients=1, rounds=3, strategy="powersgd:rank=1")
    loop, asked = new_loop(config), []
    member = joined(config, loop)

    class Once:
        clients, at_once = 1, 1

        def handle(self, assignments):
            asked.extend(assignments)
            return [member.answer(assignments[0])]

    results = list(rounds(loop, Once(), range(1, 4)))
    assert all(len(result.accepted) == 1 for result in results) and len(asked) == 6
    again = member.answer(asked[4])
    assert again.kind == UPDATE and (again.round, again.phase) == (3, "left")


def test_a_client_without_an_enrolment_makes_and_keeps_a_key(tmp_path):
    config = new_config()
    invited, shown = invitation(config, new_loop(config)), []
    for name in ("a", "a", "b"):
        folder = StateFolder(tmp_path / name)
        shown.append(DeployedClient(setup_of(0), folder).join(invited).key)
        folder.close()
    assert verifier(shown[0]) and shown[0] == shown[1] != shown[2]
    enrolled = DeployedClient(setup_of(0), None, ec.generate_private_key(ec.SECP384R1()))
    assert enrolled.join(invited).key == b""  # its certificate has the key


def test_a_client_that_restarts_after_many_rounds_needs_no_dense_model(tmp_path):
    """The client's state names only the newest versions, not the initial version of the run."""
    last = MAX_PAST_VERSIONS + 4
    config = new_config(rounds=last, local_steps=1)
    _, results = trained(
        tmp_path, config, lambda round, client: "before" if (round, client) == (last, 1) else ""
    )
    assert results[-1].traffic.versions_behind == {0: 1, 1: 1} and not results[-1].rejections


# Invitations.


def refused(setup, **changes):
    """Return the error with which a client refuses a changed invitation."""
    config = new_config()
    invited = dataclasses.replace(invitation(config, new_loop(config)), **changes)
    with pytest.raises(FedcompError) as error:
        DeployedClient(setup, None).join(invited)
    assert "\n" not in str(error.value)
    return error.value


def test_an_invitation_for_another_model_is_refused_in_one_sentence():
    other = Task("wider", lambda: torch.nn.Linear(2, 2), train=task.train, test=task.test)
    error = refused(setup_of(0, task=other))
    assert type(error) is UserError
    assert "give the task that the server was started with" in str(error)


@for_each("options", ["", "[]", "[" * 100_000])
def test_malformed_options_of_an_invitation_are_refused(options):
    assert type(refused(setup_of(0), options=options)) is ProtocolError


@for_each(
    "name, value",
    [
        ("uplink", "os:system"),
        ("uplink", "__import__('os')"),
        ("memory", "../../memory"),
        ("partition", "file:/etc/passwd"),
        ("lr", "nan"),
        ("local_steps", 10**12),
        ("clients", [1]),
        ("downlink", {"a": 1}),
        ("seed", -1),
        ("strategy", "os:system"),
        ("strategy", ["average"]),
    ],
)
def test_options_of_an_invitation_are_checked_and_execute_nothing(name, value):
    options = json.loads(pack_options(new_config())) | {name: value}
    refused(setup_of(0), options=json.dumps(options))


@for_each("text", ["election:form=ballots", "powersgd:rank=1", "scaffold"])
def test_a_client_uses_the_client_algorithm_of_the_invitation(text):
    config = new_config(clients=5, strategy=text)
    loop = new_loop(config)
    client = joined(config, loop)
    assert client.session.algorithm == loop.strategy.client_algorithm
    assert client.session.replica.version == loop.broadcasts.version


@for_each(
    "partition_id, evaluate, says",
    [
        (None, "server", "all 400 examples (--partition-id K selects a part)"),
        (None, "clients", "320 of 400 examples (--partition-id K selects a part)"),
        (3, "server", "80 of 400 examples (--partition-id 3)"),
    ],
)
def test_a_client_logs_on_which_examples_it_trains(partition_id, evaluate, says):
    config = new_config(clients=5, evaluate=evaluate)
    client = DeployedClient(setup_of(0, partition_id=partition_id), None)
    presence = client.join(invitation(config, new_loop(config), client=0))
    message = str(log_messages.joined(presence, client.session, partition_id))
    assert message.startswith(f"joined the run as client 0, with {says}, uplink stc:")
