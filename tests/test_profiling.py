"""The profiler: timed blocks nest, their own times add up, and nothing is recorded outside of `recording`."""

import threading

import pytest

from fedcomp.profiling import Recorder, recording, timed


class Clock:
    """A clock that advances by the next of `ticks` at each call, and by 1 after the last."""

    def __init__(self, *ticks: float):
        self.now, self.ticks = 0.0, iter(ticks)

    def __call__(self) -> float:
        self.now += next(self.ticks, 1.0)
        return self.now


def test_own_time_excludes_inner_blocks():
    with recording(Recorder(clock=Clock(1, 2, 4, 8, 16, 32))) as recorder:
        with timed("round"):
            with timed("clients"):
                pass
            with timed("aggregation"):
                pass
    assert recorder.take() == {"clients": 4.0, "aggregation": 16.0, "round": 42.0}
    assert recorder.take() == {}


def test_nothing_is_recorded_outside_of_recording():
    recorder = Recorder()
    with timed("before"):
        pass
    with recording(recorder), timed("within"):
        pass
    with timed("after"):
        pass
    assert list(recorder.take()) == ["within"]


def test_a_block_that_raises_is_recorded():
    with recording(Recorder()) as recorder:
        with pytest.raises(KeyError), timed("round"), timed("clients"):
            raise KeyError
        with timed("checkpoint"):
            pass
    assert list(recorder.take()) == ["clients", "round", "checkpoint"]


def test_blocks_of_other_threads_are_not_recorded():
    def work() -> None:
        with timed("elsewhere"):
            pass

    with recording(Recorder()) as recorder, timed("round"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert list(recorder.take()) == ["round"]


def test_recording_waits_for_the_device_at_both_ends_of_a_block():
    waits = []
    recorder = Recorder(lambda: waits.append(None))
    with timed("local SGD"):
        assert not waits
    with recording(recorder), timed("local SGD"):
        assert len(waits) == 1
    assert len(waits) == 2
