"""The profiler: timed blocks nest, their own times add up, traces have a valid format, and nothing is recorded outside of `recording`."""

import json
import threading

import pytest

from fedcomp.profiling import (
    BASELINES,
    CLIENTS,
    SERVER,
    Event,
    Recorder,
    recording,
    timed,
    trace,
)


class Clock:
    """A clock that advances by the next of `ticks` at each call, and by 1 after the last."""

    def __init__(self, *ticks: float):
        self.now, self.ticks = 0.0, iter(ticks)

    def __call__(self) -> float:
        self.now += next(self.ticks, 1.0)
        return self.now


def test_own_time_excludes_inner_blocks():
    with recording(Recorder(clock=Clock(0, 1, 2, 4, 8, 16, 32))) as recorder:
        with timed("round"):
            with timed("clients", asked=3):
                pass
            with timed("aggregation"):
                pass
    assert recorder.events == [
        Event("clients", 3.0, 4.0, 4.0, 1, {"asked": 3}),
        Event("aggregation", 15.0, 16.0, 16.0, 1),
        Event("round", 1.0, 62.0, 42.0, 0),
    ]
    assert sum(e.self_s for e in recorder.events) == 62.0


def test_nothing_is_recorded_outside_of_recording():
    recorder = Recorder()
    with timed("before"):
        pass
    with recording(recorder), timed("within"):
        pass
    with timed("after"):
        pass
    assert [e.name for e in recorder.events] == ["within"]


def test_a_block_that_raises_is_recorded():
    with recording(Recorder()) as recorder:
        with pytest.raises(KeyError), timed("round"), timed("clients"):
            raise KeyError
        with timed("checkpoint"):
            pass
    assert [(e.name, e.depth) for e in recorder.events] == [
        ("clients", 1),
        ("round", 0),
        ("checkpoint", 0),
    ]


def test_blocks_of_other_threads_are_not_recorded():
    def work() -> None:
        with timed("elsewhere"):
            pass

    with recording(Recorder()) as recorder, timed("round"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [e.name for e in recorder.events] == ["round"]


def test_recording_waits_for_the_device_at_both_ends_of_a_block():
    waited = []
    recorder = Recorder(lambda: waited.append(len(recorder.events)))
    with timed("local SGD"):
        assert not waited
    with recording(recorder), timed("local SGD"):
        assert waited == [0]
    assert waited == [0, 0]


def check_trace(found: dict) -> list[dict]:
    """Check a trace in the Trace Event Format and return its events.

    They must have the keys that a viewer needs and valid times, and events of a thread that overlap must be nested.
    """
    names = {(e["name"], e["tid"]): e["args"] for e in found["traceEvents"] if e["ph"] == "M"}
    assert ("process_name", 0) in names and {e["ph"] for e in found["traceEvents"]} <= {"M", "X"}
    events = [e for e in found["traceEvents"] if e["ph"] == "X"]
    for e in events:
        assert {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"} == e.keys()
        assert (
            e["ts"] >= 0
            and e["dur"] >= 0
            and isinstance(e["name"], str)
            and ("thread_name", e["tid"]) in names
        )
    for tid in {e["tid"] for e in events}:
        open_until: list[float] = []
        for e in sorted((e for e in events if e["tid"] == tid), key=lambda e: (e["ts"], -e["dur"])):
            while (
                open_until and open_until[-1] <= e["ts"] + 1e-3
            ):  # µs, a tolerance for sums of floats
                open_until.pop()
            assert all(e["ts"] + e["dur"] <= end + 1e-3 for end in open_until)
            open_until.append(e["ts"] + e["dur"])
    return events


def test_a_trace_has_a_track_for_each_side():
    with recording(Recorder()) as recorder:
        for _ in range(3):
            with timed("round"):
                with timed("clients"), timed("local SGD", clients=2):
                    pass
                with timed("aggregation"):
                    pass
            with timed("lean loop"):
                pass
    found = json.loads(json.dumps(trace(recorder.events, "a run")))
    events = check_trace(found)
    assert [e["name"] for e in events[:5]] == [
        "round",
        "clients",
        "local SGD",
        "aggregation",
        "lean loop",
    ]
    assert [e["cat"] for e in events[:5]] == [SERVER, CLIENTS, CLIENTS, SERVER, BASELINES]
    assert events[2]["args"] == {"clients": 2} and len({e["tid"] for e in events}) == 3


def test_check_trace_finds_events_that_overlap_without_nesting():
    crossing = [Event("round", 0.0, 2.0, 2.0, 0), Event("checkpoint", 1.0, 2.0, 2.0, 0)]
    with pytest.raises(AssertionError):
        check_trace(trace(crossing, "a run"))
