"""The record of each client in a round: latency, missed versions and staleness."""

from dataclasses import replace

import pytest
from federation import Federation, SlowTransport
from test_asynchronous_loop import HALF, asynchronous, run, virtual
from test_broadcasts import advance, broadcasts

from fedcomp.server import broadcasts as made
from fedcomp.server import transport as clocks


class Clock:
    """A clock whose time changes only by `now += seconds` and `sleep`."""

    now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(clocks, "time", clock := Clock())
    return clock


def slowly(federation, clock, takes):
    """Let the clients of a federation work one after the other, each for `takes(client)` seconds."""
    handle, federation.at_once = federation.handle, 1

    def working(assignments):
        clock.now += sum(takes(a.client) for a in assignments)
        return handle(assignments)

    federation.handle = working


def test_latency_is_the_time_from_assignment_to_answer(clock):
    federation = Federation(replace(HALF, participation=1.0), clients=3)
    slowly(federation, clock, lambda client: 2.0**client)
    for outcome in run(federation, 3):
        assert outcome.traffic.latency_s == {0: 1.0, 1: 3.0, 2: 7.0}


def test_if_a_client_needs_the_dense_model_latency_covers_both_answers_and_its_version_is_unknown(
    clock,
):
    federation = Federation(replace(HALF, participation=1.0), clients=2)
    slowly(federation, clock, lambda client: 1.0)
    run(federation, 2)
    federation.members[0].replica.version = "lost"
    (outcome,) = run(federation, 1, 3)
    assert [a.client for a in outcome.accepted] == [0, 1]
    assert federation.loop.versions[0] == federation.loop.versions[1]
    assert outcome.traffic.versions_behind == {0: None, 1: 1}
    # Client 0 gets the dense model after 1 s, and answers after client 1.
    assert outcome.traffic.latency_s == {0: 1.0 + 2.0, 1: 2.0}


def test_versions_behind_is_the_number_of_versions_that_a_client_missed():
    federation = Federation(HALF, clients=10)
    versions, seen = [federation.loop.broadcasts.first], set()
    for round in range(1, 13):
        held = [member.replica.version for member in federation.members]
        (outcome,) = run(federation, 1, round)
        expected = {
            client: len(versions) - 1 - versions.index(held[client]) for client in outcome.cohort
        }
        assert outcome.traffic.versions_behind == expected
        seen |= set(expected.values())
        versions.append(federation.loop.broadcasts.version)
    assert {0, 1, 2, 3} <= seen


def test_after_a_restart_versions_behind_is_known_for_versions_in_the_cache():
    b = broadcasts("stc:density=1%")
    advance(b, 8)
    b.cache.popleft()
    names = [b.first, *(entry.version for entry in b.cache)]
    assert [b.versions_behind(name) for name in names] == [8, 6, 5, 4, 3, 2, 1, 0]
    b.restore(b.weights.clone(), b.memory.state_dict(), list(b.cache), b.version, b.newest_bytes)
    assert [b.versions_behind(name) for name in names] == [None, 6, 5, 4, 3, 2, 1, 0]
    assert b.versions_behind(b.cache[0].base) == 7
    advance(b, 1)
    assert b.versions_behind(names[-1]) == 1
    b.restore(b.weights.clone(), b.memory.state_dict(), [], b.version, b.newest_bytes)
    assert b.versions_behind(b.version) == 0 and b.versions_behind(names[-1]) is None


def test_the_number_of_remembered_versions_is_bounded(monkeypatch):
    monkeypatch.setattr(made, "MAX_NUMBERED_VERSIONS", 4)
    b = broadcasts("identity")
    advance(b, 20)
    assert len(b._numbers) == 4
    assert b.versions_behind(b.version) == 0 and b.versions_behind(b.first) is None


def test_staleness_is_the_number_of_rounds_since_the_client_started():
    federation = virtual(wait=0.4)
    late = set()
    for round in range(1, 10):
        began = dict(federation.loop.started_in)
        (outcome,) = run(federation, 1, round)
        expected = {client: round - began[client] for client in outcome.cohort if client in began}
        assert outcome.traffic.staleness == expected
        assert outcome.traffic.latency_s.keys() == set(outcome.cohort), (
            "answers that arrived before the round also have a latency"
        )
        late |= set(expected.values())
    assert len(late) > 1


def test_in_real_time_an_answer_keeps_its_latency_until_a_round_takes_it():
    federation = Federation(HALF, clients=4, strategy=asynchronous(wait=0.5))
    federation.use(SlowTransport(federation, {0: 3, 1: 0, 2: 5, 3: 2}))
    for outcome in run(federation, 6):
        assert outcome.traffic.latency_s.keys() == set(outcome.cohort)
        assert all(seconds >= 0 for seconds in outcome.traffic.latency_s.values())
    assert federation.loop._latency_s.keys() <= federation.loop.started_in.keys()
