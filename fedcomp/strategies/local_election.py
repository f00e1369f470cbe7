"""Local elections: the rows that voters count, the ballots in them, and the vote of a row.

A *ballot* holds the signs of the update of one data partition, packed as in kernels/votes.py. If several clients form a partition, its
ballot holds the signs after training on all of its data (form=data) or the majority of the clients' signs (form=ballots). If a ballot is
missing, all voters draw the same random sign for each coordinate, so that honest voters still agree.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .. import kernels, seeds
from ..codecs.update import Bits
from ..errors import ProtocolError
from ..kernels import votes
from ..memories import Memory
from ..messages import Assignment
from .base import DataPartition

ROW = "row"  # announced: the voter's CodeRow
BALLOTS, TALLY = "ballots", "tally"  # phases
Ballot = bytes | np.ndarray


@dataclass(frozen=True)
class CodeRow:
    """One row of the allocation matrix: a voter, its seat, and the partitions that the seat counts."""

    client: int
    seat: int
    partitions: tuple[DataPartition, ...]

    def pack(self) -> bytes:
        """Return JSON: client, seat, and each partition as its number and its clients."""
        listed = [[part.number, *part.clients] for part in self.partitions]
        return json.dumps([self.client, self.seat, listed], separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, data: bytes) -> "CodeRow":
        """Read a row of one partition or more. Raises ProtocolError for an empty partition, and for a partition or a client named twice."""
        try:
            client, seat, listed = json.loads(data)
            parts = tuple(DataPartition(number, tuple(clients)) for number, *clients in listed)
            numbers = [part.number for part in parts]
            clients = [client for part in parts for client in part.clients]
            integers = all(type(n) is int for n in (client, seat, *numbers, *clients))
            twice = len(set(numbers)) < len(numbers) or len(set(clients)) < len(clients)
            if not (parts and integers and all(part.clients for part in parts)) or twice:
                raise ValueError(data)
            return cls(client, seat, parts)
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(
                "the announced row of the code is missing or damaged; server and clients need the same version of fedcomp"
            ) from error

    @property
    def senders(self) -> list[int]:
        """Logical ids of the clients whose data or ballots are in the row, ascending."""
        return sorted({client for part in self.partitions for client in part.clients})


def announcements(assignment: Assignment) -> dict[str, bytes]:
    """Return the announcements of an assignment: name → value."""
    names, values = assignment.announced[::2], assignment.announced[1::2]
    return {name.decode(): value for name, value in zip(names, values, strict=True)}


def announced_row(announced: Mapping[str, bytes]) -> CodeRow:
    """Return the announced row. Raises ProtocolError if it is missing or damaged."""
    return CodeRow.unpack(announced.get(ROW, b""))


def ballot_of(update: Tensor, seed: int, round: int, number: int) -> bytes:
    """Return the ballot of a partition's update [numel]. The signs of zeros and NaN are random, keyed by the partition."""
    return kernels.bits.signs(torch.nan_to_num(update), seeds.key(seed, "zeros", round, number))


def missing_ballot(numel: int, seed: int, round: int, number: int) -> np.ndarray:
    """Return the random signs that all voters use for a partition without a ballot."""
    return votes.random_bits(seeds.key(seed, "missing", round, number), numel)


def sent_ballot(memory: Memory, frame: bytes) -> Ballot:
    """Return the ballot in a frame. Raises FrameError."""
    update = memory.codec.open(frame, memory.numel, memory.layout)
    return update.raw if isinstance(update, Bits) else kernels.bits.signs(update.dense())


def ballots_of_row(
    row: CodeRow, sent: Mapping[int, Ballot], numel: int, seed: int, round: int
) -> list[Ballot]:
    """Return the ballot of each partition of a row. `sent`: by client, the ballots that were received."""
    ballots: list[Ballot] = []
    for part in row.partitions:
        cast = [sent[client] for client in part.clients if client in sent]
        ballots.append(
            votes.majority(cast, numel, seeds.key(seed, "partition tie", round, part.number))
            if cast
            else missing_ballot(numel, seed, round, part.number)
        )
    return ballots


def vote_of(row: CodeRow, ballots: Sequence[Ballot], numel: int, seed: int, round: int) -> Tensor:
    """Return the vote ±1 [numel], float32, of a row whose partitions have these ballots.

    Ties are broken at random, keyed by the seat: honest voters of one seat agree, and ties of different seats cancel in the tally.
    """
    packed = votes.majority(ballots, numel, seeds.key(seed, "local tie", round, row.seat))
    return torch.from_numpy(kernels.Signs(np.frombuffer(packed, np.uint8), numel, 1.0).values())
