"""A profiler for simulated rounds, which records named, nested spans of time.

Code marks spans by `timed`, which does nothing unless a recorder is active:

with recording(Recorder()) as recorder:
    ...  # code that contains `with timed("evaluation"):`
recorder.events
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

# Tracks (rows) of a trace. The track BASELINES shows the plain PyTorch loops of `fedcomp bench sim`.
SERVER, CLIENTS, BASELINES = "server", "clients", "plain loops"
# The track of each span, by the name of the span. Spans with other names are on the track BASELINES.
TRACKS = dict.fromkeys(("round", "aggregation", "downlink", "evaluation", "checkpoint"), SERVER)
TRACKS |= dict.fromkeys(("clients", "memories", "local SGD", "compression"), CLIENTS)

_OFF = nullcontext()
_recorder: "Recorder | None" = None


@dataclass(frozen=True)
class Event:
    """A finished span."""

    name: str
    start_s: float  # seconds since the recorder was created
    seconds: float
    self_s: float  # duration without nested spans, in seconds
    depth: int  # number of spans that enclose this span
    details: dict[str, Any] = field(default_factory=dict)


class Recorder:
    """A recorder of the spans in the thread that created the recorder.

    `synchronise` is called at the start and end of each span, to wait until the device is idle.
    """

    def __init__(
        self,
        synchronise: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.events: list[Event] = []
        self._synchronise = synchronise
        self._clock = clock
        self._thread = threading.get_ident()
        # For each active span, the total duration of the spans nested in it, in seconds.
        self._nested_s: list[float] = []
        self._created = clock()

    @contextmanager
    def span(self, name: str, details: dict[str, Any]) -> Iterator[None]:
        """Record a `with` block as a span, even if the block raises an exception. Spans of other threads are not recorded."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._synchronise()
        start = self._clock()
        self._nested_s.append(0.0)
        try:
            yield
        finally:
            self._synchronise()
            seconds, nested_s = self._clock() - start, self._nested_s.pop()
            if self._nested_s:
                self._nested_s[-1] += seconds
            depth = len(self._nested_s)
            self.events.append(
                Event(name, start - self._created, seconds, seconds - nested_s, depth, details)
            )


def timed(name: str, **details: Any) -> AbstractContextManager[None]:
    """Record a `with` block as a span of the profile. A trace viewer shows `details` with the span."""
    return _OFF if _recorder is None else _recorder.span(name, details)


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Record all spans within a `with` block with `recorder`."""
    global _recorder
    before, _recorder = _recorder, recorder
    try:
        yield recorder
    finally:
        _recorder = before


def trace(events: Iterable[Event], process: str) -> dict[str, Any]:
    """Return events in Chrome's Trace Event Format, which Perfetto can open. Times are in µs, and each track is shown as a thread.

    Source: Duca, Sinclair: Trace Event Format. Chromium 2016.
    """
    tracks = [SERVER, CLIENTS, BASELINES]
    metadata = [{"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": process}}]
    for tid, track in enumerate(tracks, 1):
        thread = {"ph": "M", "pid": 1, "tid": tid}
        metadata.append(thread | {"name": "thread_name", "args": {"name": track}})
        metadata.append(thread | {"name": "thread_sort_index", "args": {"sort_index": tid}})
    complete = []
    for e in sorted(events, key=lambda e: (e.start_s, e.depth)):
        track = TRACKS.get(e.name, BASELINES)
        event: dict[str, Any] = {"name": e.name, "cat": track, "ph": "X", "args": e.details}
        event |= {"ts": 1e6 * e.start_s, "dur": 1e6 * e.seconds}
        complete.append(event | {"pid": 1, "tid": 1 + tracks.index(track)})
    return {"traceEvents": metadata + complete, "displayTimeUnit": "ms"}
