"""What a client keeps between rounds, around a codec.

A memory makes a proposal and waits for the news of it. `propose(x)` returns a frame; then exactly one of `commit()`
(the other side took it) or `rollback()` (it did not) settles it. State is plain tensors and bytes, so that it can be
written to disk and moved between devices.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..codecs import Codec, Context, Update
from ..codecs.base import NO_CONTEXT, check_dense, check_kind
from ..codecs.update import Sparse
from ..errors import ConfigError, NonFiniteError
from ..layout import Layout

FEW = 300  # positions of an update that numpy adds as soon as compiled loops do

State = dict[str, Tensor | bytes]
Changes = tuple[
    dict[str, Tensor], dict[str, bytes | None]
]  # for a checkpoint, by name: vectors [numel]; values, None = forget it


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
    counterpart: ClassVar["type[Counterpart] | None"] = (
        None  # the server's side, where both sides keep something
    )
    only_under: ClassVar[str] = (
        ""  # the strategy that alone asks for its frames, where they are of several phases; "" = any
    )
    chooses: ClassVar[bool] = False  # which coordinates are sent, whatever the codec's density
    default_uplink: ClassVar[str] = (
        ""  # codec of a run with this memory where --uplink is left out; "" = the general default
    )
    needs_moments: ClassVar[bool] = False  # local SGD fills context.moments
    residual: Tensor | None = (
        None  # what is kept of the updates because it was not sent, by a memory that keeps that; None = zero
    )
    gain: float = 1.0  # how long the residual may become of updates that are 1 long in all, with a codec that contracts

    def __init__(self, codec: Codec, numel: int, layout: Layout | None = None, options: Any = None):
        if layout is not None and layout.numel != numel:
            raise ConfigError(
                f"the layout has {layout.numel} elements and the memory {numel}; give the layout of this model"
            )
        self.codec = self._made_with = codec
        self.numel, self.layout, self.options = numel, layout, options or self.Options()
        self.pending: bytes | None = None  # the frame of a proposal that is not settled
        self.check_codec()

    def use_density(self, density: float) -> None:
        """Send this share of the coordinates from now on; 0 = that of the codec that was given.

        Raises ConfigError where it has none, and where the memory would diverge with it.
        """
        if density or self.codec is not self._made_with:
            self.codec = self._made_with.at_density(density) if density else self._made_with
            self.check_codec()

    def check_codec(self) -> None:
        """Raise ConfigError when this memory would diverge with its codec, naming a codec with which it would not."""

    def warning(self) -> str:
        """Return a warning for the start of a run whose codec does not suit this memory, else ""."""
        return ""

    def propose(self, x: Tensor, *, seed: int = 0, context: Context = NO_CONTEXT) -> bytes | None:
        """A frame for the update x [numel], or None when there is nothing to send. x is not touched.

        Raises NonFiniteError with the memory unchanged, and ConfigError while a proposal is not settled.
        """
        self._check_ready(x)
        self.pending = self._propose(x, seed, context)
        return self.pending

    @classmethod
    def propose_stack(
        cls,
        memories: Sequence["Memory"],
        x: Tensor,
        seeds: Sequence[int],
        context: Context = NO_CONTEXT,
    ) -> list[bytes | None | NonFiniteError]:
        """`propose` for many memories of one class and codec, each with its row of x [m, n]; x may be overwritten.

        A NonFiniteError in the place of a row that cannot be sent, with that memory unchanged.
        """
        proposals: list[bytes | None | NonFiniteError] = []
        for i, (memory, row, seed) in enumerate(zip(memories, x, seeds, strict=True)):
            try:
                proposals.append(memory.propose(row, seed=seed, context=of_row(context, i)))
            except NonFiniteError as error:
                proposals.append(error)
        return proposals

    def proceed(self, *, seed: int = 0, context: Context = NO_CONTEXT) -> bytes | None:
        """The next frame of the waiting proposal, in a phase after the one that it was made in. Where it raises, the one before waits on.

        Raises ConfigError where nothing waits, and for a memory whose proposals have one frame.
        """
        if self.pending is None:
            raise ConfigError("no proposal is waiting; propose() comes before proceed()")
        self.pending = self._proceed(seed, context)
        return self.pending

    def commit(self, *, returned: bytes | None = None) -> None:
        """The proposal was taken. `returned`: a frame of what the other side dropped of it, which comes back.

        Raises FrameError, with the proposal still waiting, when `returned` is damaged.
        """
        if returned is not None and self.counterpart is not None:
            raise ConfigError(
                f"memory '{self.name}' has a counterpart, which takes frames as a whole; use --memory residual"
            )
        dropped = None if returned is None else self.open_returned(returned)
        self._commit(self._settle(), dropped)

    @classmethod
    def commit_stack(cls, memories: Sequence["Memory"]) -> None:
        """`commit` for many memories of one class and codec; override where one pass can read all their frames."""
        for memory in memories:
            memory.commit()

    def open_returned(self, returned: bytes) -> Update:
        """What a frame says that comes back of the waiting proposal. Raises FrameError."""
        return self.codec.open(returned, self.numel, self.layout)

    def rollback(self) -> None:
        """The proposal was not taken: everything in it is still to be sent."""
        self._rollback(self._settle())

    def reset(self) -> None:
        """Start from nothing: what waits and all that is kept is forgotten."""
        self.load_state_dict({})

    @property
    def sent(self) -> np.ndarray | None:
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

    @abstractmethod
    def _propose(self, x: Tensor, seed: int, context: Context) -> bytes | None: ...

    def _proceed(self, seed: int, context: Context) -> bytes | None:
        raise ConfigError(
            f"memory '{self.name}' has no frame for a phase '{context.phase}'; use the memory that the strategy asks for"
        )

    @abstractmethod
    def _commit(self, frame: bytes, dropped: Update | None) -> None:
        """`frame` was taken, but for what was `dropped` of it."""

    @abstractmethod
    def _rollback(self, frame: bytes) -> None: ...

    def _check_ready(self, x: Tensor) -> None:
        check_dense(x)
        if x.shape != (self.numel,):
            raise ConfigError(
                f"the memory has {self.numel} elements, the update the shape {list(x.shape)}; give one of this model"
            )
        check_kind(x)
        if self.pending is not None:
            raise ConfigError(
                "a proposal is waiting; commit() or rollback() it before the next one"
            )

    @staticmethod
    def _check_all_ready(memories: Sequence["Memory"], x: Tensor) -> None:
        """`_check_ready` of each of a stack, m ≥ 1, with its row of x [m, n], which are all of one kind."""
        memories[0]._check_ready(x[0])
        for memory, row in zip(memories, x.unbind(), strict=True):
            if memory.pending is not None or memory.numel != memories[0].numel:
                memory._check_ready(row)

    def _settle(self) -> bytes:
        if self.pending is None:
            raise ConfigError(
                "no proposal is waiting; propose() comes before commit() or rollback()"
            )
        frame, self.pending = self.pending, None
        return frame


class Counterpart(ABC):
    """The server's side of a memory: what each client's update is taken to be. Made from a memory like those of the clients.

    It holds what the clients hold only if it settles what they commit, by the same operations, and nothing else; when a client starts
    from nothing (`fresh`), so does its part here.
    """

    rate: float = (
        1.0  # the round's learning rate as a multiple of the run's, set before a round is closed
    )
    rates: Mapping[int, float] = {}  # by client: the rate of the round in which its update was made
    measures_steps: ClassVar[bool] = (
        False  # compares the steps of the model with the clients' updates
    )

    @abstractmethod
    def __init__(self, memory: Memory): ...

    def announce(self) -> Mapping[str, bytes]:
        """What clients have to know for their proposals. Its bytes are counted."""
        return {}

    @abstractmethod
    def estimate(self, client: int, update: Update | None, fresh: bool) -> Update | None:
        """What the update of a client is taken to be that sent `update`, or nothing. Changes nothing; good until `settle`."""

    def absent(self, present: Collection[int]) -> Iterable[tuple[int, Update]]:
        """Clients that count although none of their updates was accepted in this round, ascending, with what is taken for it."""
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
        """A round is over: keep what was taken (client, update, fresh). `moved`: ‖step of the model‖², in units of the clients' updates."""

    @abstractmethod
    def take_changes(self) -> Changes:
        """What changed since the last call."""

    @abstractmethod
    def restore(
        self, vector: Callable[[str], Tensor | None], value: Callable[[str], bytes | None]
    ) -> None:
        """Stand where a checkpoint stood, whose vectors and values are read by these. Raises ValueError or TypeError for others."""


