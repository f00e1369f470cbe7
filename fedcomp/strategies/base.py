"""The base classes of strategies: `RoundStrategy` is the server half of an algorithm, `ClientAlgorithm` the client half.

A strategy selects the cohort of a round (the clients that take part) and the phases (exchanges between server and cohort). A strategy makes
the announcements (named byte strings sent with an assignment), and combines the accepted updates into one update of the model.
server/round_loop.py runs the rounds. Subclasses override `aggregate`, and also `phases` and `announce` if a round has more than one
exchange.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from .. import seeds, spec
from ..codecs import Codec, Context, Update, at_density, codec
from ..errors import ConfigError, FedcompError, FrameError, ProtocolError
from ..layout import Layout
from ..memories import Counterpart, Memory, memory, with_memories
from ..memories.base import Changes, NoOptions, ReadValue, ReadVector
from ..messages import TRAIN, Assignment, ReportedMetrics
from ..training.local_sgd import LocalSGD
from .optimizers import optimizer
from .schedule import DENSITY_SCHEDULE, Schedule

DEADLINE = "deadline"  # stage of the rejection of clients that did not answer in time
QUORUM = "quorum"  # stage of the rejection of clients that answered after the quorum, or not at all

Frame = bytes | None | FedcompError  # None: nothing to send; an error: this client failed
Values = dict[str, Any]  # values that a ClientAlgorithm stores for a client during a round


@dataclass(frozen=True)
class StrategyConfig:
    """Settings of a run that strategies and the round loop use. `fedcomp.config.RunConfig` documents the fields of the same names."""

    participation: float = 0.1
    uplink: str = "stc:density=1/100"
    downlink: str = "stc:density=1/100"
    downlink_memory: str = "residual"
    weights: str = "uniform"
    weight_cap: float = 0.0
    server_lr: float = 1.0
    cache: float = 1.0
    seed: int = 0
    density_warmup: int = 0
    lr_warmup: int = 0
    budget_bytes: int = 0
    memory: str = "residual"  # memory of the clients
    quorum: float = 1.0
    timeout_s: float | None = None  # limit of a phase, the option --deadline; None = no limit
    # Learning rate of local SGD, and step of the server under strategies that vote
    lr: float = 0.05
    keep_momentum: bool = False  # keep the momentum of local SGD between rounds
    budget_s: float = 0.0  # seconds that a client may take to send, instead of budget_bytes
    lr_schedule: str | None = None
    local_steps_schedule: str | None = None
    batch_size_schedule: str | None = None
    density_schedule: str | None = None
    local_steps: int = 5  # without a schedule
    batch_size: int = 20  # without a schedule
    horizon: int = 0
    rounds: int = 0  # 0 = unknown
    server_optimizer: str = "sgd"
    clip_update: float = 0.0
    clients: int = 0  # number of clients of the run; 0 = unknown
    momentum: float = 0.0  # of local SGD
    weight_decay: float = 0.0  # of local SGD, or of the server's step if decays_in_server_step


# The client half.


@dataclass
class RoundState:
    """State of a client in a round, from the first phase on."""

    round: int
    loss: float  # of local training
    values: Values = field(default_factory=dict)
    # Number of examples by which the update is weighted; 0: the size of the client's data
    examples: int = 0
    metrics: bytes = b""  # packed ReportedMetrics


@dataclass(frozen=True)
class DataPartition:
    """Data of one or more clients. Random draws are keyed by `number`, so all clients that train on it compute the same update."""

    number: int
    clients: tuple[int, ...]  # logical ids of the clients whose data form the partition


@dataclass(frozen=True)
class ClientAlgorithm:
    """The client half of a strategy. This base class trains in the first phase and sends the update through the client's memory.

    In the first phase of a round, a client commits or rolls back its previous proposal (the update that its memory encoded last), downloads
    the broadcasts, and trains. In each later phase, the client sends the memory's next frame of the same update. Subclasses have no state
    of their own: lasting state is in the memory or in the client state (tensors by name), and state of one round is in `RoundState.values`.

    The vector that the server updates and broadcasts is the *global state* [numel]. In most strategies, the global state is the vector of
    model weights.
    """

    phases: tuple[str, ...] = (TRAIN,)

    # Train on `partitions`, not on the client's own data
    trains_on_partitions: ClassVar[bool] = False
    # `encode` calls `encode_one` in every phase, also in the phase with updates
    one_by_one: ClassVar[bool] = False

    def starts_round(self, assignment: Assignment, state: RoundState | None) -> bool:
        """Return whether the assignment belongs to the first phase of a round. `state`: the state of the client's last round.

        Raises ProtocolError for an unknown phase, and for a later phase of a round that the client did not start.
        """
        if assignment.phase not in self.phases:
            raise ProtocolError(
                f"this client knows no phase '{assignment.phase}'; server and client need the same strategy"
            )
        first = self.phases[0]
        if assignment.phase != first and (state is None or state.round != assignment.round):
            raise ProtocolError(
                f"this client has no state from phase '{first}' of round {assignment.round}, so it cannot go on; it can take part "
                "again in the next round"
            )
        return assignment.phase == first

    def initial_values(self, assignment: Assignment, previous: RoundState | None) -> Values:
        """Return `RoundState.values` at the start of a round, given the state of the client's previous round."""
        return {}

    def seed(self, codec: Codec, run_seed: int, assignment: Assignment) -> int:
        """Return the seed of a frame: the same for all clients of a round if `codec.shares_seed`, else one per client."""
        return seeds.key(
            run_seed, "encode", assignment.round, 0 if codec.shares_seed else assignment.client
        )

    # Training on partitions.

    def partitions(self, assignment: Assignment) -> Sequence[DataPartition]:
        """Return the partitions to train on, each from the same initial weights, or () to train on the client's own data."""
        return ()

    def summarize(self, partition: DataPartition, update: Tensor, seed: int, round: int) -> Any:
        """Return the part of a partition's update [numel] that `combine` needs. `seed`: the seed of the run."""
        return update

    def combine(
        self, assignment: Assignment, summaries: Sequence[Any], numel: int, seed: int
    ) -> Tensor:
        """Return the client's update [numel], on the CPU, from the summaries of its partitions, in order. `seed`: the seed of the run."""
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
        self, memory: Memory, values: Values, seed: int, context: Context
    ) -> Tensor | None:
        """Return the vector [numel] to send in a phase after the first; None to send the memory's next frame."""
        return None

    def encode(
        self,
        memories: Sequence[Memory],
        updates: Tensor | None,
        values: Sequence[Values],
        seeds: Sequence[int],
        context: Context,
    ) -> Sequence[Frame]:
        """Return the frames of m clients for a phase. May modify `values`, the `RoundState.values` of the clients.

        `updates` [m, numel]: the result of `after_training`, `combine` or `later_update`, or None in a phase without updates. `encode` may
        overwrite it.
        """
        if updates is not None and not self.one_by_one:
            return type(memories[0]).propose_stack(memories, updates, seeds, context)
        frames: list[Frame] = []
        for i, own in enumerate(memories):
            update = None if updates is None else updates[i]
            try:
                frames.append(self.encode_one(own, update, values[i], seeds[i], context.at(i)))
            except FedcompError as error:
                frames.append(error)
        return frames

    def encode_one(
        self, memory: Memory, update: Tensor | None, values: Values, seed: int, context: Context
    ) -> bytes | None:
        """Return the frame of one client, None if it has nothing to send. A FedcompError that this method raises fails only this client."""
        return memory.proceed(seed=seed, context=context)


