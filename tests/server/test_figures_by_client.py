"""The record of each client in a round: latency, missed versions and staleness."""

from dataclasses import replace

import pytest
from federation import Federation, SlowTransport
from test_asynchronous_loop import HALF, asynchronous, run, virtual
from test_broadcasts import advance, broadcasts

from fedcomp.server import broadcasts as made
from fedcomp.server import transport as clocks


class Clock:
    """Stands still but for `now += seconds`."""

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
    """Its clients work one after the other, each for so many seconds."""
    handle, federation.at_once = federation.handle, 1

    def working(assignments):
        clock.now += sum(takes(a.client) for a in assignments)
        return handle(assignments)

    federation.handle = working


def test_an_answer_takes_from_question_to_answer(clock):
    federation = Federation(replace(HALF, participation=1.0), clients=3)
    slowly(federation, clock, lambda client: 2.0**client)
    for outcome in run(federation, 3):
        assert outcome.traffic.seconds == {0: 1.0, 1: 3.0, 2: 7.0}


def test_who_needs_the_model_first_takes_for_both_answers_and_how_far_behind_it_was_is_not_known(
    clock,
):
    federation = Federation(replace(HALF, participation=1.0), clients=2)
    slowly(federation, clock, lambda client: 1.0)
    run(federation, 2)
    federation.members[0].replica.version = "lost"
    (outcome,) = run(federation, 1, 3)
    assert [a.client for a in outcome.accepted] == [0, 1] and federation.loop.versions[
        0
    ] == federation.loop.versions[1]
    assert outcome.traffic.behind == {0: None, 1: 1}
    assert outcome.traffic.seconds == {
        0: 1.0 + 2.0,
        1: 2.0,
    }  # asked again at 1 s, answered after client 1


def test_a_client_is_behind_by_the_versions_that_it_has_missed():
    federation = Federation(HALF, clients=10)
    versions, seen = [federation.loop.broadcasts.first], set()
    for round in range(1, 13):
        held = [member.replica.version for member in federation.members]
        (outcome,) = run(federation, 1, round)
        expected = {
            client: len(versions) - 1 - versions.index(held[client]) for client in outcome.cohort
        }
        assert outcome.traffic.behind == expected
        seen |= set(expected.values())
        versions.append(federation.loop.broadcasts.version)
    assert {0, 1, 2, 3} <= seen


def test_how_old_a_version_is_is_known_for_those_in_the_cache_after_a_restart():
    b = broadcasts("stc:density=1%")
    advance(b, 8)
    b.cache.popleft()
    names = [b.first, *(entry.version for entry in b.cache)]
    assert [b.behind(name) for name in names] == [8, 6, 5, 4, 3, 2, 1, 0]
    b.restore(b.weights.clone(), b.memory.state_dict(), list(b.cache), b.version, b.newest_bytes)
    assert [b.behind(name) for name in names] == [None, 6, 5, 4, 3, 2, 1, 0] and b.behind(
        b.cache[0].base
    ) == 7
    advance(b, 1)
    assert b.behind(names[-1]) == 1
    b.restore(b.weights.clone(), b.memory.state_dict(), [], b.version, b.newest_bytes)
    assert b.behind(b.version) == 0 and b.behind(names[-1]) is None


def test_only_so_many_versions_are_numbered(monkeypatch):
    monkeypatch.setattr(made, "MAX_NUMBERED_VERSIONS", 4)
    b = broadcasts("identity")
    advance(b, 20)
    assert len(b._numbers) == 4 and b.behind(b.version) == 0 and b.behind(b.first) is None


def test_what_comes_in_a_later_round_is_that_late():
    federation = virtual(wait=0.4)
    late = set()
    for round in range(1, 10):
        began = dict(federation.loop.started_in)
        (outcome,) = run(federation, 1, round)
        expected = {client: round - began[client] for client in outcome.cohort if client in began}
        assert outcome.traffic.staleness == expected
        assert outcome.traffic.seconds.keys() == set(outcome.cohort), (
            "also of answers that came before they were taken"
        )
        late |= set(expected.values())
    assert len(late) > 1


def test_where_time_is_real_an_answer_that_waits_its_turn_keeps_its_seconds():
    federation = Federation(HALF, clients=4, strategy=asynchronous(wait=0.5))
    federation.use(SlowTransport(federation, {0: 3, 1: 0, 2: 5, 3: 2}))
    for outcome in run(federation, 6):
        assert outcome.traffic.seconds.keys() == set(outcome.cohort)
        assert all(seconds >= 0 for seconds in outcome.traffic.seconds.values())
    assert federation.loop._seconds.keys() <= federation.loop.started_in.keys()
