"""The rounds after which a simulation saves its state: every N rounds, or at intervals that depend on the duration of a save."""

import time
from collections.abc import Callable

from ..config import AUTO

# Minimum time between two saves, as a multiple of the time that the earlier save took.
PAUSE_FACTOR = 20
MIN_PAUSE_S = 10.0  # minimum time between two saves, in seconds


class SaveTimes:
    """The rounds after which a run is saved. `every` is the number of rounds from save to save, or "auto".

    With "auto", the time from a save to the next is at least MIN_PAUSE_S seconds, and at least PAUSE_FACTOR times as long as the former
    save took. Saves therefore take at most about a twentieth of the time of a run.
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
