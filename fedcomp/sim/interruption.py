"""Handling of Ctrl-C and termination signals in a simulation. The run stops after the current round has been saved."""

import signal
import threading
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """Context manager that delays the first signal until `act` is called. Any further signal takes effect immediately.

    Outside of the main thread, signals are not delayed, since only the main thread can set signal handlers.
    """

    def __init__(self) -> None:
        self.first: tuple[int, FrameType | None] | None = None  # the first signal that arrived
        self.handlers: dict[int, Any] = {}  # maps a signal number to the original handler

    @property
    def requested(self) -> bool:
        return self.first is not None

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        for number in SIGNALS if is_main else ():
            if callable(signal.getsignal(number)):
                self.handlers[number] = signal.signal(number, self._defer)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def act(self) -> None:
        """Call the original handler of the first signal, if a signal has arrived."""
        if self.first is not None:
            number, frame = self.first
            self.handlers[number](number, frame)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            self.handlers[number](number, frame)
        self.first = number, frame
