"""Figures of each client: what the port carried is booked on whose key it was, once."""

import pytest
from fedcomp.deployment.guard import Guard
from fedcomp.deployment.traffic import Traffic as Wire

from fedcomp.callbacks import Rejection
from fedcomp.deployment.by_client import ByClient
from fedcomp.server.exchange import Traffic
from fedcomp.server.round_loop import RoundResult

STRANGER = "10.0.0.9"


@pytest.fixture
def guard():
    return Guard("127.0.0.1", 0, 1)  # never started


def carry(guard, **bytes_by_key):
    guard.ledger._settled |= {
        key.encode() if key != "stranger" else STRANGER: Wire(*both)
        for key, both in bytes_by_key.items()
    }


def outcome(cohort, traffic, *rejections):
    return RoundResult(3, cohort, [], list(rejections), traffic, None)


def test_bytes_are_those_since_the_clients_last_record(guard):
    figures = ByClient(guard)
    figures.know(4, b"a")
    figures.know(7, b"b")
    carry(guard, a=(100, 10), b=(50, 5), stranger=(9999, 9999))
    (first,) = figures.records(outcome([4], Traffic()))
    assert (first.client, first.wire_bytes_in, first.wire_bytes_out) == (4, 100, 10)
    carry(guard, a=(130, 13), b=(70, 7))
    again, other = figures.records(outcome([4, 7], Traffic()))
    assert (again.wire_bytes_in, again.wire_bytes_out) == (30, 3) and (
        other.wire_bytes_in,
        other.wire_bytes_out,
    ) == (70, 7)


def test_a_client_with_a_new_key_keeps_what_the_old_one_carried(guard):
    figures = ByClient(guard)
    figures.know(4, b"old")
    carry(guard, old=(100, 10))
    figures.records(outcome([4], Traffic()))
    figures.know(4, b"new")
    carry(guard, old=(100, 10), new=(5, 1))
    (record,) = figures.records(outcome([4], Traffic()))
    assert (record.wire_bytes_in, record.wire_bytes_out) == (5, 1) and figures.port().by_client == {
        4: (105, 11)
    }


def test_a_record_says_what_the_round_came_to_for_a_client(guard):
    traffic = Traffic({1: 11}, {1: 5, 2: 6, 9: 7}, {1: 0.5}, {1: 0, 2: None, 9: 3}, {1: 2})
    records = ByClient(guard).records(
        outcome([2, 1], traffic, Rejection(2, "deadline", "no reply"))
    )
    assert [r.client for r in records] == [1, 2, 9], "9 was asked, and its answer is to come"
    answered, refused, asked = records
    assert (
        answered.uplink_bytes,
        answered.downlink_bytes,
        answered.latency_s,
        answered.staleness,
    ) == (11, 5, 0.5, 2)
    assert (answered.stage, answered.versions_behind) == ("", 0)
    assert (refused.stage, refused.reason, refused.latency_s, refused.versions_behind) == (
        "deadline",
        "no reply",
        None,
        None,
    )
    assert (asked.uplink_bytes, asked.downlink_bytes, asked.versions_behind, asked.stage) == (
        0,
        7,
        3,
        "",
    )


def test_the_port_counts_strangers_too(guard):
    figures = ByClient(guard)
    figures.know(4, b"a")
    carry(guard, a=(100, 10), stranger=(7, 3))
    guard.refused[404] += 2
    port = figures.port()
    assert (port.received_bytes, port.sent_bytes, port.connections) == (107, 13, 0)
    assert port.refused == {404: 2} and port.by_client == {4: (100, 10)}


def test_frames_that_never_left_for_a_silent_client_are_not_counted(guard):
    figures = ByClient(guard)
    for client, key in ((1, b"a"), (2, b"b"), (3, b"c")):
        figures.know(client, key)
    carry(guard, a=(10, 40), b=(10, 400), c=(10, 40))
    traffic = Traffic({3: 5}, {1: 300, 2: 300, 3: 300}, {3: 0.5})
    away = [Rejection(client, "deadline", "no reply") for client in (1, 2)]
    assert [
        record.downlink_bytes for record in figures.records(outcome([1, 2, 3], traffic, *away))
    ] == [0, 300, 300]
