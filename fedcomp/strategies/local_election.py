"""The client half of the strategy `election`: what a voter counts, and the one vote that it sends.

Sohn, Han, Choi, Moon: Election coding for distributed learning: protecting signSGD against Byzantine attacks. NeurIPS 2020.

    local election   v = the sign that more of the ballots of a row have, in each coordinate

A *ballot* is the signs of one partition. With data allocation the voter trains on every partition of its row: batches, dropout and the
coins for zeros are those of (seed, round, partition), so that all who are honest hold the same ballots, to the bit. With ballot passing it
trains on its own data, and the ballots are those that the server passes on to it.

A partition of several data sets has one sign: that of training on their union; with ballot passing, the majority of their ballots. A
ballot that is missing is a coin in each coordinate, the same for all voters, so that they still vote alike.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import kernels, seeds
from ..codecs import Codec, Context
from ..codecs.base import nonfinite_rows
from ..codecs.update import Bits
from ..errors import NonFiniteError, ProtocolError
from ..kernels import votes
from ..memories import Memory
from ..messages import Assignment
from .client_algorithm import ClientAlgorithm, DataPartition, Frame, encode_each

ROW = "row"  # what is announced: the voter's place in the code
BALLOTS, TALLY = "ballots", "tally"  # phases
Ballot = bytes | np.ndarray  # packed as in kernels/votes.py


def tie_seed(seed: int, round: int) -> int:
    """The seed of the coins that decide ties of a round's tally (kernels/votes.py), the same for all who take part."""
    return seeds.key(seed, "tie", round)


def local_tie_seed(seed: int, round: int, seat: int) -> int:
    """Likewise for the local election of a seat that counts an even number of partitions.

    All who share a seat toss the same coins, so that honest ones vote alike; seats do not, so that their coins cancel in the tally.
    """
    return seeds.key(seed, "local tie", round, seat)


@dataclass(frozen=True)
class Row:
    """Who a voter is in a round, and what it counts."""

    client: int
    seat: int
    parts: tuple[DataPartition, ...]

    def pack(self) -> bytes:
        """JSON: client, seat, and each partition as its number and the data sets in it."""
        return json.dumps(
            [self.client, self.seat, [[p.number, *p.clients] for p in self.parts]],
            separators=(",", ":"),
        ).encode()

    @classmethod
    def unpack(cls, data: bytes) -> "Row":
        """Raises ProtocolError unless it is one of at least one partition, each with data; no partition, and no data, is in it twice."""
        try:
            client, seat, parts = json.loads(data)
            row = cls(
                client, seat, tuple(DataPartition(number, tuple(sets)) for number, *sets in parts)
            )
            parts, sets = (
                [part.number for part in row.parts],
                [data_set for part in row.parts for data_set in part.clients],
            )
            if not parts or not all(part.clients for part in row.parts):
                raise ValueError(data)
            if not all(type(n) is int for n in (client, seat, *parts, *sets)):
                raise ValueError(data)
            if len(set(parts)) != len(parts) or len(set(sets)) != len(sets):
                raise ValueError(data)
            return row
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(
                "the row of the code that this client is to count cannot be read"
            ) from error

    @property
    def senders(self) -> list[int]:
        """Whose data, or ballots, are in it, ascending."""
        return sorted({client for part in self.parts for client in part.clients})


def announced_row(announced: Mapping[str, bytes]) -> Row:
    if ROW not in announced:
        raise ProtocolError(
            "this client was not told what to count; both sides need the same version of fedcomp"
        )
    return Row.unpack(announced[ROW])


def ballot_of(update: Tensor, seed: int, round: int, number: int) -> bytes:
    """The signs of a partition's update [numel], packed. A zero, or what is no number, is a coin of the partition's own."""
    return kernels.bits.signs(torch.nan_to_num(update), seeds.key(seed, "zeros", round, number))


def missing_ballot(numel: int, seed: int, round: int, number: int) -> np.ndarray:
    """What all voters count for a partition of which nobody sent a ballot."""
    return votes.coins(seeds.key(seed, "missing", round, number), numel)


def signs(packed: Ballot, numel: int) -> Tensor:
    """A packed vote as ±1 [numel], float32."""
    return torch.from_numpy(kernels.Signs(np.frombuffer(packed, np.uint8), numel, 1.0).values())


