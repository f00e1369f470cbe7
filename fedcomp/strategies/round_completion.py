"""When a phase of a round closes, and what happens to clients that have not answered by then."""

import math
from dataclasses import dataclass

DEADLINE = "deadline"  # the stage of clients that did not answer in time
QUORUM = "quorum"  # the stage of clients that the round did not wait for


@dataclass(frozen=True)
class Progress:
    """The state of an exchange."""

    asked: int  # clients
    answered: int
    accepted: int
    elapsed_s: float


@dataclass(frozen=True)
class PhaseEnd:
    """The end of a phase: the stage and the reason with which clients are rejected that have not answered."""

    stage: str = "reply"
    reason: str = "no reply before the round closed"


@dataclass(frozen=True)
class RoundCompletion:
    """The policy that closes a phase: when all have answered, when a quorum was accepted, or at a deadline.

    The round loop checks it after every answer, and repeatedly while no answer arrives.
    """

    quorum: float = 1.0  # share of the clients that were asked, above 0
    deadline_s: float | None = None  # None: as long as the phase takes

    def check(self, progress: Progress) -> PhaseEnd | None:
        """Return the end of the phase, or None if the phase goes on."""
        if progress.answered >= progress.asked:
            return PhaseEnd()
        if progress.accepted >= (enough := quorum_size(self.quorum, progress.asked)):
            return PhaseEnd(
                QUORUM,
                f"no reply before {enough} of {progress.asked} were accepted (--quorum {self.quorum:g})",
            )
        if self.deadline_s is not None and progress.elapsed_s >= self.deadline_s:
            return PhaseEnd(DEADLINE, f"no reply within {self.deadline_s:g} s (--deadline)")
        return None

    def answers_until_check(self, progress: Progress) -> int:
        """Return how many more answers may be accepted at once before the policy has to be checked again."""
        return min(
            progress.asked - progress.answered,
            quorum_size(self.quorum, progress.asked) - progress.accepted,
        )


def quorum_size(quorum: float, clients: int) -> int:
    """Return the smallest number of clients that is a share `quorum` of them, at least one: 7 of 10 for 0.7, in spite of rounding."""
    return max(1, math.ceil(quorum * clients - 1e-9))
