"""When virtual clients are away: for whole stretches of time, which begin at a moment of each client's own.

Every stretch of a client is drawn anew, so that it is away for `absent` of the time, for one stretch or several in a row. What is drawn
depends on the seed, the client and the number of the stretch alone: no state, and any moment may be asked about.
"""

import math

import numpy as np

from .. import seeds
from ..kernels import philox

AT_ONCE = 1024  # stretches of a client that are looked at together
FEW = 8  # stretches after which many clients are looked at one by one


class Absences:
    """`absent` [clients]: share of the time, 0..0.9; `stretch_s` [clients]: seconds."""

    def __init__(self, absent: np.ndarray, stretch_s: np.ndarray, seed: int):
        self.absent, self.stretch_s = absent, stretch_s
        self.any = bool((absent > 0).any())
        self._key = seeds.key(seed, "away")
        self._offset_s = seeds.generator(seed, "away").random(len(absent)) * stretch_s

    def away(self, time_s: float) -> np.ndarray:
        """Who is away at a moment: bool [clients]."""
        clients = np.arange(len(self.absent))
        return self._drawn(
            clients, np.floor((time_s + self._offset_s) / self.stretch_s).astype(np.int64)
        )

    def is_away(self, client: int, time_s: float) -> bool:
        return bool(self._drawn(np.array([client]), np.array([self._stretch(client, time_s)]))[0])

    def leaving(self, clients: np.ndarray, since_s: float, until_s: np.ndarray) -> np.ndarray:
        """Who of the clients [m] may be away at a moment from `since_s` to its own `until_s` [m]: bool [m]; False is certain."""
        offset_s, stretch_s = self._offset_s[clients], self.stretch_s[clients]
        numbers = np.floor((since_s + offset_s) / stretch_s).astype(np.int64)
        more = np.floor((until_s + offset_s) / stretch_s).astype(np.int64) - numbers
        found = more >= FEW
        for step in range(min(FEW, int(more.max(initial=0)) + 1)):
            found |= (more >= step) & self._drawn(clients, numbers + step)
        return found

    def leaves(self, client: int, since_s: float, until_s: float) -> float | None:
        """The first moment from `since_s` to `until_s` at which a client is away; None: it is there all the time."""
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
        """When a client that leaves in this time, and is not back `grace_s` later, is known to be gone; None: it stays, or comes back."""
        while (left_s := self.leaves(client, since_s, until_s)) is not None:
            if self.is_away(client, since_s := left_s + grace_s):
                return since_s
        return None

    def next_change_s(self, time_s: float) -> float:
        """The first moment after this one at which anybody may leave or return; infinity where nobody does."""
        some = np.flatnonzero(self.absent)
        stretch_s, offset_s = self.stretch_s[some], self._offset_s[some]
        ends = (np.floor((time_s + offset_s) / stretch_s) + 1) * stretch_s - offset_s
        return float(np.maximum(ends, np.nextafter(time_s, math.inf)).min(initial=math.inf))

    def _stretch(self, client: int, time_s: float) -> int:
        """The number of the stretch in which a moment lies."""
        return math.floor((time_s + self._offset_s[client]) / self.stretch_s[client])

    def _drawn(self, clients: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        words = philox.words_at(self._key, numbers.astype(np.int64) << 32 | clients)
        return words < self.absent[clients] * 2.0**32
