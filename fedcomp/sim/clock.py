"""Virtual time: a clock that jumps from one answer to the next and stands still while anybody computes."""

from ..server.transport import Clock


class VirtualClock(Clock):
    """Seconds of an exchange count from zero, so that a deadline is met exactly whatever the rounds before have taken."""

    def __init__(self) -> None:
        self.elapsed_s, self.limit_s = 0.0, None  # of the exchange
        self.expected = 1  # answers that may come at once
        self._began_s, self._round_s, self._taken_s = 0.0, 0.0, 0.0

    @property
    def time_s(self) -> float:
        return self._began_s + self.elapsed_s

    def begin(self, limit_s: float | None) -> None:
        self._settle()
        self.limit_s, self.expected = limit_s, 1

    def expect(self, answers: int) -> None:
        self.expected = answers

    def now(self) -> float:
        return self.elapsed_s

    def rest(self, seconds: float) -> None:
        """Nobody rests in virtual time: a pull goes on to what comes next."""

    def go_to(self, elapsed_s: float) -> None:
        """Stand at a moment of the exchange, unless it is past."""
        self.elapsed_s = max(self.elapsed_s, elapsed_s)

    def wait(self, seconds: float) -> None:
        """Between exchanges."""
        self._settle()
        self._began_s, self._round_s = self._began_s + seconds, self._round_s + seconds

    def move_to(self, time_s: float) -> None:
        self.elapsed_s, self._began_s, self._round_s = 0.0, time_s, time_s - self._taken_s

    def take(self) -> float:
        self._settle()
        taken, self._round_s, self._taken_s = self._round_s, 0.0, self._began_s
        return taken

    def _settle(self) -> None:
        self._began_s = self._began_s + self.elapsed_s
        self._round_s = self._round_s + self.elapsed_s
        self.elapsed_s = 0.0