# Rounds.


@dataclass(frozen=True)
class Progress:
    """The progress of a phase."""

    asked: int  # number of clients in the phase
    answered: int  # number of clients that answered
    accepted: int  # number of clients whose answer was accepted
    elapsed_s: float


@dataclass(frozen=True)
class PhaseEnd:
    """The end of a phase. Clients that have not answered are rejected, with this stage and this reason."""

    stage: str = "reply"
    reason: str = "no reply before the round closed"


@dataclass(frozen=True)
class RoundCompletion:
    """The policy that decides when a phase closes: when all clients have answered, when a quorum was accepted, or at a deadline.

    The round loop calls `check` after every answer, and repeatedly while no answer arrives.
    """

    quorum: float = 1.0  # fraction of the clients in the phase, above 0
    deadline_s: float | None = None  # None: no deadline

    def check(self, progress: Progress) -> PhaseEnd | None:
        """Return the end of the phase, or None if the phase goes on."""
        if progress.answered >= progress.asked:
            return PhaseEnd()
        if progress.accepted >= (quorum := quorum_size(self.quorum, progress.asked)):
            needed = f"{quorum} of {progress.asked} replies"
            reason = f"no reply before {needed} were accepted (--quorum {self.quorum:g})"
            return PhaseEnd(QUORUM, reason)
        if self.deadline_s is not None and progress.elapsed_s >= self.deadline_s:
            return PhaseEnd(DEADLINE, f"no reply within {self.deadline_s:g} s (--deadline)")
        return None

    def answers_until_check(self, progress: Progress) -> int:
        """Return the number of answers that may arrive before the next `check` can return an end."""
        missing = quorum_size(self.quorum, progress.asked) - progress.accepted
        return min(progress.asked - progress.answered, missing)


