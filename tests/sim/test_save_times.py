"""The rounds after which a simulation is saved: every N rounds, or so rarely that saves take at most a twentieth of the time."""

import pytest

from fedcomp import RunConfig
from fedcomp.errors import ConfigError
from fedcomp.sim.save_times import SaveTimes


class ManualClock:
    """A clock that only the test moves."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def saved_at(every: str, round_s: float, save_s: float, rounds: int) -> list[int]:
    clock = ManualClock()
    times, saved = SaveTimes(every, clock), []
    for round in range(1, rounds + 1):
        clock.now_s += round_s
        if times.due(round):
            clock.now_s += save_s
            times.record_save(save_s)
            saved.append(round)
    return saved


def test_quick_saves_are_at_least_ten_seconds_apart():
    assert saved_at("auto", round_s=4.0, save_s=0.01, rounds=10) == [3, 6, 9]


def test_slow_saves_take_at_most_a_twentieth_of_the_time():
    assert saved_at("auto", round_s=1.0, save_s=2.0, rounds=100) == [10, 50, 90]


def test_every_slow_round_is_saved():
    assert saved_at("auto", round_s=60.0, save_s=1.0, rounds=3) == [1, 2, 3]


def test_a_save_every_three_rounds():
    assert saved_at("3", round_s=100.0, save_s=50.0, rounds=10) == [3, 6, 9]


@pytest.mark.parametrize("every", ["0", "often", "1.5", "-1", 0])
def test_other_values_are_rejected(every):
    with pytest.raises(
        ConfigError, match="--checkpoint-every is .*; give a number of rounds, or auto"
    ):
        RunConfig(checkpoint_every=every)
