"""When a simulation saves its state: every so many rounds, or as often as its time allows."""

import time
from collections.abc import Callable

from ..config import AUTO

SHARE = 20  # times the duration of a save that pass until the next one
LEAST_S = 10.0  # between two saves


class SaveTimes:
    """Decides after which rounds a run is saved. `every`: "auto", or a number of rounds.

    With "auto" a save is due once SHARE times the duration of the last one has passed, and at least LEAST_S: saving costs at most a
    twentieth of the time, and a process that is killed loses little.
    """

    def __init__(self, every: str, clock: Callable[[], float] = time.perf_counter):
        self.rounds = None if every == AUTO else int(every)
        self.clock = clock
        self._saved_s, self._took_s = clock(), 0.0

    def due(self, round: int) -> bool:
        """Return whether to save after this round."""
        if self.rounds is not None:
            return round % self.rounds == 0
        return self.clock() - self._saved_s >= max(LEAST_S, SHARE * self._took_s)

    def saved(self, took_s: float) -> None:
        """Record a save that has just ended."""
        self._saved_s, self._took_s = self.clock(), took_s