def quorum_size(quorum: float, clients: int) -> int:
    """Return ⌈quorum · clients⌉, at least 1, without rounding errors: 7 of 10 for 0.7."""
    return max(1, math.ceil(quorum * clients - 1e-9))


@dataclass(frozen=True)
class Phase:
    """An exchange within a round, and the condition that closes it."""

    name: str = TRAIN
    completion: RoundCompletion | None = None  # None: the quorum and deadline of the run


@dataclass(frozen=True)
class AcceptedUpdate:
    """A client's report that passed every check."""

    client: int
    # None: the client sent nothing, or a relay added its update to another client's
    update: Update | None
    examples: int
    loss: float
    ticket: str  # hash that identifies the proposal (`fedcomp.messages.ticket`)
    frame: bytes = b""
    fresh: bool = True  # no proposal of the client's memory was committed before
    rate: float = 1.0  # learning rate of the client, divided by that of the run
    staleness: int = 0  # rounds between the start of training and this round
    metrics: ReportedMetrics = field(default_factory=ReportedMetrics)


AcceptedByPhase = Mapping[str, Sequence[AcceptedUpdate]]


@dataclass(frozen=True)
class PhaseResult:
    """The accepted updates of a phase, in the order of the client ids."""

    phase: str
    accepted: Sequence[AcceptedUpdate]
    # Clients that were rejected because no honest client would send their frame.
    proven_byzantine: frozenset[int] = frozenset()


@dataclass(frozen=True)
class RoundUpdates:
    """The accepted updates of each phase of a round, in the order of the client ids, and the server's state before aggregation."""

    round: int
    phases: AcceptedByPhase
    weights: Tensor  # [numel], model weights before the round; read only
    # Number of examples, by client with an accepted update in an earlier round.
    examples: Mapping[int, int] = field(default_factory=dict)
    clients: int = 0  # number of clients that have ever connected

    @property
    def accepted(self) -> Sequence[AcceptedUpdate]:
        """The accepted updates of the last phase."""
        return list(self.phases.values())[-1]


@dataclass(frozen=True)
class Aggregation:
    """The result of `aggregate`, in addition to the combined update that it writes to a tensor."""

    clipped: int = 0  # number of clipped updates
    # Float32 factor by which the weights are multiplied before the update is added
    decay: float = 1.0


def cohort_size(participation: float, clients: int) -> int:
    """Return participation · clients, rounded, but at least 2 and at most all clients."""
    return min(clients, max(2, math.floor(participation * clients + 0.5)))


def draw_cohort(clients: Sequence[int], count: int, seed: int, round: int) -> list[int]:
    """Return `count` logical ids, drawn without replacement, ascending."""
    ordered = clients if isinstance(clients, range) and clients.step > 0 else sorted(clients)
    chosen = seeds.generator(seed, "cohort", round).choice(len(ordered), count, replace=False)
    return sorted(ordered[i] for i in chosen)


