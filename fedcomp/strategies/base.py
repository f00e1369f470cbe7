"""Base classes of strategies: `RoundStrategy` is the server half of a federated algorithm, `ClientAlgorithm` the client half.

A strategy selects the cohort of a round, the clients that take part. A round has one or more phases. In a phase, the server sends an
assignment (a message) to every client of the cohort, and each client answers with a report. A strategy can add announcements (named byte
strings) to an assignment. At the end of the round, the strategy combines the accepted updates into one update of the model. The round loop
(server/round_loop.py) runs the rounds. Subclasses override `aggregate`, and also `announce` if clients need results of an earlier phase.
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

# Values of `Rejection.stage` for clients that have not answered when the deadline passes, or when the quorum is reached.
DEADLINE, QUORUM = "deadline", "quorum"

# A client's encoded update, None if the client sends nothing, or an error if the client failed.
Frame = bytes | None | FedcompError
Values = dict[str, Any]


@dataclass(frozen=True)
class StrategyConfig:
    """Settings of a run that strategies and the round loop use. `fedcomp.config.RunConfig` documents these settings."""

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
    memory: str = "residual"  # error-feedback memory of the clients
    quorum: float = 1.0
    timeout_s: float | None = None  # time limit of a phase (--deadline); None = no limit
    lr: float = 0.05  # learning rate of local SGD; `vote` and `election` use it on the server
    keep_momentum: bool = False  # clients keep the momentum of local SGD between rounds
    budget_s: float = 0.0  # time in which a client must be able to send its update; 0 = no limit
    lr_schedule: str | None = None
    local_steps_schedule: str | None = None
    batch_size_schedule: str | None = None
    density_schedule: str | None = None
    local_steps: int = 5  # number of local steps, unless a schedule sets it
    batch_size: int = 20  # batch size, unless a schedule sets it
    horizon: int = 0  # round in which schedules end; 0 = the last round
    rounds: int = 0  # number of rounds of the run; 0 = unknown
    server_optimizer: str = "sgd"
    clip_update: float = 0.0
    clients: int = 0  # number of clients of the run; 0 = unknown
    momentum: float = 0.0  # momentum of local SGD
    weight_decay: float = 0.0  # weight decay in local SGD, or (`vote`, `election`) on the server


# The client half.


@dataclass
class RoundState:
    """The state of a client in a round, which it keeps from phase to phase."""

    round: int
    loss: float  # mean loss of local training
    values: Values = field(default_factory=dict)  # values that the ClientAlgorithm stores, by name
    examples: int = 0  # number of examples to report; 0 = all training examples of the client
    metrics: bytes = b""  # result of `ReportedMetrics.pack`


@dataclass(frozen=True)
class DataPartition:
    """A partition of the training data: the data of one or more clients."""

    # Replaces the client id in the seeds of training, so that all clients that train on the partition compute the same update.
    number: int
    clients: tuple[int, ...]  # ids of the clients whose data form the partition


@dataclass(frozen=True)
class ClientAlgorithm:
    """The client half of a strategy.

    In the first phase of a round, a client commits its previous update to its memory (error feedback) if the server accepted this update,
    and otherwise rolls the memory back. The client then downloads the model, trains, and sends a frame (an encoded update). In each later
    phase, the client sends another frame. Subclasses must not store state in attributes. State that outlasts a round belongs in the memory
    or in the client state, the dict of tensors that `after_training` returns. State within a round belongs in `RoundState.values`.

    The *global state* [numel] is the vector that the server updates and broadcasts. In most strategies, it consists of the model weights;
    in `scaffold`, also of control variates.
    """

    phases: tuple[str, ...] = (TRAIN,)  # names of the phases of a round

    # Whether clients train on `partitions` instead of their own data
    trains_on_partitions: ClassVar[bool] = False
    # Whether `encode` calls `encode_one` for each client, instead of encoding the updates of all clients in one batch
    one_by_one: ClassVar[bool] = False

    def starts_round(self, assignment: Assignment, state: RoundState | None) -> bool:
        """Return whether an assignment starts a new round for a client. `state`: the client's state in the last round that it started.

        Raises ProtocolError if the phase is unknown, or if the assignment continues a round that the client has not started.
        """
        if assignment.phase not in self.phases:
            raise ProtocolError(
                f"this client's strategy has no phase '{assignment.phase}', but only {', '.join(self.phases)}; server and client need the "
                "same strategy"
            )
        first = self.phases[0]
        if assignment.phase != first and (state is None or state.round != assignment.round):
            raise ProtocolError(
                f"this client did not complete phase '{first}' of round {assignment.round}, or has lost the results of this phase, so it "
                "cannot continue the round; it can take part in the next round"
            )
        return assignment.phase == first

    def initial_values(self, assignment: Assignment, previous: RoundState | None) -> Values:
        """Return `RoundState.values` at the start of a round. `previous`: the client's state in the last round that it started."""
        return {}

    def seed(self, codec: Codec, run_seed: int, assignment: Assignment) -> int:
        """Return the seed for encoding a frame. Clients have different seeds, unless the codec needs one seed for all (`shares_seed`)."""
        return seeds.key(
            run_seed, "encode", assignment.round, 0 if codec.shares_seed else assignment.client
        )

    # Training on partitions.

    def partitions(self, assignment: Assignment) -> Sequence[DataPartition]:
        """Return a client's partitions, if `trains_on_partitions`. The client trains on each one separately, from the global weights."""
        return ()

    def summarize(self, partition: DataPartition, update: Tensor, seed: int, round: int) -> Any:
        """Convert the update [numel] from training on a partition into an input of `combine`. `seed`: the seed of the run."""
        return update

    def combine(
        self, assignment: Assignment, summaries: Sequence[Any], numel: int, seed: int
    ) -> Tensor:
        """Return a client's update [numel], on the CPU, from the results of `summarize` for its partitions. `seed`: the seed of the run."""
        raise NotImplementedError

    # The global state.

    def global_layout(self, layout: Layout) -> Layout:
        """Return the layout (tensor names and shapes) of the global state, given the layout of the model."""
        return layout

    def initial_global_state(self, weights: Tensor) -> Tensor:
        """Return the global state before round 1, given the initial weights of the model."""
        return weights

    def model_weights(self, global_state: Tensor) -> Tensor:
        """Return a view of the model's weights in the global state."""
        return global_state

    # Local training and its result.

    def gradient_correction(
        self, global_state: Tensor, client_state: Mapping[str, Tensor], sgd: LocalSGD
    ) -> Tensor | None:
        """Return a vector [number of weights] to add to every gradient in local SGD, or None. `sgd`: the training options of the run."""
        return None

    def after_training(
        self,
        updates: Tensor,
        global_state: Tensor,
        client_states: Sequence[Mapping[str, Tensor]],
        sgd: LocalSGD,
        lr_sums: Sequence[float],
    ) -> tuple[Tensor, Sequence[Mapping[str, Tensor]]]:
        """Return the vectors [m, numel] that m clients send, and their new client states.

        `updates`: the clients' updates of the n model weights [m, n]. `client_states`: the old client states. `lr_sums`: for each client,
        the sum of the learning rates of all its local steps.
        """
        return updates, [{}] * len(updates)

    # Frames.

    def later_update(
        self, memory: Memory, values: Values, seed: int, context: Context
    ) -> Tensor | None:
        """Return the vector [numel] to encode in a phase after the first. Return None if the client encodes no new vector in the phase."""
        return None

    def encode(
        self,
        memories: Sequence[Memory],
        updates: Tensor | None,
        values: Sequence[Values],
        seeds: Sequence[int],
        context: Context,
    ) -> Sequence[Frame]:
        """Return the frames that m clients send in a phase.

        `updates`: the vectors [m, numel] from `after_training` or `later_update`, or None if `later_update` returned None. `values`: each
        client's `RoundState.values`. The method may overwrite `updates` and `values`.
        """
        if updates is not None and not self.one_by_one:
            return type(memories[0]).propose_batch(memories, updates, seeds, context)
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
        """Return the frame of one client, or None if the client sends nothing. A FedcompError is a failure of only this client."""
        return memory.proceed(seed=seed, context=context)


