"""What a client keeps between rounds, around a codec.

A memory makes a proposal and waits for the news of it. `propose(x)` returns a frame; then exactly one of `commit()`
(the other side took it) or `rollback()` (it did not) settles it. State is plain tensors and bytes, so that it can be
written to disk and moved between devices.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..codecs import Codec, Context, Update
from ..codecs.base import NO_CONTEXT, check_dense, check_kind
from ..errors import ConfigError, NonFiniteError
from ..layout import Layout

State = dict[str, Tensor | bytes]


@dataclass(frozen=True)
class NoOptions:
    """A memory without options."""


class Memory(ABC):
    """A codec with a memory, for vectors [numel].

    Subclasses write `_propose`, `_commit`, `_rollback` and the state; here is what keeps them in step.
    """

    name: ClassVar[str]
    source: ClassVar[str] = "–"
    Options: ClassVar[type] = NoOptions  # a frozen dataclass: what `name:option=value` may say

    def __init__(self, codec: Codec, numel: int, layout: Layout | None = None, options: Any = None):
        if layout is not None and layout.numel != numel:
            raise ConfigError(f"the layout has {layout.numel} elements and the memory {numel}; give the layout of this model")
        self.codec = self._made_with = codec
        self.numel, self.layout, self.options = numel, layout, options or self.Options()
        self.pending: bytes | None = None  # the frame of a proposal that is not settled
        self.check_codec()

    def use_density(self, density: float) -> None:
        """Send this share of the coordinates from now on; 0 = that of the codec that was given. Raises ConfigError where it has none."""
        self.codec = self._made_with.at_density(density) if density else self._made_with

    def check_codec(self) -> None:
        """Raise ConfigError when this memory would diverge with its codec, naming a codec with which it would not."""

    def propose(self, x: Tensor, *, seed: int = 0, context: Context = NO_CONTEXT) -> bytes | None:
        """A frame for the update x [numel], or None when there is nothing to send. x is not touched.

        Raises NonFiniteError with the memory unchanged, and ConfigError while a proposal is not settled.
        """
        self._check_ready(x)
        self.pending = self._propose(x, seed, context)
        return self.pending

    @classmethod
    def propose_stack(
        cls, memories: Sequence["Memory"], x: Tensor, seeds: Sequence[int], context: Context = NO_CONTEXT
    ) -> list[bytes | None | NonFiniteError]:
        """`propose` for many memories of one class and codec, each with its row of x [m, n]; x may be overwritten.

        A NonFiniteError in the place of a row that cannot be sent, with that memory unchanged.
        """
        proposals: list[bytes | None | NonFiniteError] = []
        for memory, row, seed in zip(memories, x, seeds, strict=True):
            try:
                proposals.append(memory.propose(row, seed=seed, context=context))
            except NonFiniteError as error:
                proposals.append(error)
        return proposals

    def commit(self, *, returned: bytes | None = None) -> None:
        """The proposal was taken. `returned`: a frame of what the other side dropped of it, which comes back.

        Raises FrameError, with the proposal still waiting, when `returned` is damaged.
        """
        dropped = None if returned is None else self.codec.open(returned, self.numel, self.layout)
        self._commit(self._settle(), dropped)

    @classmethod
    def commit_stack(cls, memories: Sequence["Memory"]) -> None:
        """`commit` for many memories of one class and codec; override where one pass can read all their frames."""
        for memory in memories:
            memory.commit()

    def rollback(self) -> None:
        """The proposal was not taken: everything in it is still to be sent."""
        self._rollback(self._settle())

    @property
    def sent(self) -> np.ndarray | None:
        """Positions that the pending frame touches, int64, ascending; None for all of them."""
        if self.pending is None:
            return np.empty(0, np.int64)
        return self.codec.open(self.pending, self.numel, self.layout).positions

    def state_dict(self) -> State:
        """Everything that has to survive, as float32 vectors [numel] and bytes; not copied."""
        return {"pending": self.pending} if self.pending is not None else {}

    def load_state_dict(self, state: State) -> None:
        """Take over a state of `state_dict`. Tensors are taken as they are, not copied. Raises ConfigError for vectors of another kind."""
        for name, value in state.items():
            if isinstance(value, Tensor) and (value.dtype != torch.float32 or value.shape != (self.numel,)):
                given = f"{value.dtype} of shape {list(value.shape)}"
                raise ConfigError(f"'{name}' of the state is {given}; this memory needs float32 of {self.numel} elements")
        self.pending = state.get("pending")

    @abstractmethod
    def _propose(self, x: Tensor, seed: int, context: Context) -> bytes | None: ...

    @abstractmethod
    def _commit(self, frame: bytes, dropped: Update | None) -> None:
        """`frame` was taken, but for what was `dropped` of it."""

    @abstractmethod
    def _rollback(self, frame: bytes) -> None: ...

    def _check_ready(self, x: Tensor) -> None:
        check_dense(x)
        if x.shape != (self.numel,):
            raise ConfigError(f"the memory has {self.numel} elements, the update the shape {list(x.shape)}; give one of this model")
        check_kind(x)
        if self.pending is not None:
            raise ConfigError("a proposal is waiting; commit() or rollback() it before the next one")

    def _settle(self) -> bytes:
        if self.pending is None:
            raise ConfigError("no proposal is waiting; propose() comes before commit() or rollback()")
        frame, self.pending = self.pending, None
        return frame
