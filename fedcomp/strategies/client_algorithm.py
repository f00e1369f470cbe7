"""The client half of a strategy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from .. import seeds
from ..codecs import Codec, Context
from ..errors import FedcompError, ProtocolError
from ..layout import Layout
from ..memories import Memory
from ..messages import TRAIN, Assignment
from ..training.local_sgd import LocalSGD

Frame = bytes | None | FedcompError  # None: nothing to send; an error: this client failed


@dataclass
class RoundState:
    """State of a client during a round, from the first phase on."""

    round: int
    loss: float  # of local training
    values: dict[str, Any] = field(default_factory=dict)  # stored by the ClientAlgorithm
    examples: int = 0  # weight of the update in examples; 0: the size of the client's data
    metrics: bytes = b""  # packed ReportedMetrics


@dataclass(frozen=True)
class DataPartition:
    """Data that several clients train on. Random draws are keyed by `number`, so all of them compute the same update."""

    number: int
    clients: tuple[int, ...]  # logical ids of the clients whose data form the partition


@dataclass(frozen=True)
class ClientAlgorithm:
    """The client half of a strategy. This base class trains in the first phase and sends the update through the client's memory.

    Only in the first phase of a round does a client settle its previous proposal, download and train. In each later phase the memory
    sends the next frame of the same proposal. Subclasses have no state of their own: state that lasts is in the memory or in
    `client_state` (tensors by name), state of one round in `RoundState.values`.

    The server versions and broadcasts the *global state* [numel]. In most strategies it is the vector of model weights.
    """

    phases: tuple[str, ...] = (TRAIN,)

    trains_on_partitions: ClassVar[bool] = (
        False  # train on `partitions`, not on the client's own data
    )
    one_by_one: ClassVar[bool] = False  # `encode_one` makes every frame, also those of updates

    def starts_round(self, assignment: Assignment, state: RoundState | None) -> bool:
        """Return whether the assignment is of the first phase. `state` is that of the client's last round.

        Raises ProtocolError for an unknown phase, and for a later phase of a round that the client did not start.
        """
        if assignment.phase not in self.phases:
            raise ProtocolError(
                f"this client knows no phase '{assignment.phase}'; server and client need the same strategy"
            )
        first = self.phases[0]
        if assignment.phase != first and (state is None or state.round != assignment.round):
            raise ProtocolError(
                f"this client has no state of phase '{first}' of round {assignment.round}; ask it again in the next round"
            )
        return assignment.phase == first

    def initial_values(self, assignment: Assignment, previous: RoundState | None) -> dict[str, Any]:
        """Return `RoundState.values` at the start of a round, given the state of the client's previous round."""
        return {}

    def seed(self, codec: Codec, run_seed: int, assignment: Assignment) -> int:
        """Return the seed of a frame: the same for all clients of a round if `codec.shares_seed`, else one per client."""
        return seeds.key(
            run_seed, "encode", assignment.round, 0 if codec.shares_seed else assignment.client
        )

    # Training on partitions.

    def partitions(self, assignment: Assignment) -> Sequence[DataPartition]:
        """Return the partitions to train on, each from the same weights; () for the client's own data."""
        return ()

    def summarize(self, partition: DataPartition, update: Tensor, seed: int, round: int) -> Any:
        """Return the part of a partition's update [numel] that `combine` needs. `seed`: of the run."""
        return update

    def combine(
        self, assignment: Assignment, summaries: Sequence[Any], numel: int, seed: int
    ) -> Tensor:
        """Return the client's update [numel], on the CPU, from the summaries of its partitions, in order. `seed`: of the run."""
        raise NotImplementedError

    # The global state.

    def global_layout(self, layout: Layout) -> Layout:
        """Return the layout of the global state, given the model's layout."""
        return layout

    def initial_global_state(self, weights: Tensor) -> Tensor:
        """Return the global state before round 1, given the initial weights."""
        return weights

    def model_weights(self, global_state: Tensor) -> Tensor:
        """Return a view of the model's weights in a global state."""
        return global_state

    # Local training and its result.

    def gradient_correction(
        self, global_state: Tensor, client_state: Mapping[str, Tensor], sgd: LocalSGD
    ) -> Tensor | None:
        """Return a vector [n] to add to every gradient of local SGD, or None. `sgd`: the training options of the run."""
        return None

    def after_training(
        self,
        updates: Tensor,
        global_state: Tensor,
        client_states: Sequence[Mapping[str, Tensor]],
        sgd: LocalSGD,
        lr_sums: Sequence[float],
    ) -> tuple[Tensor, Sequence[Mapping[str, Tensor]]]:
        """Return the vectors [m, numel] that m clients send, and their new client states, given their model updates [m, n].

        `lr_sums`: by client, the sum of the learning rates of its local steps.
        """
        return updates, [{}] * len(updates)

    # Frames.

    def later_update(
        self, memory: Memory, values: dict[str, Any], seed: int, context: Context
    ) -> Tensor | None:
        """Return the vector [numel] to send in a phase after the first; None to send the memory's next frame."""
        return None

    def encode(
        self,
        memories: Sequence[Memory],
        updates: Tensor | None,
        values: Sequence[dict[str, Any]],
        seeds: Sequence[int],
        context: Context,
    ) -> list[Frame]:
        """Return the frames of m clients for a phase. May modify `values`, their `RoundState.values`.

        `updates` [m, numel]: from `after_training`, `combine` or `later_update`; may be overwritten. None if the phase has no updates.
        """
        if updates is not None and not self.one_by_one:
            return type(memories[0]).propose_stack(memories, updates, seeds, context)
        frames: list[Frame] = []
        for i, memory in enumerate(memories):
            update = None if updates is None else updates[i]
            try:
                frames.append(self.encode_one(memory, update, values[i], seeds[i], context.at(i)))
            except FedcompError as error:
                frames.append(error)
        return frames

    def encode_one(
        self,
        memory: Memory,
        update: Tensor | None,
        values: dict[str, Any],
        seed: int,
        context: Context,
    ) -> bytes | None:
        """Return the frame of one client, None if it has nothing to send. A FedcompError that this method raises fails only this client."""
        return memory.proceed(seed=seed, context=context)
