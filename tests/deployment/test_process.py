"""The client process: what it keeps on its disk, and that a kill at any moment loses nothing and counts nothing twice."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from tiny_task import task

from fedcomp import RunConfig
from fedcomp import state_folder as state
from fedcomp.clients.flower import to_records
from fedcomp.deployment.client_process import (
    JOIN,
    LEAVE,
    LONGEST_S,
    REST_S,
    ROUND_S,
    TRAIN,
    not_overtaken,
    own_key,
    wait_s,
)
from fedcomp.deployment.handshake import Invitation, Own, client_for, pack_algorithm, told
from fedcomp.deployment.member import Member
from fedcomp.errors import CheckpointError, FedcompError, ProtocolError, UserError
from fedcomp.layout import Layout
from fedcomp.messages import UPDATE
from fedcomp.server.results import strategy_of
from fedcomp.sim.grid import LocalGrid, by_index
from fedcomp.state_folder import StateFolder
from fedcomp.strategies import available_strategies, resolved
from fedcomp.tasks import Data, Task, initial_model

CPU = torch.device("cpu")
DATA = task.train()


def invitation(config, strategy, client=-1):
    config = dataclasses.replace(config, uplink=str(strategy.uplink))
    return Invitation(
        "a run",
        client,
        told(config),
        pack_algorithm(strategy.client_algorithm),
        strategy.layout.fingerprint,
        strategy.broadcasts.first,
    )


def a_strategy(config):
    model = initial_model(task, config.seed)
    strategy = strategy_of(config, roster=by_index)
    strategy.begin(Layout.of(model).gather(model), Layout.of(model))
    return strategy


def own(client, **changes):
    return dataclasses.replace(Own(task, DATA, CPU, client, client), **changes)


class Members:
    """Members behind the in-process Grid. `killed(round, client, moment)`: "before" its answer, "after" it was kept, or not at all."""

    at_once = 1

    def __init__(self, folder, config, strategy, killed=lambda round, client: ""):
        self.folder, self.config, self.strategy, self.killed, self.clients = (
            folder,
            config,
            strategy,
            killed,
            config.clients,
        )
        self.members = {}

    def member(self, client):
        if client not in self.members:
            self.members[client] = Member(own(client), StateFolder(self.folder / str(client)))
            assert not self.members[client].join(invitation(self.config, self.strategy)).reason
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
    """Weights, and the outcomes, of a run with members."""
    strategy = a_strategy(config)
    members = Members(folder, config, strategy, killed)
    outcomes = list(strategy.rounds(LocalGrid(members), range(1, config.rounds + 1)))
    members.close()
    return strategy.broadcasts.weights, outcomes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "keep_momentum": True},
        {"memory": "dgc", "uplink": "topk:density=1/10"},
        {"memory": "ef21"},
        {"downlink": "topk:density=1/4,values=fp16", "participation": 0.5},
        {"strategy": "gtopk"},
        {"strategy": "powersgd:rank=1"},
        {"strategy": "sketched-sgd:density=1/8", "uplink": "sketch:rows=3,columns=12"},
        {"strategy": "shared-scale"},
    ],
    ids=str,
)
def test_a_kill_before_or_after_any_answer_changes_nothing(tmp_path, options):
    config = resolved(
        RunConfig(**{"clients": 4, "rounds": 3, "participation": 1.0, "batch_size": 10} | options)
    )
    undisturbed, expected = trained(tmp_path / "a", config)
    moments = ("before", "after", "", "after", "before")
    disturbed, outcomes = trained(
        tmp_path / "b", config, lambda round, client: moments[(round + 2 * client) % 5]
    )
    assert all(len(outcome.accepted) == len(outcome.cohort) for outcome in outcomes)
    assert torch.equal(undisturbed, disturbed)
    assert [o.traffic for o in outcomes] == [o.traffic for o in expected]


def test_a_member_of_another_run_starts_from_nothing(tmp_path):
    config = resolved(RunConfig(clients=2, rounds=2, participation=1.0, batch_size=10))
    trained(tmp_path, config)
    folder = StateFolder(tmp_path / "0")
    member = Member(own(0), folder)
    presence = member.join(
        dataclasses.replace(invitation(config, a_strategy(config)), run="another run")
    )
    assert (
        presence.version == a_strategy(config).broadcasts.first
        and member.client.memory.pending is None
    )
    folder.close()


def test_a_member_without_a_disk_answers_the_same_question_with_the_same_report():
    config = resolved(RunConfig(clients=2, rounds=1, participation=1.0, batch_size=10))
    strategy, asked = a_strategy(config), []
    member = Member(own(0), None)
    member.join(invitation(config, strategy))

    class Once:
        clients, at_once = 2, 2

        def handle(self, assignments):
            asked.extend(assignments)
            first = [member.answer(a) if a.client == 0 else None for a in assignments]
            again = member.answer(assignments[0])
            assert again is first[0] and again.kind == UPDATE
            other = Member(own(1), None)
            other.join(invitation(config, strategy))
            assert other.answer(assignments[0]) is None  # meant for client 0
            return [again, other.answer(assignments[1])]

    (outcome,) = strategy.rounds(LocalGrid(Once()), [1])
    assert len(outcome.accepted) == 2 and len(asked) == 2


def test_a_copy_of_a_question_that_comes_after_a_later_one_was_answered_is_dropped():
    config = resolved(
        RunConfig(clients=1, rounds=3, participation=1.0, batch_size=10, strategy="powersgd:rank=1")
    )
    strategy, asked, member = a_strategy(config), [], Member(own(0), None)
    member.join(invitation(config, strategy))

    class Once:
        clients, at_once = 1, 1

        def handle(self, assignments):
            asked.extend(assignments)
            report = member.answer(assignments[0], asker=7)
            before = member.client.memory.residual.clone()
            assert all(member.answer(earlier, asker=7) is None for earlier in asked[:-1])
            assert (
                torch.equal(member.client.memory.residual, before)
                and member.client.memory.pending == report.frame
            )
            return [report]

    outcomes = list(strategy.rounds(LocalGrid(Once()), range(1, 4)))
    assert all(len(outcome.accepted) == 1 for outcome in outcomes) and len(asked) == 6
    again = member.answer(
        asked[4], asker=8
    )  # a server that was started again may ask an earlier phase
    assert again.kind == UPDATE and (again.round, again.phase) == (3, "left")


def test_of_questions_that_waited_the_newest_rounds_are_answered_after_invitations():
    config = resolved(RunConfig(clients=2, batch_size=10))
    grid = LocalGrid(Members(None, config, a_strategy(config)))

    def message(kind, group=""):
        return grid.create_message(
            to_records(invitation(config, a_strategy(config))), kind, 2, group
        )

    old, new, copy, invited, farewell = (
        message(TRAIN, "2"),
        message(TRAIN, "10"),
        message(TRAIN, "10"),
        message(JOIN),
        message(LEAVE),
    )
    assert not_overtaken([old, new, invited, copy]) == [invited, new, copy]
    assert not_overtaken([new, farewell, old]) == [farewell]
    assert not_overtaken([]) == [] and not_overtaken([message(TRAIN)])


# Invitations.


def refused(change, brought=None, config=None):
    config = config or resolved(RunConfig(clients=2, batch_size=10))
    invited = dataclasses.replace(invitation(config, a_strategy(config)), **change)
    with pytest.raises(FedcompError) as error:
        client_for(invited, brought or own(0))
    assert "\n" not in str(error.value)
    return error


def test_another_model_is_one_sentence():
    other = Task("wider", lambda: torch.nn.Linear(2, 2), train=task.train, test=task.test)
    error = refused({}, own(0, task=other))
    assert error.type is UserError and "give the task that the server was started with" in str(
        error.value
    )


@pytest.mark.parametrize(
    "options",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        json.dumps({"uplink": "stc"}),
    ],
)
def test_options_that_are_not_whole_are_refused(options):
    assert refused({"options": options}).type is ProtocolError


@pytest.mark.parametrize(
    ("name", "value"),
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
    ],
)
def test_an_option_is_a_checked_number_or_a_spec_of_what_is_installed(name, value):
    config = resolved(RunConfig(clients=2, batch_size=10))
    refused({"options": json.dumps(json.loads(told(config)) | {name: value})})


@pytest.mark.parametrize(
    "work", ["", "[]", '["phases"]', '["os", "train"]', '[["phases"], "train"]', '["phases", 1]']
)
def test_a_strategy_half_is_one_that_is_installed(work):
    assert refused({"work": work}).type is ProtocolError


@pytest.mark.parametrize("name", available_strategies())
def test_every_strategy_has_a_client_half_that_can_be_told(name):
    work = available_strategies()[name].client_algorithm
    config = resolved(RunConfig(clients=2, batch_size=10))
    invited = dataclasses.replace(invitation(config, a_strategy(config)), work=pack_algorithm(work))
    _, client = client_for(invited, own(0))
    assert type(client.algorithm) is type(work) and client.algorithm.phases == work.phases


def test_a_client_brings_a_part_of_the_data_or_all_of_its_own():
    config = resolved(RunConfig(clients=2, batch_size=10))
    invited = invitation(config, a_strategy(config))
    halves = [client_for(invited, own(i))[1].shard for i in (0, 1)]
    assert sorted(np.concatenate(halves)) == list(range(len(DATA)))
    mine = Data(DATA.inputs[:7], DATA.targets[:7])
    who, client = client_for(
        dataclasses.replace(invited, client=1), own(-1, train=mine, partition_id=None)
    )
    assert who == 1 and list(client.shard) == list(range(7))
    assert "--partition-id is 5; give 0 to 3" in str(
        refused({}, own(0, partition_id=5, partitions=4)).value
    )
    assert "this would be client 2 of a run that has 2" in str(refused({}, own(2)).value)


# The disk.


def test_a_state_is_read_back_as_it_was_written(tmp_path):
    folder = StateFolder(tmp_path / "deep" / "state")
    kept = {"a": torch.randn(1000), "none": torch.empty(0), "b": b"\x00bytes", "empty": b""}
    folder.save(kept)
    read = folder.load()
    assert list(read) == list(kept) and read["b"] == kept["b"] and read["empty"] == b""
    assert torch.equal(read["a"], kept["a"]) and read["none"].numel() == 0
    assert {path.name for path in folder.path.iterdir()} == {state.FILE, state.LOCK}
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.path.iterdir())
    folder.close()


def test_a_write_that_fails_leaves_the_state_before(tmp_path, monkeypatch):
    folder = StateFolder(tmp_path)
    folder.save({"a": b"one"})
    monkeypatch.setattr(
        state.os,
        "fsync",
        lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    with pytest.raises(CheckpointError, match="No space left on device"):
        folder.save({"a": b"two"})
    assert folder.load() == {"a": b"one"}
    folder.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d[:-1],
        lambda d: d[:5],
        lambda d: b"",
        lambda d: d[:-1] + b"!",
        lambda d: b"\xff" * 99,
    ],
)
def test_a_damaged_state_is_one_sentence(tmp_path, damage):
    folder = StateFolder(tmp_path)
    folder.save({"a": torch.ones(3)})
    path = tmp_path / state.FILE
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match="is damaged; remove it"):
        folder.load()
    folder.close()


def test_one_folder_is_one_process(tmp_path):
    first = StateFolder(tmp_path)
    with pytest.raises(UserError, match="another client runs in --state-dir"):
        StateFolder(tmp_path)
    first.close()
    StateFolder(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be used"):
        StateFolder(tmp_path / "file" / "state")


def test_a_key_of_its_own_outlives_a_restart(tmp_path):
    folder = StateFolder(tmp_path)
    assert (
        own_key(folder).private_numbers()
        == own_key(folder).private_numbers()
        != own_key(None).private_numbers()
    )
    folder.close()


# Polling.


def test_looks_are_close_while_rounds_go_on_and_seldom_when_they_do_not():
    assert wait_s(0.0) == pytest.approx(0.1)
    assert all(wait_s(idle) <= ROUND_S for idle in np.arange(0, REST_S, 0.1))
    assert wait_s(0.2, usual_s=1.0) == pytest.approx(0.3) and wait_s(0.0, usual_s=100.0) == ROUND_S
    assert wait_s(1e6) == LONGEST_S


def test_who_waits_for_its_server_looks_the_more_seldom():
    assert wait_s(0.0, took_s=0.005) == wait_s(0.0) and wait_s(0.0, took_s=0.3) == pytest.approx(
        3.0
    )
    assert wait_s(0.0, took_s=60.0) == LONGEST_S


def test_an_idle_client_makes_at_most_one_look_a_second_in_a_minute():
    idle, looks = 0.0, 0
    while idle < 60:
        idle, looks = idle + wait_s(idle), looks + 1
    assert looks <= 75
