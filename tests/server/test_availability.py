"""The clients that a round waits for and draws: a silent client costs a run one deadline, and is drawn again after its next answer."""

import math

from cases import for_each

from fedcomp import RunConfig
from fedcomp.server.availability import RETURN_S, Availability, Quota
from fedcomp.server.transport import GRACE_S
from fedcomp.strategies.base import cohort_size

WITH_DEADLINE = RunConfig(clients=4, participation=1.0, deadline=30.0)
LATER = Quota.later(WITH_DEADLINE, 4)


def begun():
    availability = Availability()
    assert availability.cohort_of([0, 1, 2, 3], LATER, 0.0) == [0, 1, 2, 3]
    return availability


def test_the_first_round_of_a_new_run_waits_for_all_clients_without_limit():
    first = Quota.first(WITH_DEADLINE, resumed=False)
    assert Availability().cohort_of([0, 1, 2], first, 1e9) is None
    assert Availability().cohort_of([0, 1, 2, 3], first, 0.0) == [0, 1, 2, 3]


def test_the_first_round_of_a_resumed_run_with_a_deadline_has_a_time_limit():
    first = Quota.first(WITH_DEADLINE, resumed=True)
    assert Availability().cohort_of([0, 1], first, 29.0) is None
    assert Availability().cohort_of([0, 1], first, 30.0) == [0, 1]
    assert Availability().cohort_of([], first, 1e9) is None
    assert Quota.first(RunConfig(clients=4, deadline=0.5), resumed=True).patience_s == RETURN_S
    assert Quota.first(RunConfig(clients=4), resumed=True) == Quota(4, 4)


@for_each("quorum, wanted", [(1.0, 10), (0.75, 8), (0.01, 1)])
def test_without_a_deadline_a_round_needs_the_quorum_of_a_cohort(quorum, wanted):
    quota = Quota.later(RunConfig(clients=40, quorum=quorum), 10)
    assert Availability().cohort_of([*range(wanted - 1)], quota, 1e9) is None
    assert Availability().cohort_of([*range(wanted)], quota, 0.0) == [*range(wanted)]


@for_each(
    "options, limited",
    [
        ({}, False),
        ({"deadline": 60.0}, True),
        ({"quorum": 0.9}, True),
        ({"participation": 0.9}, True),
    ],
)
def test_a_round_waits_without_limit_for_a_lost_client_if_it_needs_all_clients(options, limited):
    config = RunConfig(clients=10, **{"participation": 1.0} | options)
    later = Quota.later(config, cohort_size(config.participation, config.clients))
    assert later.grace_s(10) == (GRACE_S if limited else math.inf)


def test_a_silent_client_is_neither_drawn_nor_waited_for_until_it_answers():
    availability = begun()
    availability.mark_silent([2])
    for _ in range(3):
        assert availability.cohort_of([0, 1, 2, 3], LATER, 0.0) == [0, 1, 3]
        availability.mark_silent([2])
    availability.mark_responsive(2)
    assert availability.cohort_of([0, 1, 2, 3], LATER, 0.0) == [0, 1, 2, 3]


def test_a_round_waits_once_for_a_client_that_left():
    availability = begun()
    assert availability.cohort_of([0, 1, 3], LATER, 29.0) is None
    assert availability.cohort_of([0, 1, 3], LATER, 30.0) == [0, 1, 3]
    assert availability.cohort_of([0, 1, 3], LATER, 0.0) == [0, 1, 3]
    assert availability.cohort_of([0, 1, 2, 3], LATER, 0.0) == [0, 1, 2, 3]
    # Client 2 came back, and has left again.
    assert availability.cohort_of([0, 1, 3], LATER, 0.0) is None


def test_if_all_clients_are_silent_they_are_drawn_again_after_a_deadline():
    availability = begun()
    availability.mark_silent(range(4))
    assert availability.cohort_of([0, 1, 2, 3], LATER, 29.0) is None
    assert availability.cohort_of([0, 1, 2, 3], LATER, 30.0) == [0, 1, 2, 3]
    assert availability.cohort_of([], LATER, 1e9) is None
    availability.mark_responsive(1)
    assert availability.cohort_of([0, 1, 2, 3], LATER, 0.0) is None  # a round needs two clients
    availability.mark_responsive(3)
    assert availability.cohort_of([0, 1, 2, 3], LATER, 0.0) == [1, 3]


@for_each("quorum, fewest", [(1.0, 2), (0.6, 3), (0.1, 2)])
def test_with_a_deadline_a_round_needs_two_clients_or_a_larger_quorum_below_1(quorum, fewest):
    later = Quota.later(RunConfig(clients=4, participation=1.0, deadline=30.0, quorum=quorum), 4)
    availability = Availability()
    assert availability.cohort_of([0, 1, 2, 3], later, 0.0) == [0, 1, 2, 3]
    availability.mark_silent(range(fewest - 1, 4))
    assert availability.cohort_of([0, 1, 2, 3], later, 29.0) is None
    assert availability.cohort_of([0, 1, 2, 3], later, 30.0) == [0, 1, 2, 3]
    assert availability.cohort_of([*range(fewest - 1)], later, 1e9) is None


def test_a_run_with_one_client_has_rounds_with_one_client():
    assert Quota.later(RunConfig(clients=1, deadline=30.0), 1).min_clients == 1


def test_without_a_deadline_silent_clients_are_drawn_if_others_are_too_few():
    availability, quota = Availability(), Quota(3, 3)
    availability.mark_silent([0])
    assert availability.cohort_of([0, 1, 2], quota, 0.0) == [0, 1, 2]
    assert availability.cohort_of([0, 1, 2, 3], quota, 0.0) == [1, 2, 3]


def test_a_strategy_may_raise_the_number_of_clients_that_a_round_needs():
    assert Quota(4, 1, 2.0).at_least(3) == Quota(4, 3, 2.0)
    assert Quota(4, 4).at_least(1) == Quota(4, 4)
    assert Availability().cohort_of([1, 2], Quota(4, 1, 2.0).at_least(3), 99.0) is None
