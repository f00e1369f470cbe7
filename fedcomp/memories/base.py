"""The base class of memories, which keep around a codec what was not sent from round to round.

`propose(x)` returns a frame; then exactly one of `commit()` (the other side accepted it) or `rollback()` (it did not) settles the proposal.
State is plain tensors and bytes, so that it can be written to disk and moved between devices.

The author of a memory writes `_propose`, `_commit` and `_rollback` once, for a stack: m memories of one class and codec. One memory is a
stack with m = 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..codecs import Codec, Context, Update, at_density
from ..codecs.base import NO_CONTEXT, or_raise
from ..codecs.checks import check_vector
from ..errors import ConfigError, NonFiniteError
from ..kernels import Rows
from ..layout import Layout

State = dict[str, Tensor | bytes]
# For a checkpoint, by name: vectors [numel]; values, None = forget it.
Changes = tuple[dict[str, Tensor], dict[str, bytes | None]]
# From a checkpoint, by name; None = there is none.
ReadVector = Callable[[str], Tensor | None]
ReadValue = Callable[[str], bytes | None]


@dataclass(frozen=True)
class NoOptions:
    """A memory without options."""


class Memory(ABC):
    """A codec with a memory, for vectors [numel]."""

    name: ClassVar[str]
    source: ClassVar[str] = "–"
    Options: ClassVar[type] = NoOptions  # a frozen dataclass: what `name:option=value` may say
    counterpart: ClassVar["type[Counterpart] | None"] = None  # the server's side, if it has a state
    required_strategy: ClassVar[str] = (
        ""  # the one strategy that asks for its frames; "" = any strategy
    )
    selects_coordinates: ClassVar[bool] = (
        False  # which coordinates are sent, whatever the codec's density
    )
    default_uplink: ClassVar[str] = ""  # where --uplink is left out; "" = the general default
    needs_moments: ClassVar[bool] = False  # local SGD fills context.moments
    residual: Tensor | None = None  # sum of what was not sent, if the memory keeps it; None = zero
    gain: float = 1.0  # longest residual of updates of total length 1, with a codec that contracts

    def __init__(self, codec: Codec, numel: int, layout: Layout | None = None, options: Any = None):
        if layout is not None and layout.numel != numel:
            raise ConfigError(
                f"the layout has {layout.numel} elements and the memory {numel}; give the layout of this model"
            )
        self.codec = self._configured_codec = codec
        self.numel, self.layout, self.options = numel, layout, options or self.Options()
        self.pending: bytes | None = None  # the frame of a proposal that is not settled
        self._check_codec()

    def set_density(self, density: float) -> None:
        """Send this share of the coordinates from now on; 0 = that of the codec that was given.

        Raises ConfigError where it has none, and where the memory would diverge with it.
        """
        if density or self.codec is not self._configured_codec:
            self.codec = (
                at_density(self._configured_codec, density) if density else self._configured_codec
            )
            self._check_codec()

    @property
    def warning(self) -> str:
        """A warning for the start of a run whose codec does not suit this memory, else ""."""
        return ""

    def propose(self, x: Tensor, *, seed: int = 0, context: Context = NO_CONTEXT) -> bytes | None:
        """Return a frame for the update x [numel], or None when there is nothing to send. x is not modified.

        Raises NonFiniteError with the memory unchanged, and ConfigError while a proposal is not settled.
        """
        (proposal,) = self.propose_stack([self], [x], [seed], context.stacked())
        return or_raise(proposal)

    @classmethod
    def propose_stack(
        cls,
        memories: Sequence["Memory"],
        x: Rows,
        seeds: Sequence[int],
        context: Context = NO_CONTEXT,
    ) -> list[bytes | None | NonFiniteError]:
        """`propose` for m memories of one class and codec: x is a tensor [m, numel] or m vectors, `context.moments` are [m, numel].

        A NonFiniteError stands in the place of an update that cannot be sent; that memory is unchanged.
        """
        if not memories:
            return []
        for memory, row in zip(memories, x, strict=True):
            memory._check_ready(row)
        for row in x[:1] if isinstance(x, Tensor) else x:
            check_vector(row)
        rows = x.detach() if isinstance(x, Tensor) else [row.detach() for row in x]
        proposals = cls._propose(memories, rows, seeds, context)
        for memory, proposal in zip(memories, proposals, strict=True):
            memory.pending = None if isinstance(proposal, NonFiniteError) else proposal
        return proposals

    def proceed(self, *, seed: int = 0, context: Context = NO_CONTEXT) -> bytes | None:
        """Return the next frame of the pending proposal, in a phase after the one that it was made in. On error the previous frame stays
        pending.

        Raises ConfigError where no proposal is pending, and for a memory whose proposals have one frame.
        """
        if self.pending is None:
            raise ConfigError("no proposal is waiting; propose() comes before proceed()")
        self.pending = self._proceed(seed, context)
        return self.pending

    def commit(self, *, returned: bytes | None = None) -> Update | None:
        """Settle the proposal as accepted. `returned` is a frame of what the other side dropped of it; return its update.

        Raises FrameError, with the proposal still pending, when `returned` is damaged.
        """
        if returned is not None and self.counterpart is not None:
            raise ConfigError(
                f"memory '{self.name}' has a counterpart, which takes frames as a whole; use --memory residual"
            )
        dropped = None if returned is None else self._open_returned(returned)
        self._commit([self], [self._settle()], [dropped])
        return dropped

    @classmethod
    def commit_stack(cls, memories: Sequence["Memory"]) -> None:
        """`commit` for m ≥ 1 memories of one class and codec. Reads their frames together, which is faster."""
        cls._commit(memories, [memory._settle() for memory in memories], [None] * len(memories))

    def rollback(self) -> None:
        """Settle the proposal as not accepted: everything in it is still to be sent."""
        self._settle()
        self._rollback()

    def reset(self) -> None:
        """Forget the pending proposal and all that is kept."""
        self.load_state_dict({})

    @property
    def sent_positions(self) -> np.ndarray | None:
        """Positions that the pending frame touches, int64, ascending; None for all of them."""
        if self.pending is None:
            return np.empty(0, np.int64)
        return self.codec.open(self.pending, self.numel, self.layout).positions

    def state_dict(self, *, copy: bool = True) -> State:
        """Return the whole state, as float32 vectors [numel] and bytes.

        With `copy=False` the vectors are the memory's own: read them before the memory is used again, and do not modify them.
        """
        state = self._state()
        return _copied(state) if copy else state

    def load_state_dict(self, state: Mapping[str, Tensor | bytes], *, copy: bool = True) -> None:
        """Restore a state that `state_dict` returned. Raises ConfigError for vectors of another size or type.

        With `copy=False` the memory keeps and modifies the given vectors; nothing else may use them.
        """
        for name, value in state.items():
            if isinstance(value, Tensor) and (
                value.dtype != torch.float32 or value.shape != (self.numel,)
            ):
                given = f"{value.dtype} of shape {list(value.shape)}"
                raise ConfigError(
                    f"'{name}' of the state is {given}; this memory needs float32 of {self.numel} elements"
                )
        self._load_state(_copied(state) if copy else dict(state))

    def _state(self) -> State:
        """Return the state without copying it. Subclasses add theirs to that of `super()`."""
        return {"pending": self.pending} if self.pending is not None else {}

    def _load_state(self, state: State) -> None:
        """Restore a state that `_state` returned, with checked vectors. Subclasses read theirs after calling `super()`."""
        self.pending = state.get("pending")

    # Written by authors.

    def _check_codec(self) -> None:
        """Raise ConfigError when this memory would diverge with its codec, naming a codec with which it would not."""

    @classmethod
    @abstractmethod
    def _propose(
        cls, memories: Sequence["Memory"], x: Rows, seeds: Sequence[int], context: Context
    ) -> list[bytes | None | NonFiniteError]:
        """Return what `propose_stack` does, for m ≥ 1 memories; x is not modified. What is written must hold if no frame is accepted."""

    def _proceed(self, seed: int, context: Context) -> bytes | None:
        raise ConfigError(
            f"memory '{self.name}' has no frame for a phase '{context.phase}'; use the memory that the strategy asks for"
        )

    def _on_accepted(self, update: Update, dropped: Update | None) -> None:
        """The update in the frame was accepted, but for what was `dropped` of it."""

    @classmethod
    def _commit(
        cls,
        memories: Sequence["Memory"],
        frames: Sequence[bytes],
        dropped: Sequence[Update | None],
    ) -> None:
        """Settle m ≥ 1 accepted frames. Overridden by memories that do not read their frames, or read them otherwise."""
        for memory, update, back in zip(
            memories, cls._open(memories, frames), dropped, strict=True
        ):
            memory._on_accepted(update, back)

    def _rollback(self) -> None:
        """The frame was not accepted."""

    def _open_returned(self, returned: bytes) -> Update:
        """Return the update in a frame that comes back of the pending proposal. Raise FrameError."""
        return self.codec.open(returned, self.numel, self.layout)

    # For authors.

    @staticmethod
    def _encode(
        memories: Sequence["Memory"],
        x: Rows,
        seeds: Sequence[int],
        context: Context,
        onto: Sequence[Tensor] | None = None,
    ) -> list[bytes | NonFiniteError]:
        """Return `Codec.encode_batch` of the memories' codec."""
        return memories[0].codec.encode_batch(
            x, seeds, onto=onto, layout=memories[0].layout, context=context
        )

    @staticmethod
    def _open(memories: Sequence["Memory"], frames: Sequence[bytes]) -> list[Update]:
        """Return the updates in frames of the memories' codec."""
        first = memories[0]
        return list(map(or_raise, first.codec.open_batch(frames, first.numel, first.layout)))

    def _check_ready(self, x: Tensor) -> None:
        if isinstance(x, Tensor) and x.shape != (self.numel,):
            raise ConfigError(
                f"the memory has {self.numel} elements, the update the shape {list(x.shape)}; give one of this model"
            )
        if self.pending is not None:
            raise ConfigError(
                "a proposal is waiting; commit() or rollback() it before the next one"
            )

    def _settle(self) -> bytes:
        if self.pending is None:
            raise ConfigError(
                "no proposal is waiting; propose() comes before commit() or rollback()"
            )
        frame, self.pending = self.pending, None
        return frame


