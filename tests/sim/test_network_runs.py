"""Runs on a virtual network: bytes determine the duration of rounds, and deadline and quorum exclude late clients but lose no update."""

import csv
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from federation import Federation
from small_runs import (
    TINY,
    Records,
    StopsAt,
    assert_the_same_when_stopped,
    model_bytes,
    out,
    rounds_of,
)

from fedcomp import RunConfig
from fedcomp.callbacks import Callback
from fedcomp.config import read_run
from fedcomp.deployment.start import Endpoint, serve
from fedcomp.errors import ConfigError, RunFolderError
from fedcomp.server.round_loop import RoundResult
from fedcomp.server.server_run import NOTHING_ACCEPTED
from fedcomp.sim import simulate
from fedcomp.sim.clients import VirtualClients
from fedcomp.sim.network import Network, Profiles, read_profiles
from fedcomp.sim.timing import Timing
from fedcomp.strategies import StrategyConfig

LINES = "client,up,down,latency,step"
ALL = replace(TINY, clients=6, participation=1.0)


def network(tmp_path: Path, *lines: str, names: str = LINES) -> str:
    path = tmp_path / "clients.csv"
    path.write_text("\n".join([names, *lines]) + "\n", encoding="utf-8")
    return str(path)


def slower(tmp_path: Path, *steps: str) -> str:
    """Write a file of clients that differ only in the durations of their steps."""
    return network(
        tmp_path, *(f"{client},10kB,100kB,5ms,{step}" for client, step in enumerate(steps))
    )


@pytest.fixture
def outcomes(monkeypatch) -> list[RoundResult]:
    """Return a list that collects the results of all rounds in the test."""
    kept, closed = [], Timing.on_round_end
    monkeypatch.setattr(
        Timing, "on_round_end", lambda self, outcome: kept.append(outcome) or closed(self, outcome)
    )
    return kept


def left_out(outcome: RoundResult, stage: str) -> list[int]:
    return [r.client for r in outcome.rejections if r.stage == stage]


# Durations of rounds.


def test_a_round_lasts_as_long_as_the_exchange_of_its_slowest_client(tmp_path, outcomes):
    where = network(
        tmp_path, *(f"{i},{70 * (i + 1)},{90 * (i + 2)},{i}ms,{3 * i}ms" for i in range(8))
    )
    watched, net = Records(), Network(read_profiles(where, 8), 0)
    simulate(replace(TINY, network=where, out=out(tmp_path, "run")), watched)
    for outcome, record in zip(outcomes, watched.records, strict=True):
        cost = outcome.traffic
        assert any(cost.uplink.values()) and (outcome.round == 1 or any(cost.downlink.values()))
        expected = {
            c: net.exchange_s(c, outcome.round, cost.downlink[c], 2, cost.uplink[c])
            for c in outcome.cohort
        }
        assert (
            cost.latency_s == expected
            and outcome.simulated_s == max(expected.values()) == record.simulated_s
        )
        assert (
            sum(cost.uplink.values()) == record.uplink_bytes
            and sum(cost.downlink.values()) == record.downlink_bytes
        )
    hours = [record.simulated_hours for record in watched.records]
    assert hours == pytest.approx(
        [sum(r.simulated_s for r in watched.records[: i + 1]) / 3600 for i in range(len(hours))],
        rel=1e-12,
    )
    assert watched.summary.simulated_hours == hours[-1] and watched.header.network == where
    assert [line["simulated_s"] for line in rounds_of(out(tmp_path, "run"))] == [
        o.simulated_s for o in outcomes
    ]


def test_durations_of_phases_add_up_and_only_the_training_phase_has_steps(tmp_path, outcomes):
    where = network(tmp_path, *(f"{i},1e15,1e15,{i + 1}s,{10 * i}s" for i in range(8)))
    config = replace(
        TINY,
        network=where,
        strategy="powersgd:rank=1",
        uplink="powersgd:rank=1",
        memory="lowrank",
        out=out(tmp_path, "run"),
    )
    simulate(config)
    for outcome in outcomes:
        slowest = max(outcome.cohort)
        assert outcome.simulated_s == pytest.approx(4 * (slowest + 1) + 2 * 10 * slowest)


