"""The rounds after which a simulation saves its state: every N rounds, or at intervals that keep the total time of saves low."""

import time
from collections.abc import Callable

from ..config import AUTO

PAUSE_FACTOR = 20  # minimum time between two saves, as a multiple of the duration of the first save
MIN_PAUSE_S = 10.0  # minimum time between two saves, in seconds


class SaveTimes:
    """The rounds after which a run is saved. `every` is the number of rounds from one save to the next, or "auto".

    With "auto", the time between two saves is at least MIN_PAUSE_S seconds, and at least PAUSE_FACTOR times the duration of the first save.
    Saves therefore take at most about a twentieth of the time of a run.
    """

    def __init__(self, every: str, clock: Callable[[], float] = time.perf_counter):
        self.rounds = None if every == AUTO else int(every)
        self.clock = clock
        self._saved_s, self._duration_s = clock(), 0.0

    def due(self, round: int) -> bool:
        if self.rounds is not None:
            return round % self.rounds == 0
        return self.clock() - self._saved_s >= max(MIN_PAUSE_S, PAUSE_FACTOR * self._duration_s)

    def record_save(self, duration_s: float) -> None:
        self._saved_s, self._duration_s = self.clock(), duration_s