# Rounds.


@dataclass(frozen=True)
class Progress:
    """The progress of a phase."""

    asked: int  # number of clients in the phase
    answered: int  # number of clients that have answered
    accepted: int  # number of clients whose answers were accepted
    elapsed_s: float  # time since the start of the phase


@dataclass(frozen=True)
class PhaseEnd:
    """The end of a phase: `stage` and `reason` of the rejections of the clients that have not answered."""

    stage: str = "reply"
    reason: str = "no reply before the phase ended"


@dataclass(frozen=True)
class RoundCompletion:
    """The rule that ends a phase when all clients have answered, a quorum of answers was accepted, or the deadline has passed.

    The round loop calls `check` after every answer, and repeatedly while no answer arrives.
    """

    quorum: float = 1.0  # fraction (above 0) of the phase's clients whose answers must be accepted
    deadline_s: float | None = None  # time limit from the start of the phase; None = no limit

    def check(self, progress: Progress) -> PhaseEnd | None:
        """Return the end of the phase, or None if the phase goes on."""
        if progress.answered >= progress.asked:
            return PhaseEnd()
        if progress.accepted >= (quorum := quorum_size(self.quorum, progress.asked)):
            reason = f"no reply before {quorum} of {progress.asked} replies were accepted (--quorum {self.quorum:g})"
            return PhaseEnd(QUORUM, reason)
        if self.deadline_s is not None and progress.elapsed_s >= self.deadline_s:
            return PhaseEnd(DEADLINE, f"no reply within {self.deadline_s:g} s (--deadline)")
        return None

    def answers_until_check(self, progress: Progress) -> int:
        """Return how many more answers `check` needs, at least, to end the phase before the deadline."""
        missing = quorum_size(self.quorum, progress.asked) - progress.accepted
        return min(progress.asked - progress.answered, missing)


