"""The base class of memories. A memory compensates for the errors of a client's lossy codec.

`propose(x)` returns a frame that encodes the update x and, in most memories, the unsent part of earlier updates. This proposal is pending
until the caller calls `commit()`, if the receiver accepted the frame, or `rollback()`, if it did not. The state of a memory consists of
tensors and bytes, so that it can be written to disk and moved between CPU and GPU.

Subclasses of `Memory` implement `_propose` for m memories with the same class and codec, because encoding m updates together is faster.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .. import kernels, spec
from ..codecs import Codec, Context, Update, at_density
from ..codecs.base import NO_CONTEXT, check_vector, nonfinite_errors, or_raise
from ..codecs.selection import Selective
from ..errors import ConfigError, MismatchError, NonFiniteError
from ..kernels import Rows
from ..layout import Layout

State = dict[str, Tensor | bytes]
Vectors = Mapping[str, Tensor]  # state vectors [numel] by name
Updated = tuple[Vectors, Tensor]  # the state vectors after an update, and the vector to encode
# Entries to write to a checkpoint: a dict from name to vector [numel], and a dict from name to bytes, or to None to delete the entry.
Changes = tuple[dict[str, Tensor], dict[str, bytes | None]]
# Functions that return the checkpoint entry with a given name, or None if no entry has this name.
ReadVector = Callable[[str], Tensor | None]
ReadValue = Callable[[str], bytes | None]


@dataclass(frozen=True)
class NoOptions:
    """The options class of a memory or strategy without options."""


@dataclass(frozen=True)
class MomentumOptions:
    # Factor by which the momentum is multiplied in each round. A larger factor gives old updates more weight.
    momentum: float = 0.9

    def __post_init__(self) -> None:
        spec.check_decays(self, "momentum")


class Memory(ABC):
    """The codec of one client, together with the error-feedback state that the client keeps between rounds. Updates are vectors [numel]."""

    name: ClassVar[str]
    source: ClassVar[str] = "–"
    Options: ClassVar[type] = NoOptions  # frozen dataclass of the memory's options
    counterpart: ClassVar["type[Counterpart] | None"] = None  # class of the server part, if any
    required_strategy: ClassVar[str] = (
        ""  # the only strategy that works with this memory ("" = any strategy)
    )
    # Whether the memory selects the coordinates to send, and sets all other coordinates to 0. If so, the density of the codec is set to 1,
    # so that the codec sends all selected coordinates.
    selects_coordinates: ClassVar[bool] = False
    default_uplink: ClassVar[str] = ""  # default of --uplink ("" = no default)
    needs_moments: ClassVar[bool] = False  # whether local SGD must record `Context.moments`
    residual: Tensor | None = None  # unsent part of all updates [numel]; None = zero

    def __init__(self, codec: Codec, numel: int, layout: Layout | None = None, options: Any = None):
        if layout is not None and layout.numel != numel:
            raise ConfigError(
                f"the layout has {layout.numel} elements, but numel is {numel}; give the layout and numel of one model"
            )
        if self.selects_coordinates:
            if not isinstance(codec.unscoped, Selective) or codec.unscoped.draws:
                raise MismatchError(
                    f"{{memory}} {self.name} itself selects the coordinates to send, but {codec} cannot send a given set of coordinates; "
                    "use {uplink} topk or stc"
                )
            codec = at_density(codec, 1.0)
        self.codec = self._configured_codec = codec
        self.numel, self.layout, self.options = numel, layout, options or self.Options()
        self.pending: bytes | None = None  # frame that is neither committed nor rolled back
        self._check_codec()

    def set_density(self, density: float) -> None:
        """Set the density of the codec: the fraction of the coordinates that it sends.

        The density 0 restores the original density of the memory's codec. Raises ConfigError if the codec has no option `density`, or if
        error feedback would diverge with the new density.
        """
        if density or self.codec is not self._configured_codec:
            configured = self._configured_codec
            self.codec = at_density(configured, density) if density else configured
            self._check_codec()

    @property
    def warning(self) -> str:
        """A warning to show at the start of a run if the codec does not suit this memory; "" = no warning."""
        return ""

    def propose(self, x: Tensor, *, seed: int = 0, context: Context = NO_CONTEXT) -> bytes | None:
        """Encode the update x [numel] as a frame, without modifying x. Return None if there is nothing to send.

        Raises ConfigError if the previous proposal is still pending. Raises NonFiniteError, and leaves the memory unchanged, if the update
        or the new state contains NaN or infinity.
        """
        (proposal,) = self.propose_batch([self], [x], [seed], context.at(None))
        return or_raise(proposal)

    @classmethod
    def propose_batch(
        cls,
        memories: Sequence["Memory"],
        x: Rows,
        seeds: Sequence[int],
        context: Context = NO_CONTEXT,
    ) -> list[bytes | None | NonFiniteError]:
        """Encode the updates of m memories with the same class and codec.

        `x`: a tensor [m, numel] or m vectors [numel]. `context.moments`: sums of gradients and squared gradients [m, numel], or None. The
        returned list contains a NonFiniteError instead of a frame where `propose` would raise it.
        """
        if not memories:
            return []
        for memory, row in zip(memories, x, strict=True):
            if isinstance(row, Tensor) and row.shape != (memory.numel,):
                raise ConfigError(
                    f"the update has the shape {list(row.shape)}, but the memory needs vectors of {memory.numel} elements; "
                    "give an update of the same model"
                )
            if memory.pending is not None:
                raise ConfigError(
                    "a proposal is pending; call commit() or rollback() before the next propose()"
                )
        for row in x[:1] if isinstance(x, Tensor) else x:
            check_vector(row)
        rows = x.detach() if isinstance(x, Tensor) else [row.detach() for row in x]
        proposals = cls._propose(memories, rows, seeds, context)
        for memory, proposal in zip(memories, proposals, strict=True):
            failed = proposal is None or isinstance(proposal, NonFiniteError)
            memory.pending = None if failed else memory._pending_part(proposal)
        return proposals

    def proceed(self, *, seed: int = 0, context: Context = NO_CONTEXT) -> bytes | None:
        """Return the next frame of the pending proposal. Only memories that send several frames for an update have a next frame.

        Raises ConfigError, and leaves the memory unchanged, if no proposal is pending, or if the proposal has no frame for `context.phase`.
        """
        if self.pending is None:
            raise ConfigError("no proposal is pending; call propose() before proceed()")
        self.pending = self._proceed(seed, context)
        return self.pending

    def commit(self, *, returned: bytes | None = None) -> Update | None:
        """Record that the receiver accepted the pending frame. Return the decoded frame `returned`, or None if it is not given.

        `returned`: a frame from the receiver that contains the part of the update that the receiver did not use. Memories with a residual
        keep this part. If the frame is damaged, raises FrameError and leaves the proposal pending.
        """
        if returned is not None and self.counterpart is not None:
            raise ConfigError(
                f"memory '{self.name}' needs a server that uses whole frames, but the server used only a part of this frame; "
                "use --memory residual"
            )
        dropped = None if returned is None else self._open_returned(returned)
        self._commit([self], [self._take_pending()], [dropped])
        return dropped

    @classmethod
    def commit_batch(cls, memories: Sequence["Memory"]) -> None:
        """Commit the pending frames of one or more memories with the same class and codec, which is faster than one at a time."""
        cls._commit(
            memories, [memory._take_pending() for memory in memories], [None] * len(memories)
        )

    def rollback(self) -> None:
        """Record that the receiver did not accept the pending frame. A memory with a residual sends the update again later."""
        self._take_pending()
        self._rollback()

    def reset(self) -> None:
        """Delete the pending proposal and all state."""
        self.load_state_dict({})

    @property
    def sent_positions(self) -> np.ndarray | None:
        """Indices of the coordinates that the pending frame sends, int64, ascending, or None if it sends all coordinates."""
        if self.pending is None:
            return np.empty(0, np.int64)
        return self.codec.open(self.pending, self.numel, self.layout).positions

    def state_dict(self, *, copy: bool = True) -> State:
        """Return the whole state as a dict of float32 vectors [numel] and bytes.

        With `copy=False`, the vectors share storage with the memory: do not modify them, and read them before you use the memory again.
        """
        state = self._state()
        return _copied(state) if copy else state

    def load_state_dict(self, state: Mapping[str, Tensor | bytes], *, copy: bool = True) -> None:
        """Restore a state that `state_dict` returned. Raises ConfigError if a vector in the state is not float32 [numel].

        With `copy=False` the memory takes ownership of the given vectors and modifies them.
        """
        for name, value in state.items():
            if isinstance(value, Tensor) and (
                value.dtype != torch.float32 or value.shape != (self.numel,)
            ):
                raise ConfigError(
                    f"the state vector '{name}' is {value.dtype} of shape {list(value.shape)}; this memory needs torch.float32 of "
                    f"shape [{self.numel}]"
                )
        self._load_state(_copied(state) if copy else dict(state))

    def _state(self) -> State:
        """Return the state without copying it. Subclasses add entries to the dict that `super()._state()` returns."""
        return {"pending": self.pending} if self.pending is not None else {}

    def _load_state(self, state: State) -> None:
        """Restore a state that `_state` returned. Its vectors are already checked. Subclasses first call `super()._load_state(state)`."""
        self.pending = state.get("pending")

    # Methods for subclasses to implement.

    def _check_codec(self) -> None:
        """Raise ConfigError if this memory would diverge with its codec. The error message suggests another codec."""

    @classmethod
    @abstractmethod
    def _propose(
        cls, memories: Sequence["Memory"], x: Rows, seeds: Sequence[int], context: Context
    ) -> list[bytes | None | NonFiniteError]:
        """Implement `propose_batch` without modifying x. Leave the memory in the state that is right if the frame is not accepted."""

    def _pending_part(self, frame: bytes) -> bytes:
        """Return the bytes to store in `pending` for a proposed frame; by default, the whole frame."""
        return frame

    def _proceed(self, seed: int, context: Context) -> bytes | None:
        raise ConfigError(
            f"memory '{self.name}' cannot make a frame for the phase '{context.phase}'; use the --memory that the strategy requires"
        )

    def _on_accepted(self, update: Update, dropped: Update | None) -> None:
        """Change the state after a frame was accepted. `update`: the decoded frame; `dropped`: the part that the receiver did not use."""

    @classmethod
    def _commit(
        cls, memories: Sequence["Memory"], frames: Sequence[bytes], dropped: Sequence[Update | None]
    ) -> None:
        """Decode accepted frames and call `_on_accepted` for each. Memories whose frames the codec cannot decode override this method."""
        updates = cls._open(memories, frames)
        for memory, update, dropped_part in zip(memories, updates, dropped, strict=True):
            memory._on_accepted(update, dropped_part)

    def _rollback(self) -> None:
        """Change the state after the receiver did not accept the pending frame."""

    def _open_returned(self, returned: bytes) -> Update:
        """Decode the frame `returned`: the part of the pending update that the receiver did not use. Raises FrameError."""
        return self.codec.open(returned, self.numel, self.layout)

    # Helpers for subclasses.

    @staticmethod
    def _encode(
        memories: Sequence["Memory"],
        x: Rows,
        seeds: Sequence[int],
        context: Context,
        onto: Sequence[Tensor] | None = None,
    ) -> list[bytes | NonFiniteError]:
        encode, layout = memories[0].codec.encode_batch, memories[0].layout
        return encode(x, seeds, onto=onto, layout=layout, context=context)

    @staticmethod
    def _open(memories: Sequence["Memory"], frames: Sequence[bytes]) -> list[Update]:
        first = memories[0]
        return list(map(or_raise, first.codec.open_batch(frames, first.numel, first.layout)))

    def _take_pending(self) -> bytes:
        if self.pending is None:
            raise ConfigError(
                "no proposal is pending; call propose() before commit() or rollback()"
            )
        frame, self.pending = self.pending, None
        return frame


class VectorMemory(Memory):
    """A memory whose state consists of float32 vectors [numel], on the device (CPU or GPU) of the last update. Zeros can be stored as None.

    Subclasses list the names of the vectors in `vectors`, and implement `_update_vectors`, which computes new vectors. By default, the
    decoded vector of an accepted frame is subtracted from `residual`. Subclasses in which an accepted frame changes other vectors override
    `_on_accepted`.
    """

    vectors: ClassVar[tuple[str, ...]] = ("residual",)  # attributes with state vectors

    def _update_vectors(self, vectors: Vectors, x: Tensor, context: Context) -> Updated:
        """Return the state vectors that apply after the update x if its frame is not accepted, and the vector to encode.

        Do not modify the arguments. `context.moments`: sums of gradients and squared gradients, or None.
        """
        raise NotImplementedError("implement _update_vectors or _propose")

    def _on_accepted(self, update: Update, dropped: Update | None) -> None:
        add_saturating(self.residual, update, -1.0)
        if dropped is not None:
            add_saturating(self.residual, dropped)

    @classmethod
    def _propose(
        cls, memories: Sequence["VectorMemory"], x: Rows, seeds: Sequence[int], context: Context
    ) -> list[bytes | NonFiniteError]:
        rows, layout = [row.to(torch.float32) for row in x], memories[0].layout
        results = [
            memory._update_vectors(memory._vectors_on(rows[0]), row, context.at(i))
            for i, (memory, row) in enumerate(zip(memories, rows, strict=True))
        ]
        updated, send = zip(*results, strict=True)
        proposals = cls._encode(memories, send, seeds, context)
        what = "the sum of residual and update"
        checks = [nonfinite_errors([new[n] for new in updated], layout, what) for n in cls.vectors]
        checks.append(nonfinite_errors(rows, layout, "the update"))
        for errors in checks:
            proposals = [error or frame for error, frame in zip(errors, proposals, strict=True)]
        for memory, new, proposal in zip(memories, updated, proposals, strict=True):
            if not isinstance(proposal, NonFiniteError):
                for name in cls.vectors:
                    setattr(memory, name, new[name])
        return proposals

    def _vectors_on(self, like: Tensor) -> Vectors:
        """Return the state vectors on the same device as `like`, a float32 vector [numel]."""
        values = [getattr(self, name) for name in self.vectors]
        filled = [torch.zeros_like(like) if v is None else v.to(like.device) for v in values]
        return dict(zip(self.vectors, filled, strict=True))

    def _state(self) -> State:
        values = [getattr(self, name) for name in self.vectors]
        filled = [torch.zeros(self.numel, dtype=torch.float32) if v is None else v for v in values]
        return super()._state() | dict(zip(self.vectors, filled, strict=True))

    def _load_state(self, state: State) -> None:
        missing = [name for name in self.vectors if name not in state]
        if "pending" in state and missing:
            raise ConfigError(
                f"the state has a pending proposal but no vector '{missing[0]}'; pass the whole state_dict()"
            )
        super()._load_state(state)
        for name in self.vectors:
            setattr(self, name, state.get(name))


class Counterpart(ABC):
    """The part of a memory that runs on the server and estimates each client's update.

    The server's state for a client equals the client's own state, because both apply the same accepted updates with the same operations. If
    a client starts without state (argument `fresh`), the server also deletes its state for this client. `memory`: a memory with the options
    and the codec of the clients' memories.
    """

    rate: float = 1.0  # learning rate of the round, divided by the learning rate of the run (--lr)
    # Learning rate with which each client computed its update, divided by --lr. It differs from `rate` for an update of an earlier round.
    rates: Mapping[int, float] = {}
    # Whether the memory compares the norm of the model's change in a round (`squared_step` in `settle`) with the norms of client updates.
    # If so, the server rejects optimizers whose steps have a norm that does not depend on the updates.
    compares_model_steps: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, memory: Memory): ...

    def announce(self) -> Mapping[str, bytes]:
        """Return the values to announce to the clients at the start of a round, as bytes by name. They count as downlink traffic."""
        return {}

    def set_rates(self, rate: float, rates: Mapping[int, float]) -> None:
        """Set the attributes `rate` and `rates`. The server calls this method at the end of a round, before `estimate`."""
        self.rate, self.rates = rate, rates

    @abstractmethod
    def estimate(self, client: int, update: Update | None, fresh: bool) -> Update | None:
        """Return the estimate of a client's update, without changing the state. The estimate is valid until the next call of `settle`.

        `update`: the decoded frame of the client, or None if the client sent no frame. `fresh`: whether the client started without state.
        """

    def absent(self, present: Collection[int]) -> Iterable[tuple[int, Update]]:
        """Return pairs of client id and estimate, by ascending id, for clients that are not in the round but count in the mean.

        `present`: the ids of the clients in the round.
        """
        return ()

    def correction(
        self, weights: Mapping[int, float], present: Mapping[int, float]
    ) -> Update | None:
        """Return a vector that the server adds to the mean estimate of the clients in this round, or None to add nothing.

        `weights`: the weight of each client whose weight is known, as a fraction of the total weight of all clients of the run. `present`:
        the weight of each client in this round, as a fraction of the total weight of this round. Neither `weights` nor `present` includes
        clients that start without state.
        """
        return None

    @abstractmethod
    def settle(
        self, accepted: Sequence[tuple[int, Update | None, bool]], squared_step: float
    ) -> None:
        """Apply the accepted updates of a round to the state.

        `accepted`: triples of client id, update (or None), and whether the client started without state. `squared_step`: squared L2 norm of
        the change of the global model, divided by the squared server learning rate.
        """

    @abstractmethod
    def take_changes(self) -> Changes:
        """Return the parts of the state that changed since the last call, for writing to a checkpoint."""

    @abstractmethod
    def restore(self, vector: ReadVector, value: ReadValue) -> None:
        """Restore the state from a checkpoint. Raises ValueError or TypeError for an invalid entry.

        `vector` and `value`: functions that return an entry of the checkpoint by name.
        """


def _copied(state: Mapping[str, Tensor | bytes]) -> State:
    return {name: v.clone() if isinstance(v, Tensor) else v for name, v in state.items()}


def mask(vectors: Iterable[Tensor], sent: np.ndarray | None, dropped: Update | None) -> None:
    """Set `vectors` [numel] to zero, in place, at the coordinates that the receiver accepted.

    `sent`: indices of the sent coordinates; None = all. `dropped`: the part of the update that the receiver did not use. For a momentum
    vector, this operation is momentum factor masking (Lin et al. 2018): after a coordinate was sent, its momentum is outdated.
    """
    if dropped is not None:
        sent = np.arange(dropped.numel) if sent is None else sent
        excluded = dropped.positions
        if excluded is None:
            excluded = np.flatnonzero(dropped.block(0, dropped.numel))
        sent = np.setdiff1d(sent, excluded, assume_unique=True)
    for vector in vectors:
        if sent is None:
            vector.zero_()
        else:
            vector[torch.from_numpy(sent).to(vector.device)] = 0


def add_saturating(vector: Tensor, update: Update, weight: float = 1.0) -> None:
    """Add weight·update to a float32 vector in place. Sums that overflow are clipped to the range of float32."""
    with np.errstate(over="ignore"):
        update.add_to(vector, weight)
    at = update.positions
    touched = vector if at is None else vector[torch.from_numpy(at).to(vector.device)]
    if kernels.are_finite([touched]) != [True]:
        vector.nan_to_num_()
