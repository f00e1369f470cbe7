"""Differences that are sent only when they are worth it.

Sun, Chen, Giannakis, Yang: Communication-efficient distributed learning via lazily aggregated quantized gradients. NeurIPS 2019.

    δQ = C(x − q);  send nothing if ‖δQ‖² ≤ Σ_d ξ_d ‖θ^(k+1−d) − θ^(k−d)‖²/η² + 3(‖ε‖² + ‖ε̂‖²), for t̄ rounds in a row at most;
    else send δQ, and q ← q + δQ on both sides;  the server moves the model by η times the mean of all q

ε = x − q − δQ is what the codec loses now, ε̂ what it lost when it was last taken; ξ_d = 0.8/D with D = 10, t̄ = 100 as in the authors' code.
The paper writes 1/(α²M²) for 1/η²: its model moves by α times a sum over M workers, ours by η times a mean. Its quantizer is a uniform
grid; here any codec will do that loses so little that the second term does not hide every change. With `errors=0` this is LAG (Chen,
Giannakis, Sun, Yin. NeurIPS 2018) around any codec that contracts. Clients that are not asked count like those that send nothing.
"""

import json
import math
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from .. import spec
from ..codecs import Context, Update
from ..errors import MismatchError, ProtocolError
from ..kernels.sums import sum_squares
from .base import Changes, Counterpart, ReadValue, ReadVector, State
from .shift import ShiftCounterpart, ShiftMemory, contraction

THRESHOLD = "threshold"  # announced: Σ_d ξ_d ‖θ^(k+1−d) − θ^(k−d)‖²/η²
NUMBER = struct.Struct("<d")
NEVER = 2**62  # rounds since a proposal was taken, when none ever was
STEPS = "steps"  # in a checkpoint


@dataclass(frozen=True)
class Options:
    window: int = 10  # D: steps of the model that a change is measured by
    weight: float = 0.8  # Σ ξ_d; higher = more rounds are skipped
    errors: float = 3.0  # weight of what the codec loses; 0 = none
    patience: int = 100  # t̄: rounds that a client may skip in a row

    def __post_init__(self) -> None:
        spec.check_ranges(
            self, window=(1, 10_000), weight=(0, 1e6), errors=(0, 1e6), patience=(0, 10**9)
        )


class LAQCounterpart(ShiftCounterpart):
    """q of every client, all of which count in every round, and how far the model has moved lately."""

    counts_absent: ClassVar[bool] = True
    compares_model_steps: ClassVar[bool] = True

    def __init__(self, memory: "LAQ"):
        super().__init__(memory)
        self.weight: float = memory.options.weight / memory.options.window
        # Squared lengths of the last steps of the model, the latest last.
        self.steps: deque[float] = deque(maxlen=memory.options.window)

    def announce(self) -> Mapping[str, bytes]:
        return {THRESHOLD: NUMBER.pack(self.weight * math.fsum(self.steps))}

    def settle(self, taken: Sequence[tuple[int, Update | None, bool]], moved: float) -> None:
        super().settle(taken, moved)
        self.steps.append(moved)

    def take_changes(self) -> Changes:
        vectors, values = super().take_changes()
        return vectors, values | {STEPS: np.array(self.steps, "<f8").tobytes()}

    def restore(self, vector: ReadVector, value: ReadValue) -> None:
        super().restore(vector, value)
        self.steps.clear()
        self.steps.extend(np.frombuffer(value(STEPS) or b"", "<f8").tolist())


class LAQ(ShiftMemory):
    """Sends the difference to what it last sent, or nothing."""

    name: ClassVar[str] = "laq"
    source: ClassVar[str] = "Sun et al. 2019"
    Options: ClassVar[type] = Options
    counterpart: ClassVar[type[Counterpart]] = LAQCounterpart
    age: int = NEVER  # rounds since a proposal was taken
    error: float = 0.0  # ‖ε̂‖², in the unit of the shift
    waiting: float = 0.0  # ‖ε‖² of the proposal that waits, likewise

    def _check_codec(self) -> None:
        delta, errors = contraction(self.codec, self.numel), self.options.errors
        if delta <= 0:
            raise MismatchError(
                f"{{memory}} laq gets nowhere with {self.codec}, which does not contract; use {{uplink}} fp16, or {{memory}} none"
            )
        if delta <= errors * (1 - delta):
            raise MismatchError(
                f"{{memory}} laq would skip every round with {self.codec}: what it loses outweighs what it sends; "
                "use {uplink} fp16, or {memory} laq:errors=0"
            )

    def _offer(self, difference: Tensor, frame: bytes, context: Context) -> bytes | None:
        sent = self.codec.decode(
            frame, numel=self.numel, device=difference.device, layout=self.layout
        )
        lost = sum_squares(
            torch.nan_to_num(difference - sent)
        )  # finite at the ends of the range of float32, too
        lost_before = self.error * context.rate * context.rate
        least = _threshold(context) + self.options.errors * (lost + lost_before)
        if self.age < self.options.patience and sum_squares(sent) <= least:
            self.age += 1
            return None
        self.waiting = lost / context.rate / context.rate
        return frame

    def _on_accepted(self, update: Update, dropped: Update | None) -> None:
        super()._on_accepted(update, dropped)
        self.age, self.error = 0, self.waiting

    def _rollback(self) -> None:
        self.age += 1

    def _state(self) -> State:
        return super()._state() | {
            "clock": json.dumps([self.age, self.error, self.waiting]).encode()
        }

    def _load_state(self, state: State) -> None:
        super()._load_state(state)
        clock = json.loads(state["clock"]) if "clock" in state else (NEVER, 0.0, 0.0)
        self.age, self.error, self.waiting = clock


def _threshold(context: Context) -> float:
    """Return the announced threshold; −∞ if there is none, so that everything is sent."""
    announced = context.announced.get(THRESHOLD)
    if announced is None:
        return -math.inf
    if len(announced) != NUMBER.size:
        raise ProtocolError(
            f"the announced {THRESHOLD} has {len(announced)} bytes, not {NUMBER.size}; both sides need the same memory"
        )
    return NUMBER.unpack(announced)[0]
