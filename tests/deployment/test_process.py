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
    config = dataclasses.replace(config, uplink=str(strategy.uplink))
    return Invitation(
        "a run",
        client,
        pack_options(config),
        strategy.model_layout.fingerprint,
        loop.broadcasts.first,
    )


def a_loop(config):
    model = initial_model(task, config.seed)
    strategy = make_strategy(config, Layout.of(model))
    broadcasts = Broadcasts.of(strategy, strategy.model_layout.gather(model))
    return make_loop(strategy, broadcasts, InProcessTransport(None))


def rounds(loop, population, numbers):
    """Run rounds with the clients of a population."""
    loop.transport.population = population
    return loop.rounds(numbers)


def own(client, **changes):
    return dataclasses.replace(ClientSetup(task, DATA, CPU, client, client), **changes)


class Members:
    """Deployed clients behind the in-process transport. `killed(round, client)` returns when a client is killed: "before", "after" or "".

    "before" is before its answer, "after" is after its answer was saved.
    """

    at_once = 1

    def __init__(self, folder, config, loop, killed=lambda round, client: ""):
        self.folder, self.config, self.loop, self.killed, self.clients = (
            folder,
            config,
            loop,
            killed,
            config.clients,
        )
        self.members = {}

    def member(self, client):
        if client not in self.members:
            self.members[client] = DeployedClient(
                own(client), StateFolder(self.folder / str(client))
            )
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
                again = self.member(a.client).answer(a)
                assert again == report
            reports.append(report)
        return reports


def trained(folder, config, killed=lambda round, client: ""):
    """Return the weights and the results of a run with deployed clients."""
    loop = a_loop(config)
    members = Members(folder, config, loop, killed)
    outcomes = list(rounds(loop, members, range(1, config.rounds + 1)))
    members.close()
    return loop.broadcasts.weights, outcomes


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
    config = resolved(
        RunConfig(**{"clients": 3, "rounds": 2, "participation": 1.0, "batch_size": 10} | options)
    )
    undisturbed, expected = trained(tmp_path / "a", config)
    moments = ("before", "after", "", "after", "before")
    disturbed, outcomes = trained(
        tmp_path / "b", config, lambda round, client: moments[(round + 2 * client) % 5]
    )
    assert all(len(outcome.accepted) == len(outcome.cohort) for outcome in outcomes)
    assert torch.equal(undisturbed, disturbed)
    assert [o.traffic for o in outcomes] == [o.traffic for o in expected]


def test_a_client_starts_another_run_without_earlier_state(tmp_path):
    config = resolved(RunConfig(clients=2, rounds=2, participation=1.0, batch_size=10))
    trained(tmp_path, config)
    folder = StateFolder(tmp_path / "0")
    member = DeployedClient(own(0), folder)
    presence = member.join(
        dataclasses.replace(invitation(config, a_loop(config)), run="another run")
    )
    assert (
        presence.version == a_loop(config).broadcasts.first
        and member.session.states.at(member.client_id).memory.pending is None
    )
    folder.close()


def test_a_client_that_failed_tries_again_for_the_same_assignment():
    config = resolved(RunConfig(clients=2, rounds=1, participation=1.0, batch_size=10))
    loop = a_loop(config)
    member = DeployedClient(own(0), None)
    member.join(invitation(config, loop))
    b = loop.broadcasts
    asked = Assignment(1, "train", 0, UP_TO_DATE, b.version, b.version, b.fingerprint, [], "")
    trainer = member.session.trainer
    sgd, trainer.sgd = trainer.sgd, dataclasses.replace(trainer.sgd, lr=1e38)
    assert member.answer(asked).kind == FAILED
    trainer.sgd = sgd
    assert member.answer(asked).kind == UPDATE


def test_a_client_without_a_state_folder_repeats_its_report():
    config = resolved(RunConfig(clients=2, rounds=1, participation=1.0, batch_size=10))
    loop, asked = a_loop(config), []
    member = DeployedClient(own(0), None)
    member.join(invitation(config, loop))

    class Once:
        clients, at_once = 2, 2

        def handle(self, assignments):
            asked.extend(assignments)
            first = [member.answer(a) if a.client == 0 else None for a in assignments]
            again = member.answer(assignments[0])
            assert again is first[0] and again.kind == UPDATE
            other = DeployedClient(own(1), None)
            other.join(invitation(config, loop))
            assert other.answer(assignments[0]) is None  # an assignment for client 0
            return [again, other.answer(assignments[1])]

    (outcome,) = rounds(loop, Once(), [1])
    assert len(outcome.accepted) == 2 and len(asked) == 2