def quorum_size(quorum: float, clients: int) -> int:
    """Return the number of answers in a quorum: ⌈quorum · clients⌉, at least 1."""
    # Subtract 1e-9, because 0.55 · 100 is above 55 in floating point.
    return max(1, math.ceil(quorum * clients - 1e-9))


@dataclass(frozen=True)
class Phase:
    """A phase of a round, and the rule that ends it."""

    name: str = TRAIN
    completion: RoundCompletion | None = None  # None = as set by --quorum and --deadline


@dataclass(frozen=True)
class AcceptedUpdate:
    """A client's report (update and metrics) that passed every check."""

    client: int
    # None if the client sent no update, or if a relay (a process between clients and server) has added it to another client's update
    update: Update | None
    examples: int
    loss: float
    ticket: str  # hash that identifies the update (`fedcomp.messages.ticket`)
    frame: bytes = b""  # the encoded update
    fresh: bool = True  # whether the client's memory is new, that is, has never committed an update
    rate: float = 1.0  # learning rate of the client in the round, divided by --lr
    staleness: int = 0  # number of rounds from the start of the client's training to this round
    metrics: ReportedMetrics = field(default_factory=ReportedMetrics)


AcceptedByPhase = Mapping[str, Sequence[AcceptedUpdate]]


@dataclass(frozen=True)
class PhaseResult:
    """The accepted updates of a phase, sorted by client id."""

    phase: str
    accepted: Sequence[AcceptedUpdate]
    # Ids of the rejected clients whose frame no honest client would send
    proven_byzantine: frozenset[int] = frozenset()


@dataclass(frozen=True)
class RoundUpdates:
    """The input of `aggregate`.

    If the clients' memory has a server half (`counterpart`), the server half replaces the updates of the last phase by its estimates. For
    the memories `ef21` and `laq`, it also adds estimates of the updates of absent clients.
    """

    round: int
    phases: AcceptedByPhase  # the accepted updates of each phase, sorted by client id
    weights: Tensor  # global state [numel] before the round; do not modify it
    # Number of examples of each client that had an accepted update in an earlier round.
    examples: Mapping[int, int] = field(default_factory=dict)
    clients: int = 0  # number of clients that have ever connected

    @property
    def accepted(self) -> Sequence[AcceptedUpdate]:
        """The accepted updates of the last phase."""
        return list(self.phases.values())[-1]


@dataclass(frozen=True)
class Aggregation:
    """The result of `RoundStrategy.aggregate`, besides the combined update."""

    clipped: int = 0  # number of clipped updates
    # Factor (rounded to float32) by which the weights are multiplied before the update is added
    decay: float = 1.0


