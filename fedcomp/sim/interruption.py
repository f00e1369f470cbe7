"""Ctrl-C between checkpoints: the round that runs is finished first, so that nothing of what was shown is lost."""

import signal
import threading
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """While entered, the first of the signals is kept until `act`; a second one acts at once. Does nothing outside of the main thread."""

    def __init__(self) -> None:
        self.on = threading.current_thread() is threading.main_thread()
        self.first: tuple[int, FrameType | None] | None = None
        self.before: dict[int, signal.Handlers] = {}

    @property
    def asked(self) -> bool:
        return self.first is not None

    def __enter__(self) -> Self:
        for number in SIGNALS if self.on else ():
            if callable(signal.getsignal(number)):
                self.before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def act(self) -> None:
        """Do what the first signal asked for, if one came."""
        if self.first is not None:
            number, frame = self.first
            self.before[number](number, frame)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self.before[number](number, frame)
        self.first = number, frame
