"""Handling of Ctrl-C and termination signals in a simulation: a signal takes effect after the current round has been saved."""

import signal
import threading
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """Context manager that delays the first signal until `act` is called. A second signal takes effect immediately.

    Outside the main thread, an Interruption does nothing, since Python runs signal handlers only in the main thread.
    """

    def __init__(self) -> None:
        self.active = threading.current_thread() is threading.main_thread()
        self.first: tuple[int, FrameType | None] | None = None
        self.handlers: dict[int, Any] = {}  # maps a signal number to the handler that was replaced

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived."""
        return self.first is not None

    def __enter__(self) -> Self:
        for number in SIGNALS if self.active else ():
            if callable(signal.getsignal(number)):
                self.handlers[number] = signal.signal(number, self._defer)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def act(self) -> None:
        """If a signal has arrived, call the original handler of the first signal that arrived."""
        if self.first is not None:
            number, frame = self.first
            self.handlers[number](number, frame)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            self.handlers[number](number, frame)
        self.first = number, frame
