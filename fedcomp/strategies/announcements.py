"""What a server announces in sealed elections, and what of it a client takes: docs/ballots.md is the protocol."""

import re
from collections.abc import Collection, Mapping
from hashlib import sha256

from ..errors import ProtocolError
from ..privacy.ballots import Slot
from .local_election import Row, announced_row

ATTEMPT, TERMS = (
    "attempt",
    "terms",
)  # what is announced in every phase: which attempt, and by what all have trained
FEWEST = 3  # partitions with a ballot that a client votes on: a vote on fewer tells what is in them


def attempt_of(announced: Mapping[str, bytes]) -> str:
    if ATTEMPT not in announced:
        raise ProtocolError(
            "this client was not told which attempt of the round it is; both sides need the same version of fedcomp"
        )
    if not re.fullmatch(rb"[0-9a-f]{32}", announced[ATTEMPT]):
        raise ProtocolError(
            "the name of the attempt is not 32 hexadecimal digits; both sides need the same version of fedcomp"
        )
    return announced[ATTEMPT].decode()


def slot_of(run: str, announced: Mapping[str, bytes], round: int, sender: int) -> Slot:
    return Slot(
        run,
        attempt_of(announced),
        round,
        sender,
        announced.get(TERMS, b"").decode("ascii", "replace"),
    )


def terms_of(options: str, fingerprint: str, lr: float, steps: int = 0, batch_size: int = 0) -> str:
    """What all who take part in a round have to train by, as 32 hexadecimal digits.

    A server that had the others train from a model of its making, at a rate of 0, or on batches of one example, would foretell their
    ballots and read the last one in the votes.
    """
    return sha256(f"{fingerprint} {lr!r} {steps} {batch_size} {options}".encode()).hexdigest()[:32]


def number(name: str, prefix: str = "") -> int:
    """The client in a name that is announced, written as the server writes it. Raises ProtocolError."""
    if not re.fullmatch("0|[1-9][0-9]{0,17}", text := name.removeprefix(prefix)):
        raise ProtocolError(
            f"the server announces something under the name {ascii(name)[:60]}, which is no client's"
        )
    return int(text)


def full_row(announced: Mapping[str, bytes]) -> Row:
    """The row that a voter is to count. Raises ProtocolError unless it is of all partitions, an odd number, with everybody once in them.

    They are as even as a deal makes them: a sender that is alone in its partition, among large ones, would count more than others.
    """
    row = announced_row(announced)
    sizes = [len(part.clients) for part in row.parts]
    numbered = [part.number for part in row.parts] == list(range(len(row.parts)))
    if (
        not numbered
        or len(sizes) % 2 == 0
        or len(sizes) < FEWEST
        or max(sizes) - min(sizes) > 1
        or row.client not in row.senders
    ):
        raise ProtocolError(
            f"the row of the code does not count everybody alike, in an odd number of partitions, {FEWEST} at least; "
            "a vote on it would tell ballots"
        )
    return row


def with_ballots(row: Row, senders: Collection[int]) -> int:
    """Partitions of a row in which there is a ballot, if these have sent theirs."""
    return sum(not set(part.clients).isdisjoint(senders) for part in row.parts)


def too_few(there: int) -> str:
    return f"{there} ballots are whole, and a vote on fewer than {FEWEST} would tell what they are"
