"""LAQ: a client sends the difference between its update and the server's estimate, but only if this difference is large enough.

Sun, Chen, Giannakis and Yang, "Communication-efficient distributed learning via lazily aggregated quantized gradients", NeurIPS 2019. With
the update x, the codec C, and the estimate q of x that client and server store:

    δQ = C(x − q)
    skip the round if ‖δQ‖² ≤ Σ_d ξ_d ‖θ^(k+1−d) − θ^(k−d)‖²/η² + 3(‖ε‖² + ‖ε̂‖²), for at most t̄ rounds in a row
    else send δQ, and client and server set q ← q + δQ
    the server moves the model by η times the mean of all q

The right side of the inequality is the threshold. In it, θ^k is the model in round k, and η is the server's learning rate (`--server-lr`).
Let ε = x − q − δQ be the codec's error in this round, and ε̂ its error in the last accepted proposal. As in the authors' code, the
threshold includes the last D = 10 steps of the model, each with the weight ξ_d = 0.8/D, and t̄ is 100. The paper has 1/(α²M²) instead of
1/η², because its model moves by α times the sum over M workers, not by η times the mean. The paper's quantizer with b bits corresponds to
`qsgd:levels=L,norm=max,rounding=nearest` with L = 2^(b−1) − 1. Other codecs also work if their error is small. If the error of a codec is
large, ‖δQ‖² never exceeds 3(‖ε‖² + ‖ε̂‖²), so every client always skips t̄ rounds in a row. Such codecs are rejected. With the option
`errors=0`, the codec's errors do not count in the threshold. This memory is then LAG (Chen, Giannakis, Sun and Yin, NeurIPS 2018) and works
with any contractive codec. The mean includes the estimates q of clients that skip the round or are not in the round.
"""

import json
import math
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .. import spec
from ..codecs import Context, Update
from ..codecs.product import contraction
from ..errors import MismatchError, ProtocolError
from ..kernels.sums import sum_squares
from .base import Changes, ReadValue, ReadVector, State
from .shift import ShiftCounterpart, ShiftMemory

THRESHOLD = "threshold"  # name of the announced part of the threshold, the sum over d
NUMBER = struct.Struct("<d")
# Initial value of `age`, larger than every `patience`, so that the first round is not skipped
NEVER = 2**62
STEPS = "steps"  # name of the checkpoint entry with the squared norms of model steps
# Name of the entry with `age`, `error` and `pending_error` in a client's state
NUMBERS = "clock"


@dataclass(frozen=True)
class LAQOptions:
    window: int = 10  # D: number of past model steps in the threshold for skipping rounds
    weight: float = 0.8  # Σ ξ_d: weight of the model steps in the threshold; larger = more skips
    errors: float = 3.0  # weight of the codec's errors in the threshold (3 in the formula above); 0 = ignore errors
    patience: int = 100  # t̄: largest number of rounds that a client may skip in a row

    def __post_init__(self) -> None:
        spec.check_ranges(self, window=(1, 10_000), weight=(0, 1e6), errors=(0, 1e6))
        spec.check_ranges(self, patience=(0, 10**9))


class LAQCounterpart(ShiftCounterpart):
    """The server's part of LAQ: the estimates of all clients' updates, and the norms of the last model steps."""

    counts_absent = True
    compares_model_steps = True

    def __init__(self, memory: "LAQ"):
        super().__init__(memory)
        self.weight: float = memory.options.weight / memory.options.window
        # Squared norms of the last model steps, divided by η², the newest last.
        self.steps: deque[float] = deque(maxlen=memory.options.window)

    def announce(self) -> Mapping[str, bytes]:
        return {THRESHOLD: NUMBER.pack(self.weight * math.fsum(self.steps))}

    def settle(
        self, accepted: Sequence[tuple[int, Update | None, bool]], squared_step: float
    ) -> None:
        super().settle(accepted, squared_step)
        self.steps.append(squared_step)

    def take_changes(self) -> Changes:
        vectors, values = super().take_changes()
        return vectors, values | {STEPS: np.array(self.steps, "<f8").tobytes()}

    def restore(self, vector: ReadVector, value: ReadValue) -> None:
        super().restore(vector, value)
        self.steps.clear()
        self.steps.extend(np.frombuffer(value(STEPS) or b"", "<f8").tolist())


class LAQ(ShiftMemory):
    """The client's part of LAQ."""

    name = "laq"
    source = "Sun et al. 2019"
    Options = LAQOptions
    counterpart = LAQCounterpart
    age: int = NEVER  # number of rounds since the last accepted proposal
    # Squared norm of the codec's error in the last accepted proposal, divided by the squared learning rate (`rate`) of that round.
    error: float = 0.0
    pending_error: float = 0.0  # `error` for the pending proposal

    def _check_codec(self) -> None:
        delta, errors = contraction(self.codec, self.numel), self.options.errors
        if not delta:
            raise MismatchError(
                f"{{memory}} laq does not converge with {self.codec}, which is not contractive; use {{uplink}} fp16, or {{memory}} none"
            )
        if delta <= errors * (1 - delta):
            raise MismatchError(
                f"{{memory}} laq would skip as many rounds as it may with {self.codec}, because the error of this codec is too large; "
                "use {uplink} fp16, or {memory} laq:errors=0"
            )

    def _filter(self, difference: Tensor, frame: bytes, context: Context) -> bytes | None:
        sent = self.codec.open(frame, self.numel, self.layout).dense(difference.device)
        error = sum_squares(torch.nan_to_num(difference - sent))  # finite despite overflow
        previous_error = self.error * context.rate * context.rate
        threshold = _threshold(context) + self.options.errors * (error + previous_error)
        if self.age < self.options.patience and sum_squares(sent) <= threshold:
            self.age += 1
            return None
        self.pending_error = error / context.rate / context.rate
        return frame

    def _on_accepted(self, update: Update, dropped: Update | None) -> None:
        super()._on_accepted(update, dropped)
        self.age, self.error = 0, self.pending_error

    def _rollback(self) -> None:
        self.age += 1

    def _state(self) -> State:
        numbers = json.dumps([self.age, self.error, self.pending_error]).encode()
        return super()._state() | {NUMBERS: numbers}

    def _load_state(self, state: State) -> None:
        super()._load_state(state)
        numbers = json.loads(state[NUMBERS]) if NUMBERS in state else (NEVER, 0.0, 0.0)
        self.age, self.error, self.pending_error = numbers


def _threshold(context: Context) -> float:
    """Return the announced part of the threshold, or −∞ without an announcement, so that the round is not skipped."""
    announced = context.announced.get(THRESHOLD)
    if announced is None:
        return -math.inf
    if len(announced) != NUMBER.size:
        raise ProtocolError(
            f"the server announced a '{THRESHOLD}' of {len(announced)} bytes, not {NUMBER.size}; server and client need the same --memory"
        )
    return NUMBER.unpack(announced)[0]