class Counterpart(ABC):
    """The server's side of a memory: an estimate of each client's update. Made from a memory like those of the clients.

    Both sides agree because the counterpart settles exactly what the clients commit, by the same operations. When a client starts from
    nothing (`fresh`), so does its part here.
    """

    rate: float = 1.0  # of the round that is being closed, as a multiple of the run's learning rate
    rates: Mapping[int, float] = {}  # by client: the rate of the round in which its update was made
    compares_model_steps: ClassVar[bool] = False  # compares steps of the model with updates

    @abstractmethod
    def __init__(self, memory: Memory): ...

    def announce(self) -> Mapping[str, bytes]:
        """Return what clients have to know for their proposals, by name. Its bytes are counted."""
        return {}

    def set_rates(self, rate: float, rates: Mapping[int, float]) -> None:
        """Set the learning rates of a round before it is closed: its own, and by client the one that its update was made with."""
        self.rate, self.rates = rate, rates

    @abstractmethod
    def estimate(self, client: int, update: Update | None, fresh: bool) -> Update | None:
        """Return the estimate of a client's update, given the one that it sent, if any. Changes nothing; valid until `settle`."""

    def absent(self, present: Collection[int]) -> Iterable[tuple[int, Update]]:
        """Yield (client, estimate), ascending, for clients that count although none of their updates was accepted in this round."""
        return ()

    def correction(
        self, weights: Mapping[int, float], present: Mapping[int, float]
    ) -> Update | None:
        """Return the update to add to the mean of the cohort's estimates, or None.

        `weights`: by client, its share of a mean over all clients of the run; `present`: by client of the cohort, its share of the
        cohort's mean. Both leave out clients that start from nothing.
        """
        return None

    @abstractmethod
    def settle(self, taken: Sequence[tuple[int, Update | None, bool]], moved: float) -> None:
        """End a round: keep the accepted (client, update, fresh). `moved`: ‖step of the model‖², in units of the clients' updates."""

    @abstractmethod
    def take_changes(self) -> Changes:
        """Return what changed since the last call."""

    @abstractmethod
    def restore(self, vector: ReadVector, value: ReadValue) -> None:
        """Continue from a checkpoint, whose vectors and values are read by these. Raises ValueError or TypeError for others."""


