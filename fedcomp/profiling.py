"""Where the time of a simulated round goes: named stretches of it, one inside the other. While nobody records, `timed` does nothing.

with recording(Recorder()) as recorder:
    ...  # code that says `with timed("evaluation"):`
recorder.events
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

SERVER, CLIENTS, BESIDE = "server", "clients", "plain loops"  # tracks
TRACKS = {  # of each stretch; what stands beside the run is on the third
    "round": SERVER,
    "aggregation": SERVER,
    "downlink": SERVER,
    "evaluation": SERVER,
    "checkpoint": SERVER,
    "clients": CLIENTS,
    "memories": CLIENTS,
    "local SGD": CLIENTS,
    "compression": CLIENTS,
}

_OFF = nullcontext()
_recorder: "Recorder | None" = None

T = TypeVar("T")


@dataclass(frozen=True)
class Event:
    """A stretch that is over. Times in seconds, from when the recorder was made."""

    name: str
    start_s: float
    seconds: float
    own_s: float  # without the stretches inside it
    depth: int  # stretches around it
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def track(self) -> str:
        return TRACKS.get(self.name, BESIDE)


class Recorder:
    """Hears of the stretches in the thread that made it. `synchronise` waits until the device has done what it was asked for."""

    def __init__(
        self,
        synchronise: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.events: list[Event] = []
        self._synchronise = synchronise
        self._clock = clock
        self._thread = threading.get_ident()
        self._inside = []
        self._began = clock()

    @contextmanager
    def span(self, name: str, about: dict[str, Any]) -> Iterator[None]:
        """A stretch, recorded when it ends, by an exception too."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._synchronise()
        start = self._clock()
        self._inside.append(0.0)
        try:
            yield
        finally:
            self._synchronise()
            seconds, within = self._clock() - start, self._inside.pop()
            if self._inside:
                self._inside[-1] += seconds
            self.events.append(
                Event(
                    name, start - self._began, seconds, seconds - within, len(self._inside), about
                )
            )


def timed(name: str, **about: Any) -> AbstractContextManager[None]:
    """A stretch of the round, with figures that a trace shows beside its name."""
    return _OFF if _recorder is None else _recorder.span(name, about)


def timed_each(name: str, items: Iterable[T]) -> Iterator[T]:
    """The items of an iterable, the making of each a stretch."""
    source = iter(items)
    while True:
        with timed(name):
            try:
                item = next(source)
            except StopIteration:
                return
        yield item


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Stretches are told to `recorder` until the block ends."""
    global _recorder
    before, _recorder = _recorder, recorder
    try:
        yield recorder
    finally:
        _recorder = before


def trace(events: Iterable[Event], process: str) -> dict[str, Any]:
    """Events in the Trace Event Format of Chrome, which Perfetto opens: complete events in µs, a thread for each track.

    Source: Duca, Sinclair: Trace Event Format. Chromium 2016.
    """
    numbers = {track: number for number, track in enumerate((SERVER, CLIENTS, BESIDE), 1)}
    named = [{"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": process}}]
    for track, number in numbers.items():
        named.append(
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": track}}
        )
        named.append(
            {
                "name": "thread_sort_index",
                "ph": "M",
                "pid": 1,
                "tid": number,
                "args": {"sort_index": number},
            }
        )
    complete = [
        {
            "name": e.name,
            "cat": e.track,
            "ph": "X",
            "ts": 1e6 * e.start_s,
            "dur": 1e6 * e.seconds,
            "pid": 1,
            "tid": numbers[e.track],
            "args": e.about,
        }
        for e in sorted(events, key=lambda e: (e.start_s, e.depth))
    ]
    return {"traceEvents": named + complete, "displayTimeUnit": "ms"}