def test_a_network_changes_only_the_time(tmp_path):
    simulate(replace(TINY, out=out(tmp_path, "without")))
    simulate(replace(TINY, network="mobile:absent=0", out=out(tmp_path, "with")))
    assert model_bytes(out(tmp_path, "with")) == model_bytes(out(tmp_path, "without"))
    lines = rounds_of(out(tmp_path, "with"))
    assert all(line.pop("simulated_s") > 0 and line.pop("simulated_hours") > 0 for line in lines)
    assert lines == rounds_of(out(tmp_path, "without"))
    assert "network" not in read_run(out(tmp_path, "without"))


# Deadline and quorum.


def test_a_deadline_excludes_exactly_the_later_clients(tmp_path, outcomes):
    where = slower(tmp_path, "10ms", "900ms", "20ms", "10s", "30ms", "40ms")
    simulate(replace(ALL, network=where, deadline=1.0, rounds=1, out=out(tmp_path, "run")))
    (first,) = outcomes
    assert left_out(first, "deadline") == [1, 3] and {a.client for a in first.accepted} == {
        0,
        2,
        4,
        5,
    }
    assert first.simulated_s == 1.0 and {r.reason for r in first.rejections} == {
        "no reply within 1 s (--deadline)"
    }


def test_an_answer_that_arrives_at_the_deadline_counts(tmp_path, outcomes):
    where = network(
        tmp_path,
        *(
            f"{i},1e15,1e15,{latency},0"
            for i, latency in enumerate(["0.25", "0.5", "0.5001", "0", "0", "0"])
        ),
    )
    simulate(
        replace(
            ALL,
            network=where,
            deadline=1.0,
            rounds=1,
            uplink="stc:density=10%",
            out=out(tmp_path, "run"),
        )
    )
    assert left_out(outcomes[0], "deadline") == [
        1,
        2,
    ]  # with the time for the frames, client 1 needs more than 1 s
    outcomes.clear()
    where = network(
        tmp_path,
        *(
            f"{i},8e14,1e15,{latency},0"
            for i, latency in enumerate(["0.25", "0.5", "0.5001", "0", "0", "0"])
        ),
    )
    config = replace(ALL, network=where, rounds=1, uplink="stc:density=10%")
    simulate(replace(config, out=out(tmp_path, "free")))
    exact = outcomes[0].traffic.latency_s[1]
    simulate(replace(config, deadline=exact, out=out(tmp_path, "exact")))
    assert left_out(outcomes[1], "deadline") == [2] and outcomes[1].simulated_s == exact


def test_a_client_that_missed_a_deadline_is_drawn_again_after_its_late_answer(tmp_path, outcomes):
    where = slower(
        tmp_path, "0.3s", "0.3s", "0.3s", "1.2s", "0.3s", "0.3s"
    )  # client 3 takes two local steps of 1.2 s each
    simulate(replace(ALL, network=where, deadline=1.0, rounds=12, out=out(tmp_path, "run")))
    assert left_out(outcomes[0], "deadline") == [3] and outcomes[0].simulated_s == 1.0
    began, now, intervals_s = 0.0, 0.0, []
    for outcome in outcomes:
        if 3 in outcome.cohort:
            assert left_out(outcome, "deadline") == [3]
            intervals_s.append(now - began)  # time since the client's previous assignment
            began = now
        else:
            assert outcome.simulated_s < 1.0
        now += outcome.simulated_s
    assert len(intervals_s) > 1 and all(2.4 < since < 2.4 + 0.7 for since in intervals_s[1:])


def test_a_quorum_accepts_the_first_answers_and_ends_with_the_last_of_them(tmp_path, outcomes):
    where = slower(tmp_path, "60ms", "10ms", "50ms", "20ms", "40ms", "30ms")
    simulate(replace(ALL, network=where, quorum=0.5, rounds=1, out=out(tmp_path, "run")))
    (first,) = outcomes
    assert [a.client for a in first.accepted] == [1, 3, 5] and left_out(first, "quorum") == [
        0,
        2,
        4,
    ]
    assert first.simulated_s == max(first.traffic.latency_s.values()) == first.traffic.latency_s[5]


