"""The times at which virtual clients are away.

Time is divided into stretches, which begin at an offset drawn for each client. In each stretch a client is away with probability `absent`.
The draws depend on the seed, the client and the number of the stretch alone, so there is no state, and any time may be asked about.
"""

import math

import numpy as np

from .. import seeds
from ..kernels import philox

AT_ONCE = 1024  # stretches of a client that are drawn together


class Absences:
    """`absent` [clients]: share of the time, 0..0.9; `stretch_s` [clients]: seconds."""

    def __init__(self, absent: np.ndarray, stretch_s: np.ndarray, seed: int):
        self.absent, self.stretch_s = absent, stretch_s
        self._key = seeds.key(seed, "away")
        self._offset_s = seeds.generator(seed, "away").random(len(absent)) * stretch_s

    def away(self, time_s: float) -> np.ndarray:
        """Return which clients are away at a time: bool [clients]."""
        clients = np.arange(len(self.absent))
        return self._drawn(
            clients, np.floor((time_s + self._offset_s) / self.stretch_s).astype(np.int64)
        )

    def is_away(self, client: int, time_s: float) -> bool:
        return bool(self._drawn(np.array([client]), np.array([self._stretch(client, time_s)]))[0])

    def leaves(self, client: int, since_s: float, until_s: float) -> float | None:
        """Return the first time from `since_s` to `until_s` at which a client is away; None if it never is."""
        if not self.absent[client]:
            return None
        first, last = self._stretch(client, since_s), self._stretch(client, until_s)
        for start in range(first, last + 1, AT_ONCE):
            numbers = np.arange(start, min(start + AT_ONCE, last + 1))
            away = np.flatnonzero(self._drawn(np.full(len(numbers), client), numbers))
            if len(away):
                return max(
                    since_s,
                    float(numbers[away[0]] * self.stretch_s[client] - self._offset_s[client]),
                )
        return None

    def gone(self, client: int, since_s: float, until_s: float, grace_s: float) -> float | None:
        """Return `grace_s` after a client left in this time and did not come back; None if it stayed, or came back within `grace_s`."""
        while (left_s := self.leaves(client, since_s, until_s)) is not None:
            if self.is_away(client, since_s := left_s + grace_s):
                return since_s
        return None

    def next_change_s(self, time_s: float) -> float:
        """Return the first time after this one at which a client may leave or return; infinity if none ever does."""
        some = np.flatnonzero(self.absent)
        stretch_s, offset_s = self.stretch_s[some], self._offset_s[some]
        ends = (np.floor((time_s + offset_s) / stretch_s) + 1) * stretch_s - offset_s
        return float(np.maximum(ends, np.nextafter(time_s, math.inf)).min(initial=math.inf))

    def _stretch(self, client: int, time_s: float) -> int:
        """Return the number of the stretch that contains a time."""
        return math.floor((time_s + self._offset_s[client]) / self.stretch_s[client])

    def _drawn(self, clients: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        words = philox.words_at(self._key, numbers.astype(np.int64) << 32 | clients)
        return words < self.absent[clients] * 2.0**32
