"""Base classes of memories that send the difference between an update and a shift. The shift of a client is a vector that client and server
both store and change in the same way. With the update x and the codec C:

    send C(x − η·shift)
    shift ← shift + step·C(x − η·shift)/η, if the frame is accepted
    the server's estimate of x is η·shift + C(x − η·shift)

The factor η is the learning rate of the round, divided by the learning rate of the run (--lr). The number `step` is α for the memory
`diana`, and 1 for `ef21` and `laq`.

Updates grow with the learning rate. Shifts are therefore stored for η = 1. If a schedule or a warm-up changes the learning rate, all shifts
stay valid, including the shifts of clients that are not in the round. If a schedule changes the number of local steps or the batch size,
shifts are not rescaled, and need some rounds to adapt.

The shift changes only when a proposal is committed. Client and server therefore have the same shift while a proposal is pending, and after
a rollback.
"""

import json
import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..codecs import Context, Update
from ..codecs.update import Dense
from ..errors import NonFiniteError
from ..kernels import Rows
from .base import Changes, Counterpart, Memory, ReadValue, ReadVector, State, add_saturating

RATE = struct.Struct("<d")
CLIENTS = "clients"  # name of the checkpoint entry that lists the clients with a shift


class ShiftMemory(Memory):
    """The client's part: a memory that stores a float32 shift [numel], on the device (CPU or GPU) of the last update."""

    step: float = 1.0
    shift: Tensor | None = None  # None = zero
    rate: float = 1.0  # η in the round of the pending proposal

    @classmethod
    def _propose(
        cls, memories: Sequence["ShiftMemory"], x: Rows, seeds: Sequence[int], context: Context
    ) -> list[bytes | None | NonFiniteError]:
        differences = []
        for memory, row in zip(memories, x, strict=True):
            row = row.to(torch.float32)
            if memory.shift is not None:
                memory.shift = memory.shift.to(row.device)
                row = torch.sub(row, memory.shift, alpha=context.rate)
            differences.append(row)
        proposals: list[bytes | None | NonFiniteError] = []
        frames = cls._encode(memories, differences, seeds, context)
        for memory, difference, frame in zip(memories, differences, frames, strict=True):
            if not isinstance(frame, NonFiniteError):
                memory.rate = context.rate
                frame = memory._filter(difference, frame, context)
            proposals.append(frame)
        return proposals

    def _filter(self, difference: Tensor, frame: bytes, context: Context) -> bytes | None:
        """Return `frame`, or None if the client skips the round. `difference`: x − η·shift; do not modify it."""
        return frame

    def _on_accepted(self, update: Update, dropped: Update | None) -> None:
        if self.shift is None:
            self.shift = torch.zeros(self.numel, dtype=torch.float32)
        add_saturating(self.shift, update, self.step / self.rate)

    def _state(self) -> State:
        shift = {} if self.shift is None else {"shift": self.shift}
        rate = {"rate": RATE.pack(self.rate)} if self.pending is not None and self.rate != 1 else {}
        return super()._state() | shift | rate

    def _load_state(self, state: State) -> None:
        super()._load_state(state)
        self.shift = state.get("shift")
        (self.rate,) = RATE.unpack(state["rate"]) if "rate" in state else (1.0,)


@dataclass(frozen=True)
class Estimate(Update):
    """The server's estimate of a client's update: rate · shift, plus the decoded frame of the client, if the client sent one."""

    shift: Tensor  # the client's shift [numel], on the CPU
    update: Update | None  # the decoded frame
    rate: float = 1.0  # η
    positions = None

    @property
    def numel(self) -> int:
        return self.shift.numel()

    def add_to(self, into: Tensor, weight: float = 1.0) -> None:
        Dense(self.shift.numpy()).add_to(into, weight * self.rate)
        if self.update is not None:
            self.update.add_to(into, weight)

    def block(self, start: int, stop: int) -> np.ndarray:
        with np.errstate(over="ignore"):
            scaled = self.shift.numpy()[start:stop] * np.float32(self.rate)
            return scaled if self.update is None else scaled + self.update.block(start, stop)


class ShiftCounterpart(Counterpart):
    """The server's part: a float32 shift [numel], on the CPU, for every client with an accepted update."""

    # Whether the mean of a round includes the shifts of clients that are not in the round.
    counts_absent = False

    def __init__(self, memory: ShiftMemory):
        self.numel, self.step = memory.numel, memory.step
        self.clients: set[int] = set()  # clients that have a shift
        # Shifts by client; a shift is read from the checkpoint when it is first used.
        self.shifts: dict[int, Tensor] = {}
        self.changed: set[int] = set()  # clients whose shift changed since the last checkpoint
        self._clients_written: set[int] = set()
        self._stored: ReadVector = lambda name: None

    def shift_of(self, client: int) -> Tensor | None:
        """Return the shift of a client, or None if the client has no shift."""
        if client in self.clients and client not in self.shifts:
            self.shifts[client] = self._stored(str(client))
        return self.shifts.get(client)

    def estimate(self, client: int, update: Update | None, fresh: bool) -> Update | None:
        shift = None if fresh else self.shift_of(client)
        if shift is None:
            return update
        return Estimate(shift, update, self.rates.get(client, self.rate))

    def absent(self, present: Collection[int]) -> Iterator[tuple[int, Update]]:
        if self.counts_absent:
            for client in sorted(self.clients - set(present)):
                yield client, Estimate(self.shift_of(client), None, self.rate)

    def settle(
        self, accepted: Sequence[tuple[int, Update | None, bool]], squared_step: float
    ) -> None:
        for client, update, fresh in accepted:
            if fresh:
                self.shifts.pop(client, None)
                self.clients.discard(client)
                self.changed.discard(client)
            if update is not None:
                if self.shift_of(client) is None:
                    self.shifts[client] = torch.zeros(self.numel, dtype=torch.float32)
                rate = self.rates.get(client, self.rate)
                add_saturating(self.shifts[client], update, self.step / rate)
                self.clients.add(client)
                self.changed.add(client)

    def take_changes(self) -> Changes:
        vectors = {str(client): self.shifts[client] for client in sorted(self.changed)}
        self.changed.clear()
        if self.clients == self._clients_written:
            return vectors, {}
        self._clients_written = set(self.clients)
        return vectors, {CLIENTS: json.dumps(sorted(self.clients)).encode()}

    def restore(self, vector: ReadVector, value: ReadValue) -> None:
        self.clients = {int(client) for client in json.loads(value(CLIENTS) or b"[]")}
        self._clients_written, self._stored = set(self.clients), vector
        self.shifts.clear()
        self.changed.clear()