def _copied(state: Mapping[str, Tensor | bytes]) -> State:
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()
    }


def of_row(context: Context, row: int) -> Context:
    """The context of one row of a stack."""
    return (
        context
        if context.moments is None
        else replace(context, moments=(context.moments[0][row], context.moments[1][row]))
    )


def mask(vectors: Iterable[Tensor], sent: np.ndarray | None, dropped: Update | None) -> None:
    """Zero vectors [numel], in place, at the positions `sent` (None = everywhere), but where something of it was dropped.

    What Lin et al. 2018 call momentum factor masking: what stood behind a coordinate that arrived is stale.
    """
    if dropped is not None:
        everywhere = np.arange(dropped.numel) if sent is None else sent
        back = (
            np.flatnonzero(dropped.block(0, dropped.numel))
            if dropped.positions is None
            else dropped.positions
        )
        sent = np.setdiff1d(everywhere, back, assume_unique=True)
    for vector in vectors:
        if sent is None:
            vector.zero_()
        else:
            vector[torch.from_numpy(sent).to(vector.device)] = 0


def add_within(kept: Tensor, update: Update, weight: float = 1.0) -> None:
    """kept += weight·update, in place, both finite; what leaves float32's range becomes its end, so that a memory stays usable."""
    add_all_within([kept], [update], weight)


