"""The rounds after which a simulation saves its state: every N rounds, or within a time budget."""

import time
from collections.abc import Callable

from ..config import AUTO

PAUSE = 20  # least time between two saves, in multiples of the duration of a save
LEAST_S = 10.0  # least seconds between two saves


class SaveTimes:
    """Decides after which rounds a run is saved. `every`: "auto", or a number of rounds.

    With "auto" a save is due when PAUSE times the duration of the last save has passed, and at least LEAST_S. Saving then takes at most
    a twentieth of the time.
    """

    def __init__(self, every: str, clock: Callable[[], float] = time.perf_counter):
        """`clock`: returns the time in seconds."""
        self.rounds = None if every == AUTO else int(every)
        self.clock = clock
        self._saved_s, self._took_s = clock(), 0.0

    def due(self, round: int) -> bool:
        """Return whether to save after this round."""
        if self.rounds is not None:
            return round % self.rounds == 0
        return self.clock() - self._saved_s >= max(LEAST_S, PAUSE * self._took_s)

    def saved(self, took_s: float) -> None:
        """Record that a save has just ended, and its duration in seconds."""
        self._saved_s, self._took_s = self.clock(), took_s