def _copied(state: Mapping[str, Tensor | bytes]) -> State:
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()
    }


def mask(vectors: Iterable[Tensor], sent: np.ndarray | None, dropped: Update | None) -> None:
    """Zero vectors [numel], in place, at the positions `sent` (None = everywhere) less those that were dropped.

    This is the momentum factor masking of Lin et al. 2018: the momentum of a coordinate that arrived is stale.
    """
    if dropped is not None:
        everywhere, back = np.arange(dropped.numel) if sent is None else sent, dropped.positions
        if back is None:
            back = np.flatnonzero(dropped.block(0, dropped.numel))
        sent = np.setdiff1d(everywhere, back, assume_unique=True)
    for vector in vectors:
        if sent is None:
            vector.zero_()
        else:
            vector[torch.from_numpy(sent).to(vector.device)] = 0


def add_saturating(vector: Tensor, update: Update, weight: float = 1.0) -> None:
    """vector += weight·update, in place. Sums beyond float32's range become its ends, so that the memory stays usable."""
    with np.errstate(over="ignore"):
        update.add_to(vector, weight)
    at = update.positions
    if vector.is_cpu:  # numpy is faster for few positions
        fine = kernels.all_finite(vector.numpy() if at is None else vector.numpy()[at])
    else:
        touched = vector if at is None else vector[torch.from_numpy(at).to(vector.device)]
        (fine,) = kernels.are_finite([touched])
    if not fine:
        vector.nan_to_num_()