def add_all_within(kept: Sequence[Tensor], updates: Sequence[Update], weight: float = 1.0) -> None:
    """`add_within` for many vectors; their device, if it is one, is waited for once."""
    if len(kept) > 1 and _is_sparse(kept, updates):
        return _add_sparse(kept, updates, weight)
    touched: list[
        tuple[Tensor, Tensor]
    ] = []  # vectors, and the lowest and highest of what was added to
    for vector, update in zip(kept, updates, strict=True):
        with np.errstate(over="ignore"):
            update.add_to(vector, weight)
        at = update.positions
        if (
            at is not None and vector.device.type == "cpu"
        ):  # nothing to wait for, and numpy is quicker with a few
            if not np.isfinite(vector.numpy()[at]).all():
                vector.nan_to_num_()
        elif vector.numel() if at is None else at.size:
            values = vector if at is None else vector[torch.from_numpy(at).to(vector.device)]
            touched.append((vector, torch.stack(values.aminmax()).to(kept[0].device)))
    if touched:
        for (vector, _), edges in zip(
            touched, torch.stack([edges for _, edges in touched]).tolist(), strict=True
        ):
            if not all(map(math.isfinite, edges)):
                vector.nan_to_num_()


def _is_sparse(kept: Sequence[Tensor], updates: Sequence[Update]) -> bool:
    """Whether all updates are of so few positions, or their vectors so far away, that they are added together."""
    if not all(isinstance(update, Sparse) for update in updates):
        return False
    here = [vector.is_cpu for vector in kept]
    return not any(here) or (all(here) and all(update.positions.size < FEW for update in updates))


def _add_sparse(kept: Sequence[Tensor], updates: Sequence[Sparse], weight: float) -> None:
    """`add_all_within`, with one copy to each of the devices."""
    for device in {vector.device for vector in kept}:
        mine = [
            (vector, update)
            for vector, update in zip(kept, updates, strict=True)
            if vector.device == device
        ]
        vectors = [vector for vector, _ in mine]
        with np.errstate(over="ignore"):
            sums = kernels.add_at_each(
                vectors, [u.positions for _, u in mine], [u.sent for _, u in mine], weight
            )
        if not sums.isfinite().all():
            for vector in vectors:
                vector.nan_to_num_()
