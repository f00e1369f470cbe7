"""Virtual times of single exchanges: the arrival of answers, and the start of busy clients."""

import numpy as np

from fedcomp.messages import FAILED, NEED_DENSE, UP_TO_DATE, Assignment, failure
from fedcomp.sim.network import Network, Profiles
from fedcomp.sim.timing import TimedTransport, VirtualClock
from fedcomp.transports.inprocess import InProcessTransport, Population

STEP_S, LATENCY_S = 1.0, 0.25
FLAT = {
    "up": 1e9,
    "down": 1e9,
    "latency": LATENCY_S,
    "step": STEP_S,
    "absent": 0.0,
    "stretch": 5.0,
    "stall": 0.0,
    "factor": 1.0,
    "swing": 0.0,
}


class Failing:
    """Clients that train and then fail, so that no frame is sent."""

    clients, at_once = 2, 2

    def handle(self, assignments):
        return [failure(a, "train", "it failed", kind=FAILED) for a in assignments]


class Outdated(Failing):
    """Two clients, the first of which needs the dense model."""

    def handle(self, assignments):
        kinds = {0: NEED_DENSE, 1: FAILED}
        return [failure(a, "download", "it is outdated", kind=kinds[a.client]) for a in assignments]


def transport(population: Population | None = None) -> TimedTransport:
    profiles = Profiles(**{name: np.full(2, value) for name, value in FLAT.items()})
    inner = InProcessTransport(population or Failing())
    return TimedTransport(inner, Network(profiles, 0), VirtualClock(), lambda assignment: 4)


def assignment(round: int, client: int = 0) -> Assignment:
    return Assignment(round, "train", client, UP_TO_DATE, "v", "v", "f", [], "")


def test_an_answer_takes_two_latencies_and_the_steps():
    timed = transport()
    timed.clock.begin(None)
    timed.send([assignment(1)])
    (delivery,) = timed.receive(0.0)
    assert delivery.arrived_s == 4 * STEP_S + 2 * LATENCY_S


def test_a_busy_client_starts_when_it_has_finished():
    timed = transport()
    timed.clock.begin(1.0)
    timed.send([assignment(1)])
    assert timed.receive(0.0) == [] and timed.clock.now() == 1.0  # the deadline passed
    timed.cancel([0])
    timed.clock.begin(None)
    timed.send([assignment(2), assignment(2, client=1)])
    timed.clock.expect(2)
    free, busy = timed.receive(0.0)
    duration_s = 4 * STEP_S + 2 * LATENCY_S
    assert (free.client, free.arrived_s) == (1, duration_s)
    assert (busy.client, busy.arrived_s) == (0, duration_s - 1.0 + duration_s)


def test_the_answer_of_a_client_that_needs_the_dense_model_is_returned_first():
    timed = transport(Outdated())
    timed.network.profiles.latency[1] = 10.0
    timed.clock.begin(None)
    timed.clock.expect(2)
    timed.send([assignment(1), assignment(1, client=1)])
    for client, latency_s in ((0, LATENCY_S), (1, 10.0)):
        (delivery,) = timed.receive(0.0)
        assert (delivery.client, timed.clock.now()) == (client, 2 * latency_s)
