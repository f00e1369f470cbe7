"""Time as a round sees it. Outside simulations with a virtual network it is the real one."""

import time


class Clock:
    """The real clock, which knows no virtual seconds."""

    time_s: float = 0.0  # virtual seconds since the run began

    def begin(self, limit_s: float | None) -> None:
        """An exchange begins, that has so many seconds; None = as long as it takes."""

    def expect(self, answers: int) -> None:
        """No more answers than these may come before it is asked again whether the exchange goes on."""

    def came(self, message: str) -> float:
        """When the answer to a message that has just been taken in came, in the seconds of `now`."""
        return self.now()

    def now(self) -> float:
        """Seconds; differences within an exchange count."""
        return time.monotonic()

    def rest(self, seconds: float) -> None:
        """There is nothing new, and nothing else to do."""
        time.sleep(seconds)

    def move_to(self, time_s: float) -> None:
        """Stand at a virtual moment, whatever exchanges since the last round have taken."""

    def take(self) -> float | None:
        """Virtual seconds since the last call; None where time is real."""
        return None
