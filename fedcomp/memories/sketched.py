"""Sketches of all that was not sent, and then its exact values where the server asks for them.

Ivkin, Rothchild, Ullah, Braverman, Stoica, Arora: Communication-efficient distributed SGD with sketching. NeurIPS 2019, algorithm 3.

    u ← m·u + x;  v ← v + u;  send S(v);  then v at the announced candidates;  u and v are zero where these were kept

A proposal has two frames, in the phases `sketch` and `values` of the strategy `sketched-sgd`. The second stands for what was accepted, to
the last bit: with m = 0 what was kept and v add up to all inputs. Candidates that the server did not keep come back as marks, one for
each candidate, since this side has their values. Under another strategy a client could not know which part of its sketch was read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from .. import spec
from ..codecs import Context, Update, codec
from ..codecs.sketch import Sketch
from ..codecs.update import Sparse
from ..errors import MismatchError, ProtocolError
from .base import State, mask
from .vector_memory import NamedVectors, VectorMemory

SKETCH, VALUES = "sketch", "values"  # phases
CANDIDATES = "candidates"  # what is announced for the second, and a name in the state
NUMBERS = codec("identity")  # makes the frames of values
MARKS = codec(
    "sbc:density=1"
)  # makes frames of positions: one number stands for all that are marked


@dataclass(frozen=True)
class Options:
    momentum: float = 0.9

    def __post_init__(self) -> None:
        spec.check_decays(self, "momentum")


class Sketched(VectorMemory):
    """`residual` is v."""

    name: ClassVar[str] = "sketched"
    source: ClassVar[str] = "Ivkin et al. 2019"
    Options: ClassVar[type] = Options
    required_strategy: ClassVar[str] = "sketched-sgd"
    vectors: ClassVar[tuple[str, ...]] = ("residual", "velocity")
    velocity: Tensor | None = None  # u
    candidates: bytes = b""  # that were announced to a proposal in its second phase

    @property
    def gain(self) -> float:
        return 1 / (1 - self.options.momentum)

    def _check_codec(self) -> None:
        if not isinstance(self.codec.unscoped, Sketch):
            raise MismatchError(
                f"{{memory}} {self.name} goes with --strategy {self.required_strategy} and {{uplink}} sketch, not with {self.codec}; "
                "give these, or {memory} dgc"
            )

    @property
    def sent_positions(self) -> np.ndarray:
        """Candidates, whose values the pending frame holds: int64, ascending; none for a sketch."""
        if not self.candidates:
            return np.empty(0, np.int64)
        return MARKS.open(self.candidates, self.numel).positions

    def _open_returned(self, returned: bytes) -> Update:
        at = self.sent_positions
        left = at[MARKS.open(returned, at.size).positions]
        return Sparse(self.numel, left, self._values(left).numpy())

    def _state(self) -> State:
        return super()._state() | ({CANDIDATES: self.candidates} if self.candidates else {})

    def _load_state(self, state: State) -> None:
        super()._load_state(state)
        self.candidates = state.get(CANDIDATES, b"")

    def _update_vectors(
        self, kept: NamedVectors, x: Tensor, context: Context
    ) -> tuple[NamedVectors, Tensor]:
        if context.phase != SKETCH:
            raise MismatchError(
                f"{{memory}} {self.name} has no frame for a phase '{context.phase}'; give --strategy {self.required_strategy}, "
                "or {memory} none"
            )
        u = (kept["velocity"] * self.options.momentum).add_(x)
        v = kept["residual"] + u
        return {"velocity": u, "residual": v}, v

    def _proceed(self, seed: int, context: Context) -> bytes | None:
        if context.phase != VALUES:
            return super()._proceed(seed, context)
        if CANDIDATES not in context.announced:
            raise ProtocolError(
                f"the server announced no '{CANDIDATES}' for the phase '{VALUES}'; both sides need the same strategy"
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
        for memory, back in zip(memories, dropped, strict=True):
            # Of a sketch alone, nothing was accepted.
            mask((memory.velocity, memory.residual), memory.sent_positions, back)
            memory.candidates = b""

    def _rollback(self) -> None:
        self.candidates = b""

    def _values(self, at: np.ndarray) -> Tensor:
        """Return v at these positions, on the CPU."""
        return self.residual[torch.from_numpy(at).to(self.residual.device)].cpu()