@pytest.mark.slow
def test_a_busy_client_starts_its_newest_assignment_when_it_has_finished(tmp_path, outcomes):
    where = network(
        tmp_path,
        *(
            f"{i},1e15,1e15,0,{step}"
            for i, step in enumerate(["1s", "1s", "1s", "1s", "1s", "2.1s"])
        ),
    )
    simulate(
        replace(ALL, network=where, quorum=5 / 6, rounds=5, local_steps=1, out=out(tmp_path, "run"))
    )
    # Client 5 misses the rounds that end at 1 s and 2 s. At 2.1 s, it has finished its first assignment and starts that of round 3.
    assert [left_out(o, "quorum") for o in outcomes] == [[5]] * 5
    assert [o.simulated_s for o in outcomes] == pytest.approx([1.0] * 5)
    outcomes.clear()
    where = network(
        tmp_path,
        *(
            f"{i},1e15,1e15,0,{step}"
            for i, step in enumerate(["1s", "1s", "1s", "1s", "1.3s", "1.2s"])
        ),
    )
    simulate(
        replace(
            ALL, network=where, quorum=5 / 6, rounds=4, local_steps=1, out=out(tmp_path, "late")
        )
    )
    # Each round ends after 1.2 s with the answer of client 5. Client 4 is busy until 1.3 s, and therefore later in each round.
    assert [left_out(o, "quorum") for o in outcomes] == [[4]] * 4


@pytest.mark.parametrize(
    ("limits", "uplink"),
    [({"deadline": 1.0}, "stc:density=10%"), ({"quorum": 0.5}, "qsgd:levels=4,damped=true")],
)
def test_the_update_of_a_late_client_stays_in_its_memory(
    tmp_path, monkeypatch, outcomes, limits, uplink
):
    inputs: dict[int, torch.Tensor] = defaultdict(lambda: 0.0)
    encode, kept = VirtualClients.encode, []

    def listening(self, assignments, updates, traces):
        kept[:] = [self]
        for a, update in zip(assignments, updates if assignments else (), strict=True):
            inputs[a.client] = inputs[a.client] + update.clone()
        return encode(self, assignments, updates, traces)

    monkeypatch.setattr(VirtualClients, "encode", listening)
    where = slower(tmp_path, "10ms", "450ms", "20ms", "0.6s", "30ms", "40ms")
    simulate(
        replace(ALL, network=where, uplink=uplink, rounds=8, out=out(tmp_path, "run"), **limits)
    )
    assert sum(len(o.rejections) for o in outcomes) > 2
    (clients,) = kept
    for client in range(6):
        state = clients.states.at(client)
        taken = [a for o in outcomes for a in o.accepted if a.client == client]
        state.memory.commit() if taken and state.ticket == taken[
            -1
        ].ticket else state.memory.rollback()
        sent = torch.zeros(clients.replica.weights.numel())
        for answer in taken:
            if answer.update is not None:
                answer.update.add_to(sent)
        torch.testing.assert_close(
            sent + state.memory.state_dict()["residual"], inputs[client], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    ("steps", "counts"),
    [(("1ms", "1ms", "1ms", "1ms", "9s"), True), (("9s", "1ms", "1ms", "9s", "9s"), False)],
)
def test_late_voters_count_as_absent_in_an_election(tmp_path, outcomes, steps, counts):
    config = replace(
        ALL,
        clients=5,
        rounds=1,
        batch_size=1,
        strategy="election:byzantine=1,f=0",
        uplink="sign",
        downlink="efsign",
        memory="none",
        network=slower(tmp_path, *steps),
        deadline=5.0,
    )
    simulate(replace(config, out=out(tmp_path, "run")))
    (outcome,) = outcomes
    late = [client for client, step in enumerate(steps) if step == "9s"]
    assert left_out(outcome, "deadline") == late and outcome.simulated_s == 5.0
    assert (outcome.broadcast is not None) == counts and bool(
        left_out(outcome, "aggregate")
    ) != counts


# Absent and silent clients.

AWAY = "uniform:up=1kB,down=10kB,latency=100ms,step=100ms,absent=40%,stretch=5s"


