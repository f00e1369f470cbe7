"""Token buckets on a clock of their own, and who counts as one host."""

import pytest
from cases import for_each

from fedcomp.deployment.limits import ADDRESSES, Buckets, Limits, address_of
from fedcomp.errors import ConfigError


def test_a_burst_goes_at_once_then_requests_wait_for_their_turn_and_then_are_refused():
    buckets = Buckets(Limits(requests_per_s=10, burst=3, patience_s=0.25))
    assert [buckets.take("a", 0.0) for _ in range(3)] == [0, 0, 0]
    assert [buckets.take("a", 0.0) for _ in range(3)] == pytest.approx([0.1, 0.2, None])
    assert buckets.take("b", 0.0) == 0, "addresses have nothing to do with one another"


def test_tokens_come_back_at_the_rate_and_no_further_than_the_burst():
    buckets = Buckets(Limits(requests_per_s=10, burst=2, patience_s=0))
    assert [buckets.take("a", 0.0) for _ in range(3)] == [0, 0, None]
    assert [buckets.take("a", 0.11) for _ in range(2)] == [0, None]
    assert [buckets.take("a", 100.0) for _ in range(3)] == [0, 0, None]


def test_refusals_cost_nothing():
    buckets = Buckets(Limits(requests_per_s=1, burst=1, patience_s=0))
    buckets.take("a", 0.0)
    assert [buckets.take("a", 0.5) for _ in range(1000)] == [None] * 1000
    assert buckets.take("a", 1.001) == 0


def test_as_many_addresses_are_remembered_as_there_is_room_for():
    buckets = Buckets(Limits())
    for number in range(3 * ADDRESSES):
        buckets.take(str(number), 0.0)
    assert len(buckets._tokens) == ADDRESSES


@for_each(
    "host, address",
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_a_host_is_an_ipv4_address_or_an_ipv6_network(host, address):
    assert address_of(host) == address


@for_each("limit", ["body_bytes", "connections", "requests_per_s", "header_s"])
def test_a_limit_of_nothing_is_refused_by_name(limit):
    with pytest.raises(ConfigError, match=limit):
        Limits(**{limit: 0})
