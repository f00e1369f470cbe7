"""The memory of sketched SGD: a client sends a sketch of its residual, and then exact values at the coordinates that the server requests.

Ivkin et al., "Communication-efficient distributed SGD with sketching", NeurIPS 2019, algorithm 3. With the update x and the momentum factor
m:

    u ← m·u + x     the momentum
    v ← v + u       the residual
    send the sketch S(v)
    send the values of v at the candidates that the server announces
    set u and v to zero where the values were accepted

The candidates are coordinates that the server expects to be large, because their estimates from the sum of all sketches are large. The
memory works only with the strategy `sketched-sgd`, in which a client sends two frames for an update: one in the phase `sketch`, and one in
the phase `values`. The second frame contains exact values, so no part of an update is lost: without momentum (m = 0), the residual plus the
sum of all accepted values equals the sum of all updates. The server returns the positions of candidates whose values it did not use. It
does not return the values, because the client knows them. With any other strategy, a client would not know which part of its sketch was
used.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..codecs import Context, Update, codec
from ..codecs.sketch import Sketch
from ..codecs.update import Sparse
from ..errors import MismatchError, ProtocolError
from .base import MomentumOptions, State, Updated, VectorMemory, Vectors, mask

SKETCH, VALUES = "sketch", "values"  # names of the phases
# Name of the candidates (coordinates to send) in the server's announcement and in the memory's state
CANDIDATES = "candidates"
NUMBERS = codec("identity")  # codec for values at the candidates
MARKS = codec("sbc:density=1")  # codec for sets of positions


class Sketched(VectorMemory):
    """Error feedback with momentum, for sketches. The client sends a sketch of the vector `residual`, and then some of its exact values."""

    name = "sketched"
    source = "Ivkin et al. 2019"
    Options = MomentumOptions
    required_strategy = "sketched-sgd"
    vectors = ("residual", "velocity")
    velocity: Tensor | None = None  # u
    candidates: bytes = b""  # the announced candidates of the pending proposal, encoded

    def _check_codec(self) -> None:
        if not isinstance(self.codec.unscoped, Sketch):
            raise MismatchError(
                f"{{memory}} {self.name} needs --strategy {self.required_strategy} and {{uplink}} sketch, not {self.codec}; "
                "give both, or {memory} dgc"
            )

    @property
    def sent_positions(self) -> np.ndarray:
        """Indices of the coordinates whose values are in the pending frame, int64, ascending; empty if the pending frame is a sketch."""
        if not self.candidates:
            return np.empty(0, np.int64)
        return MARKS.open(self.candidates, self.numel).positions

    def _open_returned(self, returned: bytes) -> Update:
        candidates = self.sent_positions
        dropped = candidates[MARKS.open(returned, candidates.size).positions]
        return Sparse(self.numel, dropped, self._values(dropped).numpy())

    def _state(self) -> State:
        return super()._state() | ({CANDIDATES: self.candidates} if self.candidates else {})

    def _load_state(self, state: State) -> None:
        super()._load_state(state)
        self.candidates = state.get(CANDIDATES, b"")

    def _update_vectors(self, vectors: Vectors, x: Tensor, context: Context) -> Updated:
        if context.phase != SKETCH:
            raise MismatchError(
                f"{{memory}} {self.name} cannot make a frame for the phase '{context.phase}'; give --strategy {self.required_strategy}, "
                "or {memory} none"
            )
        u = (vectors["velocity"] * self.options.momentum).add_(x)
        v = vectors["residual"] + u
        return {"velocity": u, "residual": v}, v

    def _proceed(self, seed: int, context: Context) -> bytes | None:
        if context.phase != VALUES:
            return super()._proceed(seed, context)
        if CANDIDATES not in context.announced:
            raise ProtocolError(
                f"the server did not announce '{CANDIDATES}', which the phase '{VALUES}' needs; server and client need the same strategy"
            )
        announced = context.announced[CANDIDATES]
        values = self._values(MARKS.open(announced, self.numel).positions)
        self.candidates = announced
        return NUMBERS.encode(values)

    @classmethod
    def _commit(
        cls,
        memories: Sequence["Sketched"],
        frames: Sequence[bytes],
        dropped: Sequence[Update | None],
    ) -> None:
        for memory, dropped_part in zip(memories, dropped, strict=True):
            # If only the sketch was accepted, `sent_positions` is empty, since no values were sent.
            mask((memory.velocity, memory.residual), memory.sent_positions, dropped_part)
            memory.candidates = b""

    def _rollback(self) -> None:
        self.candidates = b""

    def _values(self, at: np.ndarray) -> Tensor:
        return self.residual[torch.from_numpy(at).to(self.residual.device)].cpu()
