"""The clients for which a deployed round waits: a client that crashes again and again delays few rounds."""

import pytest

from fedcomp.callbacks import Callback
from fedcomp.deployment.connected_clients import MAX_PAUSE_ROUNDS, ConnectedClients
from fedcomp.server.availability import Quota


class Connections:
    """A transport that only knows which clients are connected."""

    def __init__(self, *clients):
        self.now = set(clients)

    def clients(self):
        return dict.fromkeys(sorted(self.now))


@pytest.fixture
def connected():
    quota = Quota(wanted=3, min_clients=2, patience_s=0.1)
    return ConnectedClients(Connections(0, 1, 2), quota, Callback)


def crash(connected, client):
    """Let a client miss a deadline and reconnect."""
    connected.mark_silent([client])
    connected.join(client)


def test_a_client_that_misses_deadlines_in_a_row_is_drawn_less_and_less_often(connected):
    drawn = []
    for round in range(1, 33):
        if 2 in connected.gather():
            drawn.append(round)
            crash(connected, 2)
    assert drawn == [1, 2, 4, 8, 16, 32]
    assert connected.waited_s < 0.1


def test_an_answer_ends_the_pause_of_a_client(connected):
    for _ in range(2):
        connected.gather()
        crash(connected, 2)
    assert list(connected.gather()) == [0, 1]
    connected.mark_responsive(2)
    for _ in range(2):
        assert list(connected.gather()) == [0, 1, 2]
        crash(connected, 2)
        connected.mark_responsive(2)


def test_a_silent_client_that_stays_connected_is_not_drawn_until_it_answers(connected):
    connected.gather()
    connected.mark_silent([2])
    for _ in range(3):
        assert list(connected.gather()) == [0, 1]
    connected.mark_responsive(2)
    assert list(connected.gather()) == [0, 1, 2]


def test_a_client_that_leaves_between_rounds_again_and_again_delays_few_rounds(connected):
    delayed = []
    connected.gather()
    for round in range(2, 20):
        connected.transport.now.discard(2)
        before_s = connected.waited_s
        connected.gather()
        if connected.waited_s - before_s >= 0.1:
            delayed.append(round)
        connected.transport.now.add(2)
        connected.join(2)
        connected.gather()
    assert delayed == [2, 3, 4, 6, 10, 18]


def test_paused_clients_are_drawn_if_a_round_would_have_too_few(connected):
    connected.gather()
    for client in (1, 2):
        for _ in range(3):
            crash(connected, client)
            connected.silent.discard(client)
    connected.mark_silent([1, 2])
    connected.join(1)
    connected.join(2)
    assert list(connected.gather()) == [0, 1, 2]
    assert connected.waited_s >= 0.1


def test_a_client_pauses_for_at_most_64_rounds(connected):
    for _ in range(20):
        connected.silent.discard(2)
        crash(connected, 2)
    pauses = 0
    while 2 not in connected.gather():
        pauses += 1
    assert pauses == MAX_PAUSE_ROUNDS - 1