@pytest.mark.slow
def test_absent_clients_are_not_drawn_or_lost_and_catch_up_with_the_model(outcomes):
    rules = StrategyConfig(
        participation=1.0, uplink="stc:density=10%", downlink="stc:density=10%", seed=3
    )
    federation = Federation(rules, clients=8)
    flat = {
        "up": 1e3,
        "down": 1e4,
        "latency": 0.1,
        "step": 0.1,
        "absent": 0.4,
        "stretch": 5.0,
        "stall": 0.0,
        "factor": 1.0,
        "swing": 0.0,
    }
    profiles = Profiles(
        **{
            name: torch.full((8,), value, dtype=torch.float64).numpy()
            for name, value in flat.items()
        }
    )
    timing = Timing(
        Network(profiles, 3),
        RunConfig(clients=8, participation=0.25),
        federation.strategy.min_clients,
        federation.transport,
        lambda a: 2,
    )
    federation.use(timing.transport)
    federation.loop.gather = timing.gather
    gone, caught_up = 0, 0
    for outcome in federation.loop.rounds(range(1, 31)):
        timing.on_round_end(outcome)
        assert 2 <= len(outcome.cohort) <= 8
        for client in outcome.cohort:
            replica = federation.members[client].replica
            assert (
                replica.version == federation.loop.broadcasts.version
                or outcome.broadcast is not None
            )
        gone += sum(
            "did not reconnect" in r.reason and r.stage == "reply" for r in outcome.rejections
        )
        caught_up += outcome.traffic.catch_up_bytes
        versions = {member.replica.version: member.replica.weights for member in federation.members}
        assert all(
            torch.equal(versions[m.replica.version], m.replica.weights) for m in federation.members
        )
    assert gone and caught_up and len({len(o.cohort) for o in outcomes}) > 2
    assert {r.stage for o in outcomes for r in o.rejections} == {"reply"}


def test_absent_clients_of_a_run_download_missed_broadcasts(tmp_path, outcomes):
    watched = Records()
    simulate(
        replace(
            TINY, network=AWAY.replace("step=100ms", "step=1s"), rounds=20, out=out(tmp_path, "run")
        ),
        watched,
    )
    assert sum(r.catch_up_bytes for r in watched.records) > 0 and any(
        r.rejected for r in watched.records
    )
    assert all(
        "did not reconnect" in r.reason for record in watched.records for r in record.rejections
    )
    assert watched.summary.client_updates == sum(len(o.accepted) for o in outcomes) > 40


def test_a_round_waits_in_virtual_time_while_too_few_clients_are_online(tmp_path, outcomes):
    simulate(
        replace(
            TINY,
            clients=3,
            participation=1.0,
            network=AWAY.replace("40%", "70%"),
            rounds=6,
            out=out(tmp_path, "run"),
        )
    )
    assert all(len(o.cohort) >= 2 for o in outcomes)
    assert any(
        o.simulated_s > max(o.traffic.latency_s.values(), default=0.0) + 1.0 for o in outcomes
    )


@pytest.mark.parametrize(
    ("limits", "stage"),
    [({}, "reply"), ({"deadline": 2.0}, "deadline"), ({"deadline": 2.0, "quorum": 0.5}, None)],
)
def test_a_silent_byzantine_client_delays_a_round_until_the_deadline(
    tmp_path, outcomes, limits, stage
):
    where = slower(tmp_path, *["10ms"] * 6)
    simulate(
        replace(
            ALL,
            network=where,
            attack="abstention:clients=4",
            rounds=1,
            out=out(tmp_path, "run"),
            **limits,
        )
    )
    (first,) = outcomes
    assert first.simulated_s == (
        2.0
        if stage == "deadline"
        else max(first.traffic.latency_s[c] for c in first.traffic.latency_s if c != 4)
    )
    assert left_out(first, stage) == [4] if stage else 4 in left_out(first, "quorum")


def test_the_report_of_a_failed_client_arrives_in_virtual_time(tmp_path, outcomes):
    where = slower(tmp_path, *["10ms"] * 8)
    config = replace(
        TINY,
        task=TINY.task.replace(":task", ":one_raises"),
        partition="iid",
        local_epochs=1,
        participation=1.0,
    )
    simulate(replace(config, network=where, rounds=1, out=out(tmp_path, "run")))
    (first,) = outcomes
    (failed,) = left_out(first, "train")
    assert (
        first.traffic.uplink[failed] == 0
        and 0 < first.traffic.latency_s[failed] < first.simulated_s
    )


# Determinism.

RUNS = {
    "all": {"network": "mobile"},
    "deadline": {"network": "lognormal:up=200,down=1kB,latency=100ms,step=100ms", "deadline": 1.0},
    "quorum": {
        "network": "lognormal:up=200,down=1kB,latency=100ms,step=100ms,swing=0.5",
        "quorum": 0.5,
    },
    "absent": {"network": AWAY, "deadline": 3.0},
    "asynchronous": {
        "network": "lognormal:up=200,down=1kB,step=1s,absent=20%,stretch=5s",
        "strategy": "asynchronous:wait=0.5,staleness=3",
    },
}


