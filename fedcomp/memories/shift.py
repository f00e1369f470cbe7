"""The base of memories that send differences to a shift: a vector that client and server keep and move by the same operations.

    send C(x − η·shift);  shift ← shift + step·C(x − η·shift)/η where it was taken;  the server takes x to be η·shift + C(x − η·shift)

η is the round's learning rate as a multiple of the run's. Updates grow with it, but the methods estimate gradients. Shifts
are therefore kept in the unit of an update at the run's learning rate, and schedules and warm-ups leave them valid, also those of absent
clients. A change of the local steps or the batch size is not corrected: later rounds send the difference.

Nothing moves before the news: while a proposal waits, and after it was rolled back, `shift` is what the server has.
"""

import json
import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..codecs import Codec, Context, Update
from ..codecs.update import Dense
from ..errors import NonFiniteError
from ..kernels import Rows
from .base import Changes, Counterpart, Memory, ReadValue, ReadVector, State, add_saturating

RATE = struct.Struct("<d")
MEMBERS = "clients"  # in a checkpoint: who has a shift


def contraction(codec: Codec, numel: int) -> float:
    """Return δ of a codec at vectors [numel], in the mean over seeds, 0 if it has none. An unbiased one contracts by 1 − ω."""
    omega = codec.variance(numel)
    return max(codec.contraction(numel) or 0.0, 0.0 if omega is None else 1.0 - omega)


class ShiftMemory(Memory):
    """A shift [numel] in float32, on the device of the updates."""

    step: float = 1.0
    shift: Tensor | None = None  # None = zero
    rate: float = 1.0  # of the round in which the waiting proposal was made

    @classmethod
    def _propose(
        cls, memories: Sequence["ShiftMemory"], x: Rows, seeds: Sequence[int], context: Context
    ) -> list[bytes | None | NonFiniteError]:
        differences = [
            memory._difference(row.to(torch.float32), context.rate)
            for memory, row in zip(memories, x, strict=True)
        ]
        proposals: list[bytes | None | NonFiniteError] = []
        frames = cls._encode(memories, differences, seeds, context)
        for memory, difference, frame in zip(memories, differences, frames, strict=True):
            if not isinstance(frame, NonFiniteError):
                memory.rate = context.rate
                frame = memory._offer(difference, frame, context)
            proposals.append(frame)
        return proposals

    def _difference(self, x: Tensor, rate: float) -> Tensor:
        """Return x − rate·shift, with the shift moved to the device of x."""
        if self.shift is None:
            return x
        self.shift = self.shift.to(x.device)
        return torch.sub(x, self.shift, alpha=rate)

    def _offer(self, difference: Tensor, frame: bytes, context: Context) -> bytes | None:
        """Return what is sent of x − shift, whose frame is given. `difference` is not modified."""
        return frame

    def _on_accepted(self, update: Update, dropped: Update | None) -> None:
        if self.shift is None:
            self.shift = torch.zeros(self.numel, dtype=torch.float32)
        add_saturating(self.shift, update, self.step / self.rate)

    def _state(self) -> State:
        shift = {} if self.shift is None else {"shift": self.shift}
        waiting = self.pending is not None and self.rate != 1
        return super()._state() | shift | ({"rate": RATE.pack(self.rate)} if waiting else {})

    def _load_state(self, state: State) -> None:
        super()._load_state(state)
        self.shift = state.get("shift")
        (self.rate,) = RATE.unpack(state["rate"]) if "rate" in state else (1.0,)


@dataclass(frozen=True)
class Estimate(Update):
    """A multiple of a shift plus the update that was sent, if any. Valid until the shift moves."""

    shift: Tensor  # [numel], on the CPU
    update: Update | None
    rate: float = 1.0
    positions: ClassVar[None] = None

    @property
    def numel(self) -> int:
        return self.shift.numel()

    def add_to(self, into: Tensor, weight: float = 1.0) -> None:
        Dense(self.shift.numpy()).add_to(into, weight * self.rate)
        if self.update is not None:
            self.update.add_to(into, weight)

    def block(self, start: int, stop: int) -> np.ndarray:
        with np.errstate(over="ignore"):
            kept = self.shift.numpy()[start:stop] * np.float32(self.rate)
            return kept if self.update is None else kept + self.update.block(start, stop)


class ShiftCounterpart(Counterpart):
    """The shift of every client that was ever taken: float32 [numel], on the CPU; a vector each in the checkpoint."""

    counts_absent: ClassVar[bool] = False  # clients without an update count with their shifts

    def __init__(self, memory: ShiftMemory):
        self.numel, self.step = memory.numel, memory.step
        self.members: set[int] = set()
        self.rows: dict[int, Tensor] = {}  # of members, read from a checkpoint on first use
        self.changed: set[int] = set()  # members, since the last checkpoint
        self.members_written: set[int] = set()
        self._stored: ReadVector = lambda name: None

    def row(self, client: int) -> Tensor | None:
        """Return the shift of a client, None for zero."""
        if client in self.members and client not in self.rows:
            self.rows[client] = self._stored(str(client))
        return self.rows.get(client)

    def estimate(self, client: int, update: Update | None, fresh: bool) -> Update | None:
        row = None if fresh else self.row(client)
        return update if row is None else Estimate(row, update, self.rates.get(client, self.rate))

    def absent(self, present: Collection[int]) -> Iterator[tuple[int, Update]]:
        if self.counts_absent:
            for client in sorted(self.members - set(present)):
                yield client, Estimate(self.row(client), None, self.rate)

    def settle(self, taken: Sequence[tuple[int, Update | None, bool]], moved: float) -> None:
        for client, update, fresh in taken:
            if fresh:
                self.forget(client)
            if update is not None:
                if self.row(client) is None:
                    self.rows[client] = torch.zeros(self.numel, dtype=torch.float32)
                rate = self.rates.get(client, self.rate)
                add_saturating(self.rows[client], update, self.step / rate)
                self.members.add(client)
                self.changed.add(client)

    def forget(self, client: int) -> None:
        """Drop the shift of a client that starts from nothing."""
        self.rows.pop(client, None)
        self.members.discard(client)
        self.changed.discard(client)

    def take_changes(self) -> Changes:
        vectors = {str(client): self.rows[client] for client in sorted(self.changed)}
        self.changed.clear()
        if self.members == self.members_written:
            return vectors, {}
        self.members_written = set(self.members)
        return vectors, {MEMBERS: json.dumps(sorted(self.members)).encode()}

    def restore(self, vector: ReadVector, value: ReadValue) -> None:
        self.members = {int(client) for client in json.loads(value(MEMBERS) or b"[]")}
        self.members_written, self._stored = set(self.members), vector
        self.rows.clear()
        self.changed.clear()
