"""The clock of a round: real time, unless a simulation has a virtual network."""

import time


class Clock:
    """The real clock."""

    time_s: float = 0.0  # virtual seconds since the run began

    begun_s: float = 0.0  # `now` at the start of the last exchange
    limit_s: float | None = None  # of the last exchange, seconds; None: no limit

    def begin(self, limit_s: float | None) -> None:
        """Start an exchange with a time limit in seconds; None: no limit."""
        self.begun_s, self.limit_s = self.now(), limit_s

    def expect(self, answers: int) -> None:
        """Allow at most this many answers before the exchange checks again whether it is complete."""

    def now(self) -> float:
        """Return the time in seconds; only differences within an exchange have a meaning."""
        return time.monotonic()

    def move_to(self, time_s: float) -> None:
        """Set the virtual time, whatever the exchanges since the last round have taken."""

    def take(self) -> float | None:
        """Return the virtual seconds since the last call; None if time is real."""
        return None