@pytest.mark.parametrize(
    ("name", "every", "stop"),
    [(name, *((1, (5, 2)), (4, (3, None)))[i % 2]) for i, name in enumerate(RUNS)],
)
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(tmp_path, name, stop, every):
    config = replace(TINY, rounds=8, checkpoint_every=every, **RUNS[name])
    assert_the_same_when_stopped(tmp_path, config, StopsAt(*stop), StopsAt(7))


def test_equal_seeds_give_equal_runs_and_other_seeds_other_runs(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        simulate(replace(TINY, seed=seed, out=out(tmp_path, name), **RUNS["deadline"]))
    assert (
        rounds_of(out(tmp_path, "a"))
        == rounds_of(out(tmp_path, "b"))
        != rounds_of(out(tmp_path, "c"))
    )


# Asynchronous runs.


@pytest.mark.slow
def test_asynchronous_clients_answer_after_the_time_of_their_network(tmp_path, outcomes):
    where = slower(tmp_path, "10ms", "10ms", "10ms", "10ms", "100ms", "200ms")
    config = replace(ALL, network=where, strategy="asynchronous:wait=0,staleness=1000", rounds=80)
    simulate(replace(config, out=out(tmp_path, "run")))
    assert all(o.simulated_s >= 0 for o in outcomes) and all(len(o.cohort) == 1 for o in outcomes)
    counts = [sum(o.cohort == [client] for o in outcomes) for client in range(6)]
    assert min(counts[:4]) > 5 * max(counts[4:]) and all(
        o.traffic.latency_s[o.cohort[0]] > 0 for o in outcomes
    )
    total = sum(o.simulated_s for o in outcomes)
    assert counts[4] == pytest.approx(total / 0.25, abs=1.5) and counts[5] == pytest.approx(
        total / 0.45, abs=1.5
    )


def test_a_deadline_closes_rounds_of_an_asynchronous_run(tmp_path, outcomes):
    where = slower(tmp_path, *["5s"] * 6)
    config = replace(
        ALL, network=where, strategy="asynchronous:wait=1,staleness=1000", deadline=4.0, rounds=3
    )
    simulate(replace(config, out=out(tmp_path, "run")))
    assert [len(o.accepted) for o in outcomes] == [0, 0, 6]
    assert [o.simulated_s for o in outcomes[:2]] == [4.0, 4.0] and 10.0 < sum(
        o.simulated_s for o in outcomes
    ) < 11.0


# Budgets, and options that exclude each other.


def test_budgets_are_proportional_to_the_uplinks_of_the_network(tmp_path, outcomes):
    where = network(
        tmp_path,
        *(f"{i},{up},1MB,0,0" for i, up in enumerate(["100", "200", "400", "800", "800", "1600"])),
    )
    simulate(
        replace(
            ALL,
            uplink="topk:density=100%",
            network=where,
            budget="600",
            rounds=3,
            out=out(tmp_path, "run"),
        )
    )
    for outcome in outcomes:
        sent = [outcome.traffic.uplink[client] for client in range(6)]
        assert sum(sent) <= 600 and sent[0] < sent[2] < sent[5]


def test_a_time_budget_gives_each_client_what_its_uplink_can_send(tmp_path, outcomes):
    where = network(
        tmp_path,
        *(f"{i},{up},1MB,0,0" for i, up in enumerate(["20", "30", "40", "50", "60", "1MB"])),
    )
    simulate(
        replace(
            ALL,
            uplink="topk:density=100%",
            network=where,
            budget="2s",
            rounds=3,
            out=out(tmp_path, "run"),
        )
    )
    for outcome in outcomes:
        sent = [outcome.traffic.uplink[client] for client in range(6)]
        assert sent == sorted(sent) and sent[0] < sent[4] < sent[5] and outcome.simulated_s < 2.1
        assert (
            all(b <= 2 * up for b, up in zip(sent, (20, 30, 40, 50, 60), strict=False))
            and sent[4] > 90
        )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"budget": "30s"},
            "--budget 30s is a time and needs the speed of each uplink; give --bandwidths or --network",
        ),
        (
            {"budget": "1s", "network": "uniform:up=5"},
            "--budget of 1 s is too short for client 0: it can send 5 bytes .* give at least [4-9]s",
        ),
        (
            {"budget": "1ms", "network": "uniform:up=5kB"},
            "--budget of 0.001 s is too short for client 0: .* give at least [1-9]ms",
        ),
        (
            {"network": "mobile", "relays": 2},
            "--network simulates direct uploads to the server, but --relays sends uploads to relays",
        ),
        (
            {"network": "mobile", "budget": "9kB", "bandwidths": "1kB"},
            "--bandwidths and --network both set",
        ),
        ({"network": "moblie"}, "unknown network 'moblie'; did you mean 'mobile'"),
        ({"network": "nowhere/clients.csv"}, "--network nowhere/clients.csv cannot be read"),
    ],
)
def test_errors_in_options_are_raised_before_anything_is_written(tmp_path, options, sentence):
    with pytest.raises(Exception, match=sentence) as caught:
        simulate(replace(TINY, uplink="stc:density=10%", out=out(tmp_path, "run"), **options))
    assert caught.value.exit_status == 2 and not (tmp_path / "run").exists()


