"""The times at which virtual clients are absent.

Time is divided into periods, which start at an offset drawn for each client. In each period a client is absent with probability `absent`.
The draws depend only on the seed, the client and the number of the period, so there is no state, and any time can be queried.
"""

import math

import numpy as np

from .. import seeds
from ..kernels import philox

CHUNK = 1024  # periods of a client that are drawn at once


class AbsenceModel:
    """`absent` [clients]: fraction of the time, 0..0.9. `period_s` [clients]: seconds."""

    def __init__(self, absent: np.ndarray, period_s: np.ndarray, seed: int):
        self.absent, self.period_s = absent, period_s
        self._key = seeds.key(seed, "away")
        self._offset_s = seeds.generator(seed, "away").random(len(absent)) * period_s

    def absent_at(self, time_s: float) -> np.ndarray:
        """Return whether each client is absent at a time: bool [clients]."""
        clients = np.arange(len(self.absent))
        periods = np.floor((time_s + self._offset_s) / self.period_s).astype(np.int64)
        return self._is_absent(clients, periods)

    def is_absent(self, client: int, time_s: float) -> bool:
        period = self._period(client, time_s)
        return bool(self._is_absent(np.array([client]), np.array([period]))[0])

    def first_absence_s(self, client: int, since_s: float, until_s: float) -> float | None:
        """Return the first time from `since_s` to `until_s` at which a client is absent; None if it is always present."""
        if not self.absent[client]:
            return None
        first, last = self._period(client, since_s), self._period(client, until_s)
        for start in range(first, last + 1, CHUNK):
            periods = np.arange(start, min(start + CHUNK, last + 1))
            absent = np.flatnonzero(self._is_absent(np.full(len(periods), client), periods))
            if len(absent):
                start_s = periods[absent[0]] * self.period_s[client] - self._offset_s[client]
                return max(since_s, float(start_s))
        return None

    def lost_at_s(
        self, client: int, since_s: float, until_s: float, grace_s: float
    ) -> float | None:
        """Return the end of `grace_s` seconds after which a client that left in this time is still absent; None if it stays or returns."""
        while (left_s := self.first_absence_s(client, since_s, until_s)) is not None:
            if self.is_absent(client, since_s := left_s + grace_s):
                return since_s
        return None

    def next_change_s(self, time_s: float) -> float:
        """Return the first time after `time_s` at which a client may leave or return; infinity if no client is ever absent."""
        clients = np.flatnonzero(self.absent)
        period_s, offset_s = self.period_s[clients], self._offset_s[clients]
        ends = (np.floor((time_s + offset_s) / period_s) + 1) * period_s - offset_s
        return float(np.maximum(ends, np.nextafter(time_s, math.inf)).min(initial=math.inf))

    def _period(self, client: int, time_s: float) -> int:
        """Return the number of the period that contains a time."""
        return math.floor((time_s + self._offset_s[client]) / self.period_s[client])

    def _is_absent(self, clients: np.ndarray, periods: np.ndarray) -> np.ndarray:
        """Return the draws of these clients for these periods, element by element."""
        words = philox.words_at(self._key, periods.astype(np.int64) << 32 | clients)
        return words < self.absent[clients] * 2.0**32