class RoundStrategy(ABC):
    """The server half of an algorithm: its decisions in a round, and its state between rounds.

    During rounds, the strategy calls `warn(sentence, kind)` for each warning. A run shows only the first warning of a kind, but every
    warning of the kind "". Raises ConfigError for settings that do not suit the algorithm.
    """

    name: ClassVar[str]
    Options: ClassVar[type] = NoOptions  # a frozen dataclass: the options of `name:option=value`
    client_algorithm: ClientAlgorithm = ClientAlgorithm()  # the client half
    min_clients: int = 1  # smallest number of clients with which a round can move the model
    notice: str = ""  # text printed at the start of a run
    # Codecs that --uplink allows, in any scope; () = all
    allowed_uplinks: ClassVar[tuple[type[Codec], ...]] = ()
    required_memory: ClassVar[str] = ""  # the only --memory that the strategy works with; "" = any
    supports_weights: ClassVar[bool] = True  # --weights examples is allowed
    # The density of frames cannot change from round to round
    fixed_frame_size: ClassVar[bool] = False
    supports_clipping: ClassVar[bool] = False  # --clip-update is allowed
    # The strategy takes the server's step itself, and has its own option `momentum`.
    replaces_server_optimizer: ClassVar[bool] = False
    # Weight decay is part of the server's step, not of local SGD.
    decays_in_server_step: ClassVar[bool] = False
    asynchronous: ClassVar[bool] = False  # a round consists of the first answers to arrive
    # 0/1 [clients, n]: 1 if the client of the cohort counts the partition; None for strategies without partitions.
    allocation: np.ndarray | None = None

    def __init__(
        self,
        config: StrategyConfig,
        layout: Layout,
        *,
        options: Any = None,
        warn: Callable[..., None] = lambda sentence, kind="": None,
    ):
        self.options, self.warn = options or self.Options(), warn
        self.model_layout, self.layout = layout, self.client_algorithm.global_layout(layout)
        self.config = config = with_memories(config, self.layout.numel)
        self.uplink, self.downlink = codec(config.uplink), codec(config.downlink)
        self._check_settings()
        # Has the type and options of the clients' memories. Only its properties are read.
        self.memory = memory(config.memory, self.uplink, self.layout.numel, self.layout)
        # The server's side of the clients' memories; None if they need none.
        self.counterpart = self._counterpart()
        self.schedule = self._schedule()

    @property
    def cohort_size(self) -> int:
        """Number of clients in a cohort of the run; 0 if the number of clients is unknown."""
        return cohort_size(self.config.participation, self.config.clients)

    # Decisions of an algorithm.

    @classmethod
    def client_for(cls, options: Any) -> ClientAlgorithm:
        """Return the client half for these options of the strategy."""
        return cls.client_algorithm

    @classmethod
    def defaults(cls, options: Any) -> Mapping[str, str]:
        """Return the strategy's defaults for options that are not given, by field of `fedcomp.config.RunConfig`.

        The default of `memory` is `required_memory`, unless the dict has another value.
        """
        return {}

    @abstractmethod
    def aggregate(self, updates: RoundUpdates, into: Tensor) -> Aggregation:
        """Write the combined update of the cohort to `into` [numel], which holds zeros before the call."""

    def select_clients(self, clients: Sequence[int], round: int, fingerprint: str) -> list[int]:
        """Return the cohort of a round, a subset of the connected clients. `fingerprint`: a digest of the model before the round."""
        count = cohort_size(self.config.participation, len(clients))
        return draw_cohort(clients, count, self.config.seed, round)

    def phases(self, round: int) -> Iterable[Phase]:
        """Return the exchanges of a round, in order. Only clients accepted in one phase take part in the next."""
        return [Phase(name) for name in self.client_algorithm.phases]

    def announce(self, phase: Phase, client: int, before: AcceptedByPhase) -> Mapping[str, bytes]:
        """Return the announcements to a client at the start of a phase, by name. Announced bytes are counted as traffic.

        `before`: the accepted updates of the earlier phases of the round, by phase.
        """
        return {}

    def open(self, phase: Phase, frames: Sequence[bytes]) -> Sequence[Update | FrameError | None]:
        """Return, for each frame of a phase, its update, or a FrameError if it is invalid, or None if it contains no update."""
        return self.uplink.open_batch(frames, self.layout.numel, self.layout)

    def check_frame(self, phase: Phase, client: int, frame: bytes) -> None:
        """Raise FrameError for a frame that this client may not send. Called after `open`."""

    def on_phase_end(self, result: PhaseResult) -> Mapping[int, str]:
        """Return the clients to exclude at the end of a phase although their updates are valid, with the reasons."""
        return {}

    def reject(self, accepted: Sequence[AcceptedUpdate]) -> Mapping[int, str]:
        """Return the clients whose updates of the last phase are not aggregated, with the reasons. Their memories roll back."""
        return {}

    def returned_frame(self, accepted: AcceptedUpdate) -> bytes:
        """Return a frame with the part of an accepted update that `aggregate` dropped, b"" if it dropped none.

        The frame is in the format of the uplink codec unless the clients' memory reads another format. The bytes of the frame are counted
        as traffic.
        """
        return b""

    @property
    def suspicion(self) -> Mapping[int, float]:
        """By logical id, the fraction 0..1 of a client's votes that lost by a wide margin; {} without votes."""
        return {}

    def on_round_end(self, round: int, broadcast: bytes | None) -> None:
        """Store the state that `aggregate` computed. If `broadcast` is None, the model has not moved and the state is not stored."""

    def set_identity(self, run: str, key_of: Callable[[int], bytes], options: str) -> None:
        """Set what signed messages need: the name of the run, the public key (P-384 point) of each client, and the announced options."""

    # Checkpoints.

    def take_changes(self) -> Changes:
        """Return the parts of the state that changed since the last call."""
        return {}, {}

    def restore(self, vector: ReadVector, value: ReadValue) -> None:
        """Restore the state from a checkpoint. `vector(name)` and `value(name)` return the entries that `take_changes` returned."""

    # Settings.

    def _check_settings(self) -> None:
        """Raise ConfigError for settings that do not suit the algorithm."""
        config, steps = self.config, optimizer(self.config.server_optimizer)
        if config.clip_update and not self.supports_clipping:
            raise ConfigError(
                f"--strategy {self.name} cannot clip the updates of single clients; leave --clip-update out, or "
                "use --strategy average"
            )
        if self.allowed_uplinks and not isinstance(self.uplink.unscoped, self.allowed_uplinks):
            raise ConfigError(
                f"--strategy {self.name} does not work with --uplink {self.uplink}; leave --uplink out, or give "
                f"{self.allowed_uplinks[0].name}"
            )
        name = spec.parse(config.memory).parts[0].name
        if self.required_memory not in ("", name):
            raise ConfigError(
                f"--strategy {self.name} does not work with memory '{name}'; leave --memory out, or give {self.required_memory}"
            )
        if config.weights != "uniform" and not self.supports_weights:
            raise ConfigError(
                f"--strategy {self.name} gives every client the same weight; leave --weights out, or give uniform"
            )
        budget = config.budget_bytes or config.budget_s
        if self.fixed_frame_size and (config.density_warmup or config.density_schedule or budget):
            raise ConfigError(
                f"--strategy {self.name} sends frames of one size; leave --density-warmup, --density-schedule and --budget out"
            )
        if self.replaces_server_optimizer and not steps.is_identity:
            raise ConfigError(
                f"--strategy {self.name} replaces the server optimizer; leave --server-optimizer out, or for momentum give "
                f"--strategy {self.name}:momentum=0.9"
            )
        if steps.scale_free and config.server_lr >= 1:
            raise ConfigError(
                f"--server-optimizer {steps.name} moves every coordinate by about --server-lr, which is "
                f"{config.server_lr:g}; give a smaller value, such as --server-lr 0.01"
            )

    def _counterpart(self) -> Counterpart | None:
        """Return the server's side of the clients' memories. Raises ConfigError for a memory that does not suit the run."""
        name, momentum = self.memory.name, self.config.momentum
        if momentum and (applied := getattr(self.memory.options, "momentum", 0)):
            raise ConfigError(
                f"--memory {name} with momentum={applied:g} and local SGD with momentum {momentum:g} both apply momentum to an update; "
                f"leave --momentum out (also in --optimizer), or give --memory {name}:momentum=0"
            )
        if self.memory.warning:
            self.warn(self.memory.warning)
        if self.memory.required_strategy not in ("", self.name):
            raise ConfigError(
                f"--memory {name} does not work with --strategy {self.name}; "
                f"give --strategy {self.memory.required_strategy}, or --memory none"
            )
        if self.memory.counterpart is None:
            return None
        counterpart = self.memory.counterpart(self.memory)
        steps = optimizer(self.config.server_optimizer)
        if counterpart.compares_model_steps and steps.scale_free:
            raise ConfigError(
                f"--memory {name} compares updates with steps of the model, but steps of --server-optimizer {steps.name} have "
                "another unit than updates; use --server-optimizer sgd, or another --memory"
            )
        return counterpart

    def _schedule(self) -> Schedule:
        """Return the schedule of client settings, such as the density. Raises ConfigError for a schedule that does not suit the run."""
        config, layout = self.config, self.layout
        if (config.density_warmup or config.density_schedule) and self.memory.selects_coordinates:
            option = "--density-warmup" if config.density_warmup else DENSITY_SCHEDULE
            raise ConfigError(
                f"{option} has no effect with memory '{self.memory.name}', which selects the coordinates itself; leave it out"
            )
        schedule = Schedule(config, self.uplink, layout)
        if schedule.density is not None:
            for density in schedule.density.values(config.rounds or config.horizon):
                memory(config.memory, at_density(self.uplink, density), layout.numel, layout)
        return schedule
