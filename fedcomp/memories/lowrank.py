"""The memory of PowerSGD: error feedback for matrices that are sent as low-rank factors.

Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization", NeurIPS 2019, algorithms 1
and 2. With the residual e and the update x, a client computes the following for e and for each matrix M in e:

    e ← e + x
    P = M Q
    P̂ = an orthonormal basis of the columns of P
    Q' = Mᵀ P̂
    M ← M − P̂ Q'ᵀ, if the update is accepted

With the strategy `powersgd`, a round has two phases (exchanges of messages): clients send P in the phase "left", and Q' in the phase
"right". Before the first phase, the server announces Q, which is the mean of the Q' that the clients sent in the previous round (random in
the first round). Before the second phase, the server announces P̂, which it computes from the mean of the clients' P. The frame of the
second phase also contains the values of all tensors that are not sent as factors. The accepted update is computed from this frame and P̂.
With any other strategy, a client sends one frame of the codec `powersgd`, and uses the Q' of its last accepted update as the next Q.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..codecs import Codec, Context, Update, codec
from ..codecs.base import nonfinite_errors
from ..codecs.levels import LARGEST
from ..codecs.matrices import LowRankUpdate, read_arrays, total_numel
from ..codecs.powersgd import FactorLayout, PowerSGD, start_name
from ..codecs.update import Sections
from ..errors import MismatchError, NonFiniteError, ProtocolError
from ..kernels import Rows
from ..layout import Layout
from .base import State, VectorMemory, add_saturating

LEFT, RIGHT = "left", "right"  # names of the phases, and of the announced P̂ and Q
NUMBERS = codec("identity")  # codec for the frames of both phases
PHASE, BASIS = "phase", "left"  # names of entries in the memory's state


class LowRank(VectorMemory):
    """Error feedback for matrices that are sent as low-rank factors.

    The state has a float32 residual [numel] and, unless the strategy announces Q, the initial Q of the next proposal for each matrix.
    """

    name = "lowrank"
    source = "Vogels et al. 2019"

    def __init__(self, codec: Codec, numel: int, layout: Layout | None = None, options: Any = None):
        super().__init__(codec, numel, layout, options)
        self.factor_layout = FactorLayout(layout or Layout.flat(numel), self.codec.rank)
        self.starts: dict[str, bytes] = {}  # initial Q of each matrix, by its `start_name`
        self.phase = ""  # phase of the pending frame, "" if the proposal has only one frame
        self.basis = b""  # basis P̂ of the pending update in the phase `right`, else b""

    def _check_codec(self) -> None:
        if not isinstance(self.codec, PowerSGD):
            raise MismatchError(
                f"{{memory}} lowrank needs {{uplink}} powersgd, not {self.codec}; give {{uplink}} powersgd, or {{memory}} residual"
            )

    @classmethod
    def _propose(
        cls, memories: Sequence["LowRank"], x: Rows, seeds: Sequence[int], context: Context
    ) -> list[bytes | NonFiniteError]:
        return [
            memory._propose_one(row.to(torch.float32), seed, context)
            for memory, row, seed in zip(memories, x, seeds, strict=True)
        ]

    def _propose_one(self, x: Tensor, seed: int, context: Context) -> bytes | NonFiniteError:
        self.residual = self._vectors_on(x)["residual"]
        if context.phase != LEFT:
            context = replace(context, announced={**context.announced, **self.starts})
            (frame,) = self._encode([self], [x], [seed], context, [self.residual])
            return frame
        right = self._announced(RIGHT, self.factor_layout.right_shapes, context)
        added = self.residual + x
        for what, vector in (("the update", x), ("the sum of residual and update", added)):
            (error,) = nonfinite_errors([vector], self.layout, what)
            if error is not None:
                return error
        self.residual, self.phase = added, LEFT
        pairs = zip(self.factor_layout.matrices_of(added), right, strict=True)
        return _frame(m @ q for m, q in pairs)

    def _proceed(self, seed: int, context: Context) -> bytes | None:
        if self.phase != LEFT or context.phase != RIGHT:
            return super()._proceed(seed, context)
        left = self._announced(LEFT, self.factor_layout.left_shapes, context)
        pairs = zip(self.factor_layout.matrices_of(self.residual), left, strict=True)
        right = [m.T @ p for m, p in pairs]
        frame = _frame([*right, *(self.residual[e.span] for e in self.factor_layout.others)])
        self.phase, self.basis = RIGHT, context.announced[LEFT]
        return frame

    @classmethod
    def _commit(
        cls,
        memories: Sequence["LowRank"],
        frames: Sequence[bytes],
        dropped: Sequence[Update | None],
    ) -> None:
        for memory, frame, dropped_part in zip(memories, frames, dropped, strict=True):
            if memory.phase != LEFT:  # the phase `left` sends only a part of the update
                update = memory._read(frame)
                memory.starts |= {} if memory.phase else _starts(update)
                memory._on_accepted(update, dropped_part)
            elif dropped_part is not None:
                add_saturating(memory.residual, dropped_part)
            memory._rollback()

    def _rollback(self) -> None:
        self.phase, self.basis = "", b""

    @property
    def sent_positions(self) -> np.ndarray | None:
        return None if self.pending is not None and self.phase else super().sent_positions

    def _state(self) -> State:
        phase = {PHASE: self.phase.encode(), BASIS: self.basis} if self.phase else {}
        return super()._state() | phase | self.starts

    def _load_state(self, state: State) -> None:
        super()._load_state(state)
        self.phase, self.basis = state.get(PHASE, b"").decode(), state.get(BASIS, b"")
        others = {"pending", *self.vectors, PHASE, BASIS}
        self.starts = {name: start for name, start in state.items() if name not in others}

    def _announced(
        self, name: str, shapes: Sequence[tuple[int, ...]], context: Context
    ) -> list[Tensor]:
        """Return the float64 factors that the server announced as `name`. Raises ProtocolError if the factors are missing or invalid."""
        if name not in context.announced:
            raise ProtocolError(
                f"the server did not announce '{name}', which the phase '{context.phase}' needs; server and client need the same strategy"
            )
        try:
            factors = read_arrays(context.announced[name], shapes)
        except ValueError as error:
            raise ProtocolError(
                f"the factors that the server announced as '{name}' cannot be used ({error}); check that server and client train the "
                "same model, and that the training does not diverge"
            ) from error
        tensors = (torch.from_numpy(factor.astype(np.float64)) for factor in factors)
        return [tensor.to(self.residual.device) for tensor in tensors]

    def _read(self, frame: bytes) -> Update:
        if not self.phase:
            return self.codec.open(frame, self.numel, self.layout)
        factors = self.factor_layout
        count = total_numel([*factors.right_shapes, *factors.other_shapes])
        return factors.update(self.basis, NUMBERS.open(frame, count).values)


def _frame(parts: Iterable[Tensor]) -> bytes:
    """Clamp the numbers in the tensors `parts` to the range of float32, and encode them as one frame."""
    numbers = [part.clamp(-LARGEST, LARGEST).to(torch.float32).reshape(-1) for part in parts]
    return NUMBERS.encode(torch.cat(numbers) if numbers else torch.empty(0, dtype=torch.float32))


def _starts(update: Update) -> dict[str, bytes]:
    """Return the right factor Q of each matrix in an update, by its `start_name`. It is the initial Q of the next proposal."""
    parts = enumerate(part for _, part in update.parts) if isinstance(update, Sections) else ()
    return {
        start_name(i): part.right.tobytes()
        for i, part in parts
        if isinstance(part, LowRankUpdate) and part.right.size
    }
