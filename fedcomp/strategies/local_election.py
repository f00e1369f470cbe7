"""The client half of elections: the rows that voters count, the ballots in them, and the vote of a row.

A *ballot* holds the signs of the update of one data partition, packed as in kernels/votes.py. If several clients form a partition, its
ballot holds the signs after training on all of its data (form=data) or the majority of the clients' signs (form=ballots). If a ballot is
missing, all voters draw the same random sign for each coordinate, so that honest voters still agree.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from .. import kernels, seeds
from ..codecs import Codec, Context
from ..codecs.base import nonfinite_errors
from ..codecs.update import Bits
from ..errors import NonFiniteError, ProtocolError
from ..kernels import votes
from ..memories import Memory
from ..messages import Assignment
from .base import ClientAlgorithm, DataPartition, Values

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


def vote_on_ballots(
    row: CodeRow, sent: Mapping[int, Ballot], numel: int, seed: int, round: int
) -> Tensor:
    """Return the vote ±1 [numel] of a row. `sent`: by client, the ballots that were received."""
    ballots: list[Ballot] = []
    for part in row.partitions:
        cast = [sent[client] for client in part.clients if client in sent]
        if cast:
            tie = seeds.key(seed, "partition tie", round, part.number)
            ballots.append(votes.majority(cast, numel, tie))
        else:
            missing = seeds.key(seed, "missing", round, part.number)
            ballots.append(votes.random_bits(missing, numel))
    return vote_of(row, ballots, numel, seed, round)


def vote_of(row: CodeRow, ballots: Sequence[Ballot], numel: int, seed: int, round: int) -> Tensor:
    """Return the vote ±1 [numel], float32, of a row whose partitions have these ballots.

    Ties are broken at random, keyed by the seat: honest voters of one seat agree, and ties of different seats cancel in the tally.
    """
    packed = votes.majority(ballots, numel, seeds.key(seed, "local tie", round, row.seat))
    return torch.from_numpy(kernels.Signs(np.frombuffer(packed, np.uint8), numel, 1.0).values())


class DataElectionClient(ClientAlgorithm):
    """Client half for form=data: train on all partitions of the row and send one vote."""

    trains_on_partitions: ClassVar[bool] = True

    def seed(self, codec: Codec, run_seed: int, assignment: Assignment) -> int:
        return run_seed  # a vote has no zeros, so the seed changes nothing

    def partitions(self, assignment: Assignment) -> Sequence[DataPartition]:
        return announced_row(announcements(assignment)).partitions

    def summarize(
        self, partition: DataPartition, update: Tensor, seed: int, round: int
    ) -> tuple[bytes, NonFiniteError | None]:
        """Return the ballot of a partition, and an error if the update contains NaN or infinity."""
        (error,) = nonfinite_errors(
            update[None], None, f"the update of partition {partition.number}"
        )
        return ballot_of(update, seed, round, partition.number), error

    def combine(
        self,
        assignment: Assignment,
        summaries: Sequence[tuple[bytes, NonFiniteError | None]],
        numel: int,
        seed: int,
    ) -> Tensor:
        """Return the vote of the row. Raises NonFiniteError if more than half of several updates are not finite."""
        errors = [error for _, error in summaries if error is not None]
        if len(summaries) > 1 and 2 * len(errors) > len(summaries):
            raise errors[0]
        row, ballots = announced_row(announcements(assignment)), [ballot for ballot, _ in summaries]
        return vote_of(row, ballots, numel, seed, assignment.round)


class BallotElectionClient(ClientAlgorithm):
    """Client half for form=ballots: send the signs of the update, then vote on the ballots that the server forwards."""

    one_by_one: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__((BALLOTS, TALLY))

    def seed(self, codec: Codec, run_seed: int, assignment: Assignment) -> int:
        own = super().seed(codec, run_seed, assignment)
        return own if assignment.phase == BALLOTS else run_seed

    def later_update(self, memory: Memory, values: Values, seed: int, context: Context) -> Tensor:
        announced, sent = context.announced, dict[int, Ballot]()
        row = announced_row(announced)
        for client in row.senders:
            if str(client) in announced:
                update = memory.codec.open(announced[str(client)], memory.numel, memory.layout)
                if isinstance(update, Bits):
                    sent[client] = update.raw
                else:
                    sent[client] = kernels.bits.signs(update.dense())
        return vote_on_ballots(row, sent, memory.numel, seed, context.round)

    def encode_one(
        self, memory: Memory, update: Tensor | None, values: Values, seed: int, context: Context
    ) -> bytes | None:
        assert update is not None  # both phases have an update
        if context.phase == BALLOTS:
            return memory.codec.encode(update, seed=seed, layout=memory.layout, context=context)
        return memory.propose(update, seed=seed, context=context)
