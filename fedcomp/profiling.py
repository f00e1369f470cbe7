"""Where the time of a simulated round goes: named spans, which nest. `timed` does nothing unless a recorder is on.

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
TRACKS = {  # by span; all others are on the third track
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
    """A span that has ended. Times in seconds since the recorder was made."""

    name: str
    start_s: float
    seconds: float
    own_s: float  # without the spans inside it
    depth: int  # spans around it
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def track(self) -> str:
        return TRACKS.get(self.name, BESIDE)


class Recorder:
    """Records the spans in the thread that made it. `synchronise` waits until the device is idle."""

    def __init__(
        self,
        synchronise: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.events: list[Event] = []
        self._synchronise = synchronise
        self._clock = clock
        self._thread = threading.get_ident()
        self._inside: list[float] = []
        self._began = clock()

    @contextmanager
    def span(self, name: str, about: dict[str, Any]) -> Iterator[None]:
        """Record a span when it ends, also by an exception."""
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
    """Record the block as a span, with details that a trace shows."""
    return _OFF if _recorder is None else _recorder.span(name, about)


def timed_each(name: str, items: Iterable[T]) -> Iterator[T]:
    """Yield the items of an iterable; the time to make each is a span."""
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
    """Record spans with `recorder` until the block ends."""
    global _recorder
    before, _recorder = _recorder, recorder
    try:
        yield recorder
    finally:
        _recorder = before


def trace(events: Iterable[Event], process: str) -> dict[str, Any]:
    """Return events in the Trace Event Format of Chrome, which Perfetto opens: complete events in µs, a thread for each track.

    Source: Duca, Sinclair: Trace Event Format. Chromium 2016.
    """
    tracks = [SERVER, CLIENTS, BESIDE]
    named = [{"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": process}}]
    for tid, track in enumerate(tracks, 1):
        thread = {"ph": "M", "pid": 1, "tid": tid}
        named.append(thread | {"name": "thread_name", "args": {"name": track}})
        named.append(thread | {"name": "thread_sort_index", "args": {"sort_index": tid}})
    complete = [
        {
            "name": e.name,
            "cat": e.track,
            "ph": "X",
            "ts": 1e6 * e.start_s,
            "dur": 1e6 * e.seconds,
            "pid": 1,
            "tid": 1 + tracks.index(e.track),
            "args": e.about,
        }
        for e in sorted(events, key=lambda e: (e.start_s, e.depth))
    ]
    return {"traceEvents": named + complete, "displayTimeUnit": "ms"}