def test_a_client_frees_a_saved_report_and_repeats_it_from_its_state_folder(tmp_path):
    config = resolved(RunConfig(clients=1, rounds=1, batch_size=10, uplink="identity"))
    loop, folder = a_loop(config), StateFolder(tmp_path)
    member = DeployedClient(own(0), folder)
    member.join(invitation(config, loop))
    b = loop.broadcasts
    asked = Assignment(1, "train", 0, UP_TO_DATE, b.version, b.version, b.fingerprint, [], "")
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
    config = resolved(
        RunConfig(clients=1, rounds=3, participation=1.0, batch_size=10, strategy="powersgd:rank=1")
    )
    loop, asked, member = a_loop(config), [], DeployedClient(own(0), None)
    member.join(invitation(config, loop))

    class Once:
        clients, at_once = 1, 1

        def handle(self, assignments):
            asked.extend(assignments)
            return [member.answer(assignments[0])]

    outcomes = list(rounds(loop, Once(), range(1, 4)))
    assert all(len(outcome.accepted) == 1 for outcome in outcomes) and len(asked) == 6
    again = member.answer(asked[4])
    assert again.kind == UPDATE and (again.round, again.phase) == (3, "left")


def test_a_client_without_an_enrolment_makes_and_keeps_a_key(tmp_path):
    config = resolved(RunConfig(clients=2, batch_size=10))
    invited, shown = invitation(config, a_loop(config)), []
    for name in ("a", "a", "b"):
        folder = StateFolder(tmp_path / name)
        shown.append(DeployedClient(own(0), folder).join(invited).key)
        folder.close()
    assert verifier(shown[0]) and shown[0] == shown[1] != shown[2]
    enrolled = DeployedClient(own(0), None, ec.generate_private_key(ec.SECP384R1()))
    assert enrolled.join(invited).key == b""  # its certificate has the key


def test_a_client_that_restarts_after_many_rounds_needs_no_dense_model(tmp_path):
    """Its state names only the newest versions, not the initial version of the run."""
    last = MAX_PAST_VERSIONS + 4
    config = resolved(
        RunConfig(clients=2, rounds=last, participation=1.0, batch_size=10, local_steps=1)
    )
    _, outcomes = trained(
        tmp_path, config, lambda round, client: "before" if (round, client) == (last, 1) else ""
    )
    assert outcomes[-1].traffic.versions_behind == {0: 1, 1: 1} and not outcomes[-1].rejections


# Invitations.


def refused(change, brought=None, config=None):
    config = config or resolved(RunConfig(clients=2, batch_size=10))
    invited = dataclasses.replace(invitation(config, a_loop(config)), **change)
    with pytest.raises(FedcompError) as error:
        DeployedClient(brought or own(0), None).join(invited)
    assert "\n" not in str(error.value)
    return error


def test_an_invitation_for_another_model_is_refused_in_one_sentence():
    other = Task("wider", lambda: torch.nn.Linear(2, 2), train=task.train, test=task.test)
    error = refused({}, own(0, task=other))
    assert error.type is UserError and "give the task that the server was started with" in str(
        error.value
    )


@for_each(
    "options",
    [
        "",
        "[]",
        "[" * 100_000,
    ],
)
def test_malformed_options_of_an_invitation_are_refused(options):
    assert refused({"options": options}).type is ProtocolError


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
    config = resolved(RunConfig(clients=2, batch_size=10))
    refused({"options": json.dumps(json.loads(pack_options(config)) | {name: value})})


@for_each("text", ["election:form=ballots", "powersgd:rank=1", "scaffold"])
def test_a_client_uses_the_client_algorithm_of_the_invitation(text):
    config = resolved(RunConfig(clients=5, participation=1.0, batch_size=10, strategy=text))
    loop = a_loop(config)
    client = DeployedClient(own(0), None)
    client.join(invitation(config, loop))
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
    options = {"clients": 5, "participation": 1.0, "batch_size": 10, "evaluate": evaluate}
    config = resolved(RunConfig(**options))
    client = DeployedClient(own(0, partition_id=partition_id), None)
    presence = client.join(invitation(config, a_loop(config), client=0))
    message = str(log_messages.joined(presence, client.session, partition_id))
    assert message.startswith(f"joined the run as client 0, with {says}, uplink stc:")
