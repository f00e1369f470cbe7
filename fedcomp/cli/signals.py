"""Signals that end a run: Ctrl-C (SIGINT), SIGTERM, and SIGHUP when the terminal closes."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BURST_S = 0.5  # signals that follow another one within this time count as one: clean-up has begun


class Signals:
    """While entered, each signal raises KeyboardInterrupt and sets `heard` to its number. Ignored signals (nohup) stay ignored."""

    def __init__(self) -> None:
        self.heard: int | None = None
        self._held_back = False
        self._raised_s = float("-inf")
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
        """Ignore signals from the end of this block on, so that they do not interrupt the clean-up."""
        try:
            yield
        finally:
            self._held_back = True

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._held_back or now_s - self._raised_s < BURST_S:
            return
        self.heard = number
        self._raised_s = now_s
        raise KeyboardInterrupt
