"""What ends a run from outside: Ctrl-C, the request to end (SIGTERM), the terminal that goes away (SIGHUP)."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """While entered, each of the signals raises KeyboardInterrupt, and `heard` is its number; what nohup ignores stays ignored."""

    def __init__(self) -> None:
        self.heard: int | None = None
        self._held_back = False
        self._before: dict[int, signal.Handlers] = {}

    def __enter__(self) -> Self:
        for number in ENDINGS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held_back_afterwards(self) -> Iterator[None]:
        """Once this is left, in whatever way, nothing interrupts the tidying up any more."""
        try:
            yield
        finally:
            self._held_back = True

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if not self._held_back:
            self.heard = number
            raise KeyboardInterrupt
