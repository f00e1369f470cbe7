"""The condition that closes a phase of a round, and the reason for rejecting clients that have not answered."""

import math
from dataclasses import dataclass

DEADLINE = "deadline"  # stage of clients that did not answer in time
QUORUM = "quorum"  # stage of clients that had not answered when the quorum was reached


@dataclass(frozen=True)
class Progress:
    """The progress of a phase."""

    asked: int  # clients in the phase
    answered: int  # clients
    accepted: int  # clients
    elapsed_s: float


@dataclass(frozen=True)
class PhaseEnd:
    """The end of a phase: stage and reason for the rejection of clients that have not answered."""

    stage: str = "reply"
    reason: str = "no reply before the round closed"


@dataclass(frozen=True)
class RoundCompletion:
    """The policy that closes a phase: when all have answered, when a quorum was accepted, or at a deadline.

    The round loop checks it after every answer, and repeatedly while no answer arrives.
    """

    quorum: float = 1.0  # fraction of the clients in the phase, above 0
    deadline_s: float | None = None  # None: no deadline

    def check(self, progress: Progress) -> PhaseEnd | None:
        """Return the end of the phase, or None if the phase goes on."""
        if progress.answered >= progress.asked:
            return PhaseEnd()
        if progress.accepted >= (quorum := quorum_size(self.quorum, progress.asked)):
            return PhaseEnd(
                QUORUM,
                f"no reply before {quorum} of {progress.asked} were accepted (--quorum {self.quorum:g})",
            )
        if self.deadline_s is not None and progress.elapsed_s >= self.deadline_s:
            return PhaseEnd(DEADLINE, f"no reply within {self.deadline_s:g} s (--deadline)")
        return None

    def answers_until_check(self, progress: Progress) -> int:
        """Return the number of answers that may arrive before the next `check` can return an end."""
        return min(
            progress.asked - progress.answered,
            quorum_size(self.quorum, progress.asked) - progress.accepted,
        )


def quorum_size(quorum: float, clients: int) -> int:
    """Return ⌈quorum · clients⌉, at least 1, without errors from rounding: 7 of 10 for 0.7."""
    return max(1, math.ceil(quorum * clients - 1e-9))