def cohort_size(participation: float, clients: int) -> int:
    """Return the number of clients in a round: participation · clients, rounded, at least 2, and at most `clients`."""
    return min(clients, max(2, math.floor(participation * clients + 0.5)))


def draw_cohort(clients: Sequence[int], count: int, seed: int, round: int) -> list[int]:
    """Draw `count` client ids without replacement, in ascending order."""
    ordered = clients if isinstance(clients, range) and clients.step > 0 else sorted(clients)
    chosen = seeds.generator(seed, "cohort", round).choice(len(ordered), count, replace=False)
    return sorted(ordered[i] for i in chosen)


class RoundStrategy(ABC):
    """The server half of a federated algorithm: its decisions in a round, and its state between rounds.

    `warn(sentence, kind)` warns the user. A run shows only the first warning of each kind, but all warnings of kind "". The constructor
    raises ConfigError for settings with which the algorithm does not work.
    """

    name: ClassVar[str]
    Options: ClassVar[type] = NoOptions  # frozen dataclass of the strategy's options
    client_algorithm: ClientAlgorithm = ClientAlgorithm()  # the client half
    min_clients: int = 1  # smallest number of clients with which a round updates the model
    notice: str = ""  # text to print at the start of a run
    # Codec classes that --uplink allows, with or without a scope such as @layer; () = all
    allowed_uplinks: ClassVar[tuple[type[Codec], ...]] = ()
    required_memory: ClassVar[str] = ""  # the only memory that --memory allows; "" = all
    supports_weights: ClassVar[bool] = True  # whether `--weights examples` is allowed
    # Whether all frames must have the same size, so that schedules and budgets of the density are errors
    fixed_frame_size: ClassVar[bool] = False
    supports_clipping: ClassVar[bool] = False  # whether `--clip-update` is allowed
    # Whether the strategy has its own option `momentum` instead of --server-optimizer.
    replaces_server_optimizer: ClassVar[bool] = False
    # Whether the server applies --weight-decay when it updates the model. If not, clients apply it in local SGD.
    decays_in_server_step: ClassVar[bool] = False
    # Whether the strategy's own formulas contain the learning rate of local SGD (--lr).
    uses_lr: ClassVar[bool] = False
    asynchronous: ClassVar[bool] = False  # whether server/asynchronous_loop.py runs the rounds
    # For strategies with data partitions: 0/1 array [clients in the round, partitions], 1 if the client needs the partition.
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
        # A memory with the settings of the clients' memories. It holds no updates: the server only reads the settings.
        self.memory = memory(config.memory, self.uplink, self.layout.numel, self.layout)
        # The server half of the clients' memory, or None if the memory has no server half.
        self.counterpart = self._counterpart()
        self.schedule = self._schedule()

    @property
    def cohort_size(self) -> int:
        """Number of clients in a round; 0 if the number of clients of the run is unknown."""
        return cohort_size(self.config.participation, self.config.clients)

    # Methods that algorithms override.

    @classmethod
    def client_for(cls, options: Any) -> ClientAlgorithm:
        """Return the client half of the algorithm. `options`: the options of the strategy."""
        return cls.client_algorithm

    @classmethod
    def defaults(cls, options: Any) -> Mapping[str, str]:
        """Return the strategy's defaults for options of the run, by field of `RunConfig`.

        If `memory` is not among them, its default is `required_memory`.
        """
        return {}

    @abstractmethod
    def aggregate(self, updates: RoundUpdates, into: Tensor) -> Aggregation:
        """Combine the accepted updates of a round, and write the result to the tensor of zeros `into` [numel]."""

    def select_clients(self, clients: Sequence[int], round: int, fingerprint: str) -> list[int]:
        """Return the cohort of a round. `clients`: the ids of all connected clients. `fingerprint`: a hash of the model."""
        count = cohort_size(self.config.participation, len(clients))
        return draw_cohort(clients, count, self.config.seed, round)

    def phases(self, round: int) -> Iterable[Phase]:
        """Return the phases of a round, in order. Only clients whose answers were accepted in a phase take part in the next phase."""
        return [Phase(name) for name in self.client_algorithm.phases]

    def announce(self, phase: Phase, client: int, before: AcceptedByPhase) -> Mapping[str, bytes]:
        """Return the announcements to a client at the start of a phase, by name. Announcements count as traffic.

        `before`: the accepted updates of earlier phases of the round, by phase.
        """
        return {}

    def open(self, phase: Phase, frames: Sequence[bytes]) -> Sequence[Update | FrameError | None]:
        """Decode the frames of a phase. Return each frame's update, None if it contains no update, or a FrameError if it is invalid."""
        return self.uplink.open_batch(frames, self.layout.numel, self.layout)

    def check_frame(self, phase: Phase, client: int, frame: bytes) -> None:
        """Raise FrameError if `client` must not send this frame; the client then counts as Byzantine. Called after `open`."""

    def on_phase_end(self, result: PhaseResult) -> Mapping[int, str]:
        """Receive the result of a phase. Return clients to exclude from the round although their updates are valid, with the reasons."""
        return {}

    def reject(self, accepted: Sequence[AcceptedUpdate]) -> Mapping[int, str]:
        """Return the clients to reject after the last phase, with the reasons. The memories of these clients roll back."""
        return {}

    def returned_frame(self, accepted: AcceptedUpdate) -> bytes:
        """Return a frame with the part of a client's update that `aggregate` did not use, or b"" if it used the whole update.

        The server sends this frame to the client, whose memory keeps the unused part. The frame counts as traffic. It is encoded by the
        uplink codec, unless the memory expects another format.
        """
        return b""

    @property
    def suspicion(self) -> Mapping[int, float]:
        """By client: the fraction of its votes that contradicted a large majority (see vote.py). Empty if the strategy has no votes."""
        return {}

    def on_round_end(self, round: int, broadcast: bytes | None) -> None:
        """Store the state that `aggregate` computed in this round, or discard it if the round did not update the model.

        `broadcast`: the encoded update of the model, or None if the round did not update the model.
        """

    def set_identity(self, run: str, key_of: Callable[[int], bytes], options: str) -> None:
        """Set the name and the options of the run, and the clients' public keys (P-384 points), which signed messages need."""

    # Checkpoints.

    def take_changes(self) -> Changes:
        """Return the part of the state that has changed since the last call, for a checkpoint."""
        return {}, {}

    def restore(self, vector: ReadVector, value: ReadValue) -> None:
        """Restore the state from a checkpoint. `vector(name)` and `value(name)` return the entries that `take_changes` wrote."""

    # Settings.

    def _check_settings(self) -> None:
        """Raise ConfigError if the algorithm does not work with the options of the run."""
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
                f"--strategy {self.name} needs frames of equal size, but --density-warmup, --density-schedule and --budget change "
                "the size of frames; leave these options out"
            )
        if self.replaces_server_optimizer and not steps.is_identity:
            raise ConfigError(
                f"--strategy {self.name} replaces the server optimizer; leave --server-optimizer out, or for momentum give "
                f"--strategy {self.name}:momentum=0.9"
            )
        if steps.scale_free and config.server_lr >= 1:
            raise ConfigError(
                f"--server-optimizer {steps.name} changes every weight by about --server-lr, which is "
                f"{config.server_lr:g}; give a smaller value, such as --server-lr 0.01"
            )

    def _counterpart(self) -> Counterpart | None:
        """Return the server half of the clients' memory, if any. Raises ConfigError if the run cannot use the memory."""
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
                f"--memory {name} compares the norms of updates and of model steps, but with --server-optimizer {steps.name} the norm "
                "of a step does not depend on the norms of the updates; use --server-optimizer sgd, or another --memory"
            )
        return counterpart

    def _schedule(self) -> Schedule:
        """Return the schedule of the clients' settings. Raises ConfigError if the run cannot use it."""
        config, layout = self.config, self.layout
        if (config.density_warmup or config.density_schedule) and self.memory.selects_coordinates:
            option = "--density-warmup" if config.density_warmup else DENSITY_SCHEDULE
            raise ConfigError(
                f"{option} has no effect with memory '{self.memory.name}', which itself selects the coordinates to send; leave {option} out"
            )
        schedule = Schedule(config, self.uplink, layout)
        if schedule.density is not None:
            for density in schedule.density.values(config.rounds or config.horizon):
                memory(config.memory, at_density(self.uplink, density), layout.numel, layout)
        return schedule
