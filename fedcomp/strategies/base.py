"""The base class of strategies: what a federated algorithm decides.

A strategy chooses the cohort and the phases of a round, says what clients are told, and turns accepted updates into one update of the
model. server/round_loop.py runs the rounds. A strategy for an algorithm overrides `aggregate`, and where a round has more than one
exchange, `phases` and `announce`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from .. import spec
from ..codecs import Codec, Update, at_density, codec
from ..errors import ConfigError, FrameError
from ..layout import Layout
from ..memories import Counterpart, memory, with_memories
from ..memories.base import Changes, NoOptions, ReadValue, ReadVector
from ..messages import TRAIN, ReportedMetrics
from .client_algorithm import ClientAlgorithm
from .cohort import cohort_size, sample_cohort
from .optimizers import optimizer
from .round_completion import RoundCompletion
from .schedule import DENSITY_SCHEDULE, Schedule


@dataclass(frozen=True)
class StrategyConfig:
    """Settings of a whole run, as far as a strategy and the round loop use them. `fedcomp.config.RunConfig` documents the same names."""

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
    memory: str = "residual"  # of the clients
    quorum: float = 1.0
    timeout_s: float | None = None  # longest phase, `deadline` of the run; None = no limit
    lr: float = 0.05  # of local SGD, and of the server where votes have no length
    keep_momentum: bool = False  # of local SGD, from one round to the next
    budget_s: float = 0.0  # seconds that a client may take to send, in place of budget_bytes
    lr_schedule: str | None = None
    local_steps_schedule: str | None = None
    batch_size_schedule: str | None = None
    density_schedule: str | None = None
    local_steps: int = 5  # that the clients do of themselves, before what a schedule says
    batch_size: int = 20  # likewise
    horizon: int = 0
    rounds: int = 0  # 0 = nobody has said
    server_optimizer: str = "sgd"
    clip_update: float = 0.0
    clients: int = 0  # of the run; 0 = nobody has said
    momentum: float = 0.0  # of local SGD
    weight_decay: float = 0.0  # of local SGD, or of the server's step where the strategy decays


@dataclass(frozen=True)
class Phase:
    """An exchange within a round, and when it closes."""

    name: str = TRAIN
    completion: RoundCompletion | None = None  # None: as the run's quorum and deadline say


@dataclass(frozen=True)
class AcceptedUpdate:
    """An update that passed every check."""

    client: int
    update: Update | None  # None: nothing to send, or added to another client's by a relay
    examples: int
    loss: float
    ticket: str
    frame: bytes = b""
    fresh: bool = True  # the client's memory has committed nothing before
    rate: float = 1.0  # learning rate that the client was told, as a multiple of the run's
    staleness: int = 0  # rounds since the one that the update was made for
    metrics: ReportedMetrics = field(default_factory=ReportedMetrics)


@dataclass(frozen=True)
class PhaseResult:
    """The accepted updates of a phase, in the order of the client ids."""

    phase: str
    accepted: Sequence[AcceptedUpdate]
    proven_byzantine: frozenset[int] = (
        frozenset()
    )  # clients rejected for bytes that no honest client sends


@dataclass(frozen=True)
class RoundUpdates:
    """The accepted updates of a round by phase, in the order of the client ids, and what the server knows when it aggregates them."""

    round: int
    phases: Mapping[str, Sequence[AcceptedUpdate]]
    weights: Tensor  # [numel], of the model before the round; read only
    examples: Mapping[int, int] = field(
        default_factory=dict
    )  # of each client whose updates were accepted in earlier rounds
    clients: int = 0  # that were heard of so far

    @property
    def accepted(self) -> Sequence[AcceptedUpdate]:
        """The accepted updates of the last phase."""
        return list(self.phases.values())[-1]


@dataclass(frozen=True)
class Aggregation:
    """What `aggregate` returns besides the update."""

    clipped: int = 0  # updates whose norm was bounded
    decay: float = 1.0  # float32 factor of the weights, applied before the update is added


class RoundStrategy(ABC):
    """Decides what happens in a round, and holds what its algorithm keeps from round to round.

    `warn` is called with findings during rounds, each a sentence. Raises ConfigError for settings that do not suit the algorithm.
    """

    name: ClassVar[str]
    Options: ClassVar[type] = NoOptions  # a frozen dataclass: what `name:option=value` may say
    client_algorithm: ClassVar[ClientAlgorithm] = ClientAlgorithm()  # the client half
    min_clients: int = 1  # smallest number of clients with which a round can move the model
    notice: str = ""  # what a run says of it before its first round
    allowed_uplinks: ClassVar[tuple[type[Codec], ...]] = ()  # with or without @layer; () = any
    required_memory: ClassVar[str] = ""  # of the clients, without options; "" = any
    supports_weights: ClassVar[bool] = True  # clients may count by their examples
    fixed_frame_size: ClassVar[bool] = (
        False  # frames have one size, and no density that could change
    )
    supports_clipping: ClassVar[bool] = (
        False  # adds updates one by one, and so can bound the norm of each
    )
    replaces_server_optimizer: ClassVar[bool] = (
        False  # takes the server's step itself; has an option `momentum`
    )
    decays_in_server_step: ClassVar[bool] = (
        False  # weight decay is part of the server's step, not of local SGD
    )
    asynchronous: ClassVar[bool] = False  # a round ends with the first answers, whenever asked for
    allocation: np.ndarray | None = None  # 0/1 [n, n]: the partitions of each cohort member

    def __init__(
        self,
        config: StrategyConfig,
        layout: Layout,
        *,
        options: Any = None,
        warn: Callable[[str], None] = lambda sentence: None,
    ):
        self.options, self.warn = options or self.Options(), warn
        self.model_layout, self.layout = layout, self.client_algorithm.global_layout(layout)
        self.config = config = with_memories(config, self.layout.numel)
        self.uplink, self.downlink = codec(config.uplink), codec(config.downlink)
        self._check_settings()
        # Made like those of the clients; it keeps nothing.
        self.memory = memory(config.memory, self.uplink, self.layout.numel, self.layout)
        self.counterpart = self._counterpart()  # of the clients' memories, if both sides keep state
        self.schedule = self._schedule()

    @property
    def cohort_size(self) -> int:
        """Clients in a cohort of the run; 0 where the number of clients is not known."""
        return cohort_size(self.config.participation, self.config.clients)

    # What an algorithm decides.

    @classmethod
    def client_for(cls, options: Any) -> ClientAlgorithm:
        """Return the client half for these options of the strategy."""
        return cls.client_algorithm

    @classmethod
    def defaults(cls, options: Any) -> Mapping[str, str]:
        """Return defaults for options of a run that are left unset, by the names of the fields of `fedcomp.config.RunConfig`."""
        return {}

    @abstractmethod
    def aggregate(self, updates: RoundUpdates, into: Tensor) -> Aggregation:
        """Write the cohort's update into the zeros `into` [numel]."""

    def select_clients(self, clients: Sequence[int], round: int, fingerprint: str) -> list[int]:
        """Return the cohort of a round, of the logical ids that can be reached. `fingerprint`: of the model that the round starts from."""
        return sample_cohort(clients, self.config.participation, self.config.seed, round)

    def phases(self, round: int) -> Iterable[Phase]:
        """Return the exchanges of a round, in order. A client is asked in a later phase if it was accepted in the one before."""
        return (Phase(),)

    def announce(
        self, phase: Phase, client: int, before: Mapping[str, Sequence[AcceptedUpdate]]
    ) -> Mapping[str, bytes]:
        """Return what a client is told at the start of a phase, given what the phases before brought. Its bytes are counted."""
        return {}

    def open(self, phase: Phase, frames: Sequence[bytes]) -> list[Update | FrameError]:
        """Read the frames of a phase; a FrameError stands in the place of a bad one."""
        return self.uplink.open_batch(frames, self.layout.numel, self.layout)

    def check_frame(self, phase: Phase, client: int, frame: bytes) -> None:
        """Raise FrameError for a frame that this client cannot mean, though it can be read."""

    def on_phase_end(self, result: PhaseResult) -> Mapping[int, str]:
        """Return the clients to leave out although each update is valid by itself, with the reason."""
        return {}

    def reject(self, accepted: Sequence[AcceptedUpdate]) -> Mapping[int, str]:
        """Return the clients whose updates of the last phase are not aggregated, with the reason. They keep what they sent."""
        return {}

    def returned_frame(self, accepted: AcceptedUpdate) -> bytes:
        """Return a frame of what `aggregate` dropped of an accepted update, b"" for nothing. Its bytes are counted.

        The frame is of the uplink codec, unless the clients' memory reads another.
        """
        return b""

    @property
    def suspicion(self) -> Mapping[int, float]:
        """The share 0..1 of each client's votes that lost by a wide margin, by logical id; {} without votes."""
        return {}

    def on_round_end(self, round: int, broadcast: bytes | None) -> None:
        """Keep what `aggregate` made of the round if there is a frame to broadcast; else the model has not moved."""

    def set_identity(self, run: str, key_of: Callable[[int], bytes], options: str) -> None:
        """Set what clients sign: the name of the run, the public key (PEM) of each client, and the options that clients are told."""

    # Checkpoints.

    def take_changes(self) -> Changes:
        """Return what the algorithm keeps, as far as it changed since the last call."""
        return {}, {}

    def restore(self, vector: ReadVector, value: ReadValue) -> None:
        """Continue from a checkpoint, whose vectors and values of `take_changes` are read by these."""

    # Settings.

    def _check_settings(self) -> None:
        """Raise ConfigError for settings that do not suit the algorithm."""
        config, steps = self.config, optimizer(self.config.server_optimizer)
        if config.clip_update and not self.supports_clipping:
            raise ConfigError(
                f"--strategy {self.name} adds no updates one by one, whose norms it could bound; leave --clip-update out, or "
                "use --strategy average"
            )
        if self.allowed_uplinks and not isinstance(self.uplink.unscoped, self.allowed_uplinks):
            raise ConfigError(
                f"--strategy {self.name} does not work with --uplink {self.uplink}; leave --uplink out, or give "
                f"{self.allowed_uplinks[0].name}"
            )
        given = spec.parse(config.memory).parts[0].name
        if self.required_memory not in ("", given):
            raise ConfigError(
                f"--strategy {self.name} does not work with memory '{given}'; leave --memory out, or give {self.required_memory}"
            )
        if config.weights != "uniform" and not self.supports_weights:
            raise ConfigError(
                f"--strategy {self.name} counts every client once; leave --weights out, or give uniform"
            )
        densities = (
            config.density_warmup,
            config.density_schedule,
            config.budget_bytes,
            config.budget_s,
        )
        if self.fixed_frame_size and any(densities):
            raise ConfigError(
                f"--strategy {self.name} sends frames of one size; leave --density-warmup, --density-schedule and --budget out"
            )
        if self.replaces_server_optimizer and not steps.plain:
            raise ConfigError(
                f"--strategy {self.name} has a step of its own; leave --server-optimizer out, or for momentum give "
                f"--strategy {self.name}:momentum=0.9"
            )
        if steps.scale_free and config.server_lr >= 1:
            raise ConfigError(
                f"--server-optimizer {steps.name} moves every coordinate by about --server-lr, and that is "
                f"{config.server_lr:g}; give a smaller one, such as --server-lr 0.01"
            )

    def _counterpart(self) -> Counterpart | None:
        """Return the server's side of the clients' memories. Raises ConfigError for a memory that does not suit the run."""
        name, own = self.memory.name, self.config.momentum
        if own and (applied := getattr(self.memory.options, "momentum", 0)):
            raise ConfigError(
                f"--momentum {own:g} and --memory {name} with momentum={applied:g} both apply momentum to an update; "
                f"leave --momentum out, or give --memory {name}:momentum=0"
            )
        if self.memory.warning:
            self.warn(self.memory.warning)
        if self.memory.required_strategy not in ("", self.name):
            raise ConfigError(
                f"--memory {name} has no frames for --strategy {self.name}; "
                f"give --strategy {self.memory.required_strategy}, or --memory none"
            )
        if self.memory.counterpart is None:
            return None
        counterpart = self.memory.counterpart(self.memory)
        steps = optimizer(self.config.server_optimizer)
        if counterpart.compares_model_steps and steps.scale_free:
            raise ConfigError(
                f"--memory {name} compares updates with the steps of the model, which have another unit under "
                f"--server-optimizer {steps.name}; use sgd, or another --memory"
            )
        return counterpart

    def _schedule(self) -> Schedule:
        """Return what clients are told by round. Raises ConfigError for a schedule that does not suit the run."""
        config, layout = self.config, self.layout
        if (config.density_warmup or config.density_schedule) and self.memory.selects_coordinates:
            asked = "--density-warmup" if config.density_warmup else DENSITY_SCHEDULE
            raise ConfigError(
                f"{asked} has no meaning for memory '{self.memory.name}', which chooses what is sent; leave it out"
            )
        schedule = Schedule(config, self.uplink, layout)
        for density in schedule.densities(config.rounds or config.horizon):
            memory(config.memory, at_density(self.uplink, density), layout.numel, layout)
        return schedule
