"""Options of the asynchronous strategy, and the weights of late updates. tests/server/test_asynchronous_loop.py tests its rounds."""

import pytest
from cases import for_each

from fedcomp.errors import SpecError
from fedcomp.layout import Layout
from fedcomp.strategies import Average, StrategyConfig, strategy
from fedcomp.strategies.base import AcceptedUpdate

CONFIG, LAYOUT = StrategyConfig(participation=0.5), Layout.flat(8)


def late(rounds: int) -> AcceptedUpdate:
    return AcceptedUpdate(0, None, 1, 0.0, "", staleness=rounds)


@for_each("text", ["wait=2", "wait=-1", "staleness=-1", "decay=-0.5"])
def test_options_out_of_range_are_refused(text):
    with pytest.raises(SpecError, match=f"{text.split('=')[0]} is .*; give 0 to "):
        strategy(f"asynchronous:{text}", CONFIG, LAYOUT)


@for_each(
    "decay, discounts", [(0.0, [1, 1, 1]), (0.5, [1, 2**-0.5, 0.5]), (2.0, [1, 1 / 4, 1 / 16])]
)
def test_the_weight_of_an_update_decreases_with_its_staleness(decay, discounts):
    made = strategy(f"asynchronous:decay={decay}", CONFIG, LAYOUT)
    assert [made.discount(late(rounds)) for rounds in (0, 1, 3)] == pytest.approx(discounts)


def test_the_average_is_not_discounted():
    assert Average(CONFIG, LAYOUT).discount(late(3)) == 1.0