def test_a_run_without_accepted_updates_warns_at_its_end(tmp_path):
    said = []
    watching = Callback()
    watching.on_warning = said.append
    config = replace(
        ALL, network=slower(tmp_path, *["5s"] * 6), deadline=1.0, rounds=2, out=out(tmp_path, "run")
    )
    summary = simulate(config, watching)
    assert (
        summary.client_updates == 0
        and said[-1:] == [NOTHING_ACCEPTED]
        and summary.warnings[-1:] == (NOTHING_ACCEPTED,)
    )
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["warnings"][-1:] == [
        NOTHING_ACCEPTED
    ]
    simulate(replace(config, deadline=0.0, rounds=3, resume=True), watching)
    assert (
        NOTHING_ACCEPTED
        not in json.loads((tmp_path / "run" / "summary.json").read_text())["warnings"]
    )


def test_an_election_warns_once_that_it_waits_for_more_than_the_quorum(tmp_path, outcomes):
    said = []
    watching = Callback()
    watching.on_warning = said.append
    config = replace(
        ALL,
        clients=5,
        network="mobile:absent=0",
        strategy="election:byzantine=1",
        uplink="sign",
        downlink="efsign",
        memory="none",
        quorum=0.2,
        rounds=3,
        out=out(tmp_path, "run"),
    )
    simulate(config, watching)
    (sentence,) = (sentence for sentence in said if "--quorum" in sentence)
    assert sentence == (
        "--quorum 0.2 is 1 of 5 answers, but a vote with f=1 waits for 5 answers, so that fast Byzantine clients cannot fill the quorum"
    )
    simulate(replace(config, quorum=1.0, out=out(tmp_path, "all")), watching)
    assert sum("--quorum" in sentence for sentence in said) == 1


def test_a_server_refuses_a_virtual_network(tmp_path):
    with pytest.raises(
        ConfigError,
        match="--network simulates the network of a simulation's clients; leave --network out, or use fedcomp sim",
    ):
        serve(RunConfig(network="mobile", out=out(tmp_path, "run")), Endpoint(0))


def test_a_resumed_run_needs_the_same_network_values(tmp_path):
    config = replace(
        ALL, network=slower(tmp_path, *["10ms"] * 6), rounds=2, out=out(tmp_path, "run")
    )
    simulate(config)
    slower(tmp_path, *["20ms"] * 6)
    with pytest.raises(
        RunFolderError,
        match="--network .* differs from the network at the start of the run; restore that network",
    ):
        simulate(replace(config, rounds=3, resume=True))
    slower(tmp_path, *["10ms"] * 6)
    simulate(replace(config, rounds=3, resume=True))


def test_a_csv_file_written_by_a_spreadsheet_is_read(tmp_path, outcomes):
    with open(tmp_path / "sheet.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(
            [["client", "down", "up"], *([i, "1MB", "10kB"] for i in range(8))]
        )
    simulate(replace(TINY, network=str(tmp_path / "sheet.csv"), rounds=1, out=out(tmp_path, "run")))
    assert outcomes[0].simulated_s == max(outcomes[0].traffic.uplink.values()) / 10e3
