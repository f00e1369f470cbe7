"""A profiler for simulated rounds, which measures the time in named, nested spans.

Code marks spans with `timed`, which does nothing unless a recorder is active:

    with recording(Recorder()) as recorder:
        ...  # code that contains `with timed("evaluation"):`
    recorder.take()["evaluation"]  # seconds
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

_OFF = nullcontext()
_recorder: "Recorder | None" = None


class Recorder:
    """A recorder of the spans in the thread that created it.

    `synchronise` is called at the start and end of each span, and must wait until the training device (GPU) is idle.
    """

    def __init__(
        self,
        synchronise: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._synchronise = synchronise
        self._clock = clock
        self._thread = threading.get_ident()
        # By name: total duration of the finished spans, without the spans nested in them.
        self._seconds: dict[str, float] = defaultdict(float)
        # For each active span: total duration of the spans nested in it.
        self._nested_s: list[float] = []

    def take(self) -> dict[str, float]:
        """Return the total seconds, by name, of the spans that finished since the last call, without the time of spans nested in them."""
        taken, self._seconds = self._seconds, defaultdict(float)
        return taken

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
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
            seconds = self._clock() - start
            self._seconds[name] += seconds - self._nested_s.pop()
            if self._nested_s:
                self._nested_s[-1] += seconds


def timed(name: str) -> AbstractContextManager[None]:
    """Record a `with` block as a span named `name`, if a recorder is active."""
    return _OFF if _recorder is None else _recorder.span(name)


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Record all spans in a `with` block with `recorder`."""
    global _recorder
    before, _recorder = _recorder, recorder
    try:
        yield recorder
    finally:
        _recorder = before
