"""Bandwidths that are derived from a run's options before round 1."""

import pytest

from fedcomp import RunConfig
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout
from fedcomp.server.results import bandwidths_of, make_strategy
from fedcomp.strategies import resolved


def bandwidths(**options):
    config = resolved(RunConfig(clients=4, participation=0.5, uplink="stc", **options))
    return bandwidths_of(make_strategy(config, Layout.flat(100)), config)


def test_bandwidths_are_assigned_to_clients_in_turn():
    assert bandwidths(budget="1kB", bandwidths="3kB,1kB,2kB") == {
        0: 3000,
        1: 1000,
        2: 2000,
        3: 3000,
    }
    assert bandwidths(budget="1kB") == {}


def test_a_time_budget_that_is_too_short_for_any_client_is_refused_before_round_1():
    """The client may be outside of the first cohort."""
    with pytest.raises(ConfigError, match="too short for client 3"):
        bandwidths(budget="1s", bandwidths="1kB,1kB,1kB,5B")
    assert bandwidths(budget="1s", bandwidths="1kB,1kB,1kB,500B")[3] == 500


def test_a_byte_budget_that_is_too_small_for_a_cohort_is_refused():
    with pytest.raises(ConfigError, match="too small for 2 clients"):
        bandwidths(budget="20B")
    assert bandwidths(budget="60B") == {}