def elected(row: Row, ballots: Sequence[Ballot], numel: int, seed: int, round: int) -> Tensor:
    """The vote ±1 [numel] of a row whose partitions have these ballots."""
    return signs(votes.majority(ballots, numel, local_tie_seed(seed, round, row.seat)), numel)


def of_partitions(
    row: Row, received: Mapping[int, Ballot], numel: int, seed: int, round: int
) -> list[Ballot]:
    """The ballots of a row's partitions, of those that were received, by sender."""
    found: list[Ballot] = []
    for part in row.parts:
        cast = [received[client] for client in part.clients if client in received]
        found.append(
            votes.majority(cast, numel, seeds.key(seed, "partition tie", round, part.number))
            if cast
            else missing_ballot(numel, seed, round, part.number)
        )
    return found


class Kept(NamedTuple):
    """What a voter keeps of a partition."""

    ballot: bytes
    error: NonFiniteError | None  # of an update that holds NaN or infinity


class DataElection(ClientAlgorithm):
    """Trains on all partitions of a row, and votes once."""

    trains_on_partitions: ClassVar[bool] = True

    def seed(self, codec: Codec, run_seed: int, assignment: Assignment) -> int:
        return run_seed  # a vote has no zeros, and coins are keyed by what they are for

    def partitions(self, assignment: Assignment) -> Sequence[DataPartition]:
        return announced_row(told(assignment)).parts

    def summarize(self, part: DataPartition, update: Tensor, seed: int, round: int) -> "Kept":
        (error,) = nonfinite_rows(update[None], None, f"the update of partition {part.number}")
        return Kept(ballot_of(update, seed, round, part.number), error)

    def combine(
        self, assignment: Assignment, kept: Sequence["Kept"], numel: int, seed: int
    ) -> Tensor:
        """Raises NonFiniteError where most of several partitions are coins: training fails everywhere, not on one bad data set."""
        errors = [k.error for k in kept if k.error is not None]
        if len(kept) > 1 and 2 * len(errors) > len(kept):
            raise errors[0]
        return elected(
            announced_row(told(assignment)), [k.ballot for k in kept], numel, seed, assignment.round
        )


class BallotElection(ClientAlgorithm):
    """Sends its own signs, then votes on those that were passed on to it."""

    def __init__(self) -> None:
        super().__init__((BALLOTS, TALLY))

    def seed(self, codec: Codec, run_seed: int, assignment: Assignment) -> int:
        return (
            super().seed(codec, run_seed, assignment) if assignment.phase == BALLOTS else run_seed
        )

    def later_update(
        self, memory: Memory, values: dict[str, Any], seed: int, context: Context
    ) -> Tensor:
        row = announced_row(context.announced)
        frames = {
            client: context.announced[str(client)]
            for client in row.senders
            if str(client) in context.announced
        }
        received = {client: packed_of(memory, frame) for client, frame in frames.items()}
        return elected(
            row,
            of_partitions(row, received, memory.numel, seed, context.round),
            memory.numel,
            seed,
            context.round,
        )

    def encode(
        self,
        memories: Sequence[Memory],
        updates: Tensor | None,
        values: Sequence[dict[str, Any]],
        seeds: Sequence[int],
        context: Context,
    ) -> list[Frame]:
        if context.phase == BALLOTS:
            return encode_each(_encode_ballot, memories, updates, values, seeds, context)
        return super().encode(memories, updates, values, seeds, context)


def _encode_ballot(
    memory: Memory, update: Tensor, values: dict[str, Any], seed: int, context: Context
) -> bytes:
    return memory.codec.encode(update, seed=seed, layout=memory.layout, context=context)


def packed_of(memory: Memory, frame: bytes) -> Ballot:
    """The signs of a frame. Raises FrameError."""
    update = memory.codec.open(frame, memory.numel, memory.layout)
    return update.words if isinstance(update, Bits) else kernels.bits.signs(update.dense())


def told(assignment: Assignment) -> dict[str, bytes]:
    """What is announced, by name."""
    return {
        name.decode(): value
        for name, value in zip(assignment.announced[::2], assignment.announced[1::2], strict=True)
    }
