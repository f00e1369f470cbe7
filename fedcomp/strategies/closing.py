"""When a phase of a round closes."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Progress:
    """How far an exchange has come."""

    asked: int  # clients
    answered: int
    accepted: int
    elapsed_s: float


class Closing(Protocol):
    """A policy: asked after every reply, and now and then while there is none."""

    def closed(self, progress: Progress) -> bool: ...


class AllAnswered:
    """The phase closes when every client that was asked has answered, well or badly."""

    def closed(self, progress: Progress) -> bool:
        return progress.answered >= progress.asked
