"""The round loop: sample, exchange, aggregate, broadcast. A Flower strategy that works on any Flower `Grid`.

Flower's own loop starts at round 1, has no checkpoint and ends a run at the first malformed reply; this one resumes,
checks every reply as it comes, and goes on. A strategy for an algorithm overrides `aggregate`, and where it needs
more than one exchange a round, `phases` and `announce`.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from .. import seeds
from ..codecs import Update, codec, decay
from ..config import RunConfig
from ..errors import ConfigError, FrameError, MismatchError, NonFiniteError
from ..kernels.sums import sum_squares
from ..layout import Layout
from ..memories import Counterpart, chooses, memory, momentum, only_under, with_memories
from ..memories.base import Changes, NoOptions
from ..messages import FAILED, Assignment, Report
from ..observe import Rejection
from ..profiling import timed
from .broadcasts import Broadcast, Broadcasts
from .client_algorithm import ClientAlgorithm
from .clock import Clock
from .closing import Closing, QuorumOrDeadline
from .cohort import Roster, by_node, ids, sample
from .exchange import Accepted, Exchange, Traffic
from .optimizers import optimizer
from .schedule import DENSITY_SCHEDULE, Schedule, Terms


@dataclass(frozen=True)
class Rules:
    """What a round is made of. The fields are those of `fedcomp.config.RunConfig`, where their effects are told."""

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
    timeout_s: float | None = (
        None  # seconds that a phase may take, `deadline` of the run; None = as long as it does
    )
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

    name: str = "train"
    closing: Closing | None = None  # None: as the run's quorum and deadline say


@dataclass(frozen=True)
class Outcome:
    """What a round came to."""

    round: int
    cohort: list[int]
    accepted: list[Accepted]
    rejections: list[Rejection]
    traffic: Traffic
    broadcast: Broadcast | None  # None: no update was accepted, the model stays
    suspicion: Mapping[int, float] = field(
        default_factory=dict
    )  # by client, 0..1; of those strategies that judge votes
    simulated_s: float | None = None  # virtual seconds that it took; None: time is real
    clipped: int = 0  # of the accepted: whose norm was too large

    @property
    def train_loss(self) -> float | None:
        losses = [a.loss for a in self.accepted if math.isfinite(a.loss)]
        return sum(losses) / len(losses) if losses else None


class RoundStrategy(Strategy):
    """A model on the server, moved round by round by the frames of clients.

    `roster` tells who can be reached and under which logical id; ids, not nodes or the order of answers, decide the
    cohort and the order of sums. `on_answer(round, answered, asked)` hears of each reply.
    """

    name: ClassVar[str]
    Options: ClassVar[type] = NoOptions  # a frozen dataclass: what `name:option=value` may say
    client_algorithm: ClassVar[ClientAlgorithm] = ClientAlgorithm()  # the client half
    fewest: int = 1  # clients with whom a round can move the model
    notice: str = ""  # what a run says of it before its first round
    feeds_back: bool = False  # what it reads of sketches is subtracted from what waits in them
    clips: ClassVar[bool] = False  # adds updates one by one, and so can bound the norm of each
    own_step: ClassVar[bool] = (
        False  # decides the step itself, with an option `momentum`, and leaves none to a server optimizer
    )
    decays: ClassVar[bool] = False  # weight decay is part of the server's step, not of local SGD
    allocation: np.ndarray | None = (
        None  # 0/1 [n, n], of strategies that hand out partitions: row i is what the cohort's i-th member holds
    )

    def __init__(
        self,
        rules: Rules | None = None,
        *,
        options: Any = None,
        roster: Roster = by_node,
        on_answer: Callable[[int, int, int], None] = lambda round, answered, asked: None,
    ):
        self.rules, self.options, self.roster, self.on_answer = (
            rules or Rules(),
            options or self.Options(),
            roster,
            on_answer,
        )
        self.uplink, self.downlink = codec(self.rules.uplink), codec(self.rules.downlink)
        if self.rules.clip_update and not self.clips:
            raise ConfigError(
                f"strategy '{self.name}' adds no updates one by one, whose norms it could bound; leave --clip-update out, or "
                "use --strategy average"
            )
        if self.rules.momentum and (applied := momentum(self.rules.memory)):
            name = self.rules.memory.partition(":")[0]
            raise ConfigError(
                f"--momentum {self.rules.momentum:g} and --memory {name} with momentum={applied:g} both apply momentum to an update; "
                f"leave --momentum out, or give --memory {name}:momentum=0"
            )
        self.optimizer = optimizer(self.rules.server_optimizer)
        if self.own_step and not self.optimizer.plain:
            raise ConfigError(
                f"strategy '{self.name}' has a step of its own; leave --server-optimizer out, or for momentum give "
                f"--strategy {self.name}:momentum=0.9"
            )
        if self.optimizer.unitless and self.rules.server_lr >= 1:
            raise ConfigError(
                f"--server-optimizer {self.optimizer.name} moves every coordinate by about --server-lr, and that is "
                f"{self.rules.server_lr:g}; give a smaller one, such as --server-lr 0.01"
            )
        self.versions: dict[int, str] = {}  # that each client last reported
        self.tickets: dict[int, str] = {}  # of each client's last accepted proposal
        self.examples: dict[int, int] = {}  # that each client counted when it was last accepted
        self.dropped: dict[
            int, bytes
        ] = {}  # of that proposal, as a frame, until the client was told
        self.pace: Callable[[int, int], float] | None = (
            None  # virtual seconds for (round, client), in a simulation; None = time is real
        )
        self.clock = Clock()  # that exchanges go by
        self.bandwidths: dict[
            int, float
        ] = {}  # bytes a second that clients declared for their uplink
        self.warn: Callable[[str], None] = lambda sentence: (
            None
        )  # hears what is found out while rounds go on, each once
        self.round = 0  # that is being closed, for `aggregate` and those after it
        self.clipped = 0  # updates of that round, as far as `aggregate` has found
        self.broadcasts: Broadcasts
        self.layout: Layout  # of updates and broadcasts
        self.model_layout: Layout
        self.schedule: Schedule
        self.counterpart: Counterpart | None = (
            None  # of the clients' memories, if both sides keep something
        )

    # What an algorithm decides.

    @classmethod
    def client_for(cls, options: Any) -> ClientAlgorithm:
        """Return the client half for these options of the strategy."""
        return cls.client_algorithm

    @classmethod
    def defaults(cls, options: Any) -> Mapping[str, str]:
        """What stands for options of a run that are not given, by the names of the fields of `fedcomp.config.RunConfig`."""
        return {}

    @abstractmethod
    def aggregate(self, phases: Mapping[str, Sequence[Accepted]], into: Tensor) -> None:
        """Write the cohort's update into the zeros `into` [numel]. The accepted updates come by phase, in the order of the client ids."""

    def phases(self, round: int) -> Iterable[Phase]:
        """The exchanges of a round, in order. A client is asked in a later phase if it was accepted in the one before."""
        return (Phase(),)

    def choose(self, clients: Sequence[int], round: int) -> list[int]:
        """The cohort of a round, of the logical ids that can be reached."""
        return sample(clients, self.rules.participation, self.rules.seed, round)

    def expected(self, clients: Sequence[int], round: int) -> list[int]:
        """Who will be asked in a round to come, as far as the seed alone tells. Changes nothing."""
        return sample(clients, self.rules.participation, self.rules.seed, round)

    def announce(
        self, phase: Phase, client: int, before: Mapping[str, Sequence[Accepted]]
    ) -> Mapping[str, bytes]:
        """What a client is told at the start of a phase, given what the phases before brought. Its bytes are counted."""
        return {}

    def open(self, phase: Phase, frames: Sequence[bytes]) -> list[Update | FrameError]:
        """What frames of a phase say; a FrameError in the place of one that is bad."""
        return self.uplink.open_batch(frames, self.layout.numel, self.layout)

    def for_clients(self, config: RunConfig) -> RunConfig:
        """Return the options that clients train with."""
        return replace(config, weight_decay=0.0) if self.decays else config

    def decay(self, round: int) -> float:
        """Return the factor, a float32, that a round multiplies the weights by before it adds its step."""
        return 1.0

    def look_over(self, phase: Phase, exchange: Exchange) -> None:
        """A phase is over: answers that were accepted one by one, and do not go together, may be rejected here."""

    def returned(self, accepted: Accepted) -> bytes:
        """A frame, of the uplink codec unless the clients' memory reads another, of what `aggregate` dropped of an accepted update.

        b"" for nothing. Its bytes are counted.
        """
        return b""

    def know(self, run: str, key_of: Callable[[int], bytes], options: str) -> None:
        """The name of the run, the public key, as PEM, with which a client came, and what clients are told of options: what they sign."""

    def check_cohort(self, clients: int) -> None:
        """Raise ConfigError for cohorts of so many clients, if no round of theirs could move the model."""

    def refusal(self, accepted: Sequence[Accepted]) -> str:
        """Why a round in whose last phase these were accepted moves nothing, in words; "" if it may. They keep what they sent."""
        return ""

    def suspicion(self) -> Mapping[int, float]:
        """How often each client's vote has lost by a wide margin, as a share of its votes 0..1, by logical id; {} where nobody votes."""
        return {}

    def closed(self, outcome: Outcome) -> None:
        """A round is over. What `aggregate` made of it is kept only if there was a broadcast: else the model has not moved."""

    def take_changes(self) -> Changes:
        """What an algorithm keeps of its own and has changed since the last call, for the checkpoint."""
        return {}, {}

    def restore(
        self, vector: Callable[[str], Tensor | None], value: Callable[[str], bytes | None]
    ) -> None:
        """Stand where a checkpoint stood, whose vectors and values of `take_changes` are read by these."""

    # The loop.

    def begin(self, weights: Tensor, layout: Layout) -> None:
        """Stand before round 1 with initial weights [numel], float32, on the CPU; they are taken over, not copied."""
        self.model_layout = layout
        self.layout = layout = self.client_algorithm.global_layout(layout)
        self.rules = with_memories(self.rules, layout.numel)
        try:
            keeper = memory(self.rules.downlink_memory, self.downlink, layout.numel, layout)
        except MismatchError as error:
            error.memory, error.uplink = "--downlink-memory", "--downlink"
            raise
        if keeper.counterpart is not None:
            raise ConfigError(
                f"--downlink-memory {keeper.name} keeps something on both sides, clients keep the model alone; use residual"
            )
        clients_memory = memory(self.rules.memory, self.uplink, layout.numel, layout)
        self.counterpart = clients_memory.counterpart and clients_memory.counterpart(clients_memory)
        if sentence := clients_memory.warning():
            self.warn(sentence)
        if keeper.only_under:
            raise ConfigError(
                f"--downlink-memory {keeper.name} makes frames of several phases, and a broadcast has one; use residual"
            )
        if only_under(self.rules.memory) not in ("", self.name):
            raise ConfigError(
                f"memory '{self.rules.memory}' has no frames for strategy '{self.name}'; "
                f"give --strategy {only_under(self.rules.memory)}, or --memory none"
            )
        if (
            self.counterpart is not None
            and self.counterpart.measures_steps
            and self.optimizer.unitless
        ):
            raise ConfigError(
                f"memory '{self.rules.memory}' compares updates with the steps of the model, which have another unit under "
                f"--server-optimizer {self.optimizer.name}; use sgd, or another --memory"
            )
        self.optimizer = optimizer(self.rules.server_optimizer)
        cache_bytes = int(self.rules.cache * 4 * layout.numel)
        self.broadcasts = Broadcasts(
            self.client_algorithm.initial_global_state(weights),
            layout,
            self.downlink,
            keeper,
            cache_bytes,
        )
        rules = self.rules
        if (rules.density_warmup or rules.density_schedule) and chooses(rules.memory):
            asked = "--density-warmup" if rules.density_warmup else DENSITY_SCHEDULE
            raise ConfigError(
                f"{asked} has no meaning for memory '{rules.memory}', which chooses what is sent; leave it out"
            )
        self.schedule = Schedule.of(rules, self.uplink, layout)
        for density in self.schedule.densities(rules.rounds or rules.horizon):
            memory(rules.memory, self.uplink.at_density(density), layout.numel, layout)

    def rounds(self, grid: Grid, rounds: Iterable[int]) -> Iterator[Outcome]:
        """Run these rounds, yielding after each. The broadcast of a round is sent in the next: write it down in between."""
        for round in rounds:
            yield self.run_round(grid, round)

    def run_round(self, grid: Grid, round: int) -> Outcome:
        nodes = self.roster(grid)
        cohort = self.choose(ids(nodes), round)
        traffic, results, rejected = Traffic(), {}, {}
        asked, terms = cohort, self.schedule.terms(round, cohort, self.bandwidths)
        for phase in self.phases(round):
            exchange = self._exchange(grid, round, phase, traffic)
            messages = [
                self._message(exchange, client, nodes[client], round, phase, results, terms[client])
                for client in asked
            ]
            exchange.run(
                messages, phase.closing or QuorumOrDeadline(self.rules.quorum, self.rules.timeout_s)
            )
            self.look_over(phase, exchange)
            results[phase.name] = list(exchange.answers())
            rejected |= exchange.rejected
            asked = [a.client for a in results[phase.name]]
        return self._close(round, cohort, results, rejected, traffic)

    def _exchange(self, grid: Grid, round: int, phase: Phase, traffic: Traffic) -> Exchange:
        return Exchange(
            grid,
            self.broadcasts,
            lambda frames: self.open(phase, frames),
            traffic,
            self._hear,
            lambda answered, asked: self.on_answer(round, answered, asked),
            in_step=self.counterpart is not None,
            clock=self.clock,
        )

    def _message(
        self,
        exchange: Exchange,
        client: int,
        node: int,
        round: int,
        phase: Phase,
        before: Mapping[str, Sequence[Accepted]],
        terms: Terms,
    ) -> Message:
        b, accepted = self.broadcasts, self.tickets.get(client, "")
        held = self.versions.get(client, b.first)
        download = b.download(held)
        exchange.traffic.behind.setdefault(client, b.behind(held))
        told = dict(self.announce(phase, client, before))
        if self.counterpart is not None and not before:
            told |= self.counterpart.announce()
        announced = [part for name, value in told.items() for part in (name.encode(), value)]
        returned = self.dropped.get(client, b"")
        exchange.traffic.sent(
            client,
            download,
            [*announced, returned],
            first=client not in self.versions,
            newest=b.newest_bytes,
        )
        form, base, frames = download.form, download.base, download.frames
        assignment = Assignment(
            round,
            phase.name,
            client,
            form,
            base,
            b.version,
            b.fingerprint,
            frames,
            accepted,
            announced,
            terms.density,
            terms.lr,
            returned,
            terms.steps,
            terms.batch_size,
        )
        return exchange.message(assignment, node)

    def _hear(self, report: Report) -> None:
        if report.version:
            self.versions[report.client] = report.version
        if report.kind != FAILED:
            self.dropped.pop(report.client, None)

    def _close(
        self,
        round: int,
        cohort: list[int],
        results: dict[str, list[Accepted]],
        rejected: dict[int, Rejection],
        traffic: Traffic,
    ) -> Outcome:
        self.round, self.clipped, last = round, 0, list(results.values())[-1]
        if self.counterpart is not None:
            self.counterpart.rate = self.schedule.rate(round)
            self.counterpart.rates = {a.client: a.rate for a in last}
        if last and (reason := self.refusal(last)):
            rejected |= {a.client: Rejection(a.client, "aggregate", reason) for a in last}
            last = []
        try:
            broadcast = self._advance(round, results) if last else None
        except NonFiniteError:
            rejected |= {
                a.client: Rejection(
                    a.client, "aggregate", "the sum of this round's updates is not finite"
                )
                for a in last
            }
            last, broadcast = [], None
        self.tickets |= {a.client: a.ticket for a in last if a.ticket}
        self.examples |= {a.client: a.examples for a in last}
        if self.counterpart is not None:
            self.counterpart.settle(
                [(a.client, a.update, a.fresh) for a in last], self._moved(broadcast)
            )
        self.dropped |= {a.client: frame for a in last if (frame := self.returned(a))}
        rejections = [rejected[client] for client in sorted(rejected)]
        outcome = Outcome(
            round,
            cohort,
            last,
            rejections,
            traffic,
            broadcast,
            dict(self.suspicion()),
            self.clock.take(),
            self.clipped,
        )
        self.closed(outcome)
        return outcome

    def _advance(self, round: int, results: dict[str, list[Accepted]]) -> Broadcast | None:
        update = torch.zeros(self.layout.numel, dtype=torch.float32)
        with (
            timed("aggregation"),
            np.errstate(over="ignore", invalid="ignore"),
        ):  # what leaves float32's range is found by the next line
            self.aggregate(self._estimated(results), update)
            update = self.optimizer.step(update)
        with timed("downlink"):
            broadcast = self.broadcasts.prepare(
                round,
                update.mul_(self.rules.server_lr),
                seeds.key(self.rules.seed, "downlink", round),
                self.decay(round),
            )
            if broadcast is not None:
                self.broadcasts.publish(broadcast)
                self.optimizer.commit()
        return broadcast

    def _estimated(self, results: dict[str, list[Accepted]]) -> dict[str, list[Accepted]]:
        """Results whose last phase has the counterpart's estimates, those of absent clients included, where there is a counterpart."""
        if self.counterpart is None:
            return results
        name, last = list(results.items())[-1]
        terms = {
            a.client: replace(a, update=self.counterpart.estimate(a.client, a.update, a.fresh))
            for a in last
        }
        for client, update in self.counterpart.absent([*terms]):
            terms[client] = Accepted(
                client, update, self.examples[client], math.nan, "", fresh=False
            )
        return results | {name: [terms[client] for client in sorted(terms)]}

    def _moved(self, broadcast: Broadcast | None) -> float:
        """‖step of the model‖² of a round, in units of the clients' updates."""
        if broadcast is None:
            return 0.0
        _, frame = decay.unwrap(broadcast.frame, self.layout.numel)
        step = self.downlink.decode(frame, numel=self.layout.numel, layout=self.layout)
        return sum_squares(step) / self.rules.server_lr / self.rules.server_lr

    # Flower's own door: the same loop, driven through the methods of its Strategy.

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Flower's entry: run `num_rounds` rounds from `initial_arrays`; a phase takes `timeout` seconds unless the rules say otherwise.

        Evaluation is the server's, through `evaluate_fn`; the two configs have no effect.
        """
        if self.rules.timeout_s is None:
            self.rules = replace(self.rules, timeout_s=timeout)
        self.rules = replace(self.rules, rounds=self.rules.rounds or num_rounds)
        layout, weights = vector_of(initial_arrays)
        self.begin(weights, layout)
        result = Result()
        for outcome in self.rounds(grid, range(1, num_rounds + 1)):
            result.arrays = self.arrays()
            result.train_metrics_clientapp[outcome.round] = _metrics(outcome)
            measured = evaluate_fn(outcome.round, result.arrays) if evaluate_fn else None
            if measured is not None:
                result.evaluate_metrics_serverapp[outcome.round] = measured
        return result

    @property
    def model(self) -> Tensor:
        """The weights of the model, by `model_layout`, not copied."""
        return self.client_algorithm.model_weights(self.broadcasts.weights)

    def arrays(self) -> ArrayRecord:
        """The model as Flower arrays, by the names of the layout."""
        views = self.model_layout.views(self.model)
        return ArrayRecord({name: Array(view.numpy().copy()) for name, view in views.items()})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of a round's first phase. `arrays` is not sent: clients get what they miss of this strategy's own model."""
        nodes = self.roster(grid)
        phase, *others = self.phases(server_round)
        if others:
            raise ConfigError(
                f"a round of '{self.name}' has {1 + len(others)} phases, too many for this hook; call start() or rounds()"
            )
        self._hooked = self._exchange(grid, server_round, phase, Traffic())
        self._cohort = self.choose(ids(nodes), server_round)
        terms = self.schedule.terms(server_round, self._cohort, self.bandwidths)
        return [
            self._message(
                self._hooked, client, nodes[client], server_round, phase, {}, terms[client]
            )
            for client in self._cohort
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Close a round of one phase that `configure_train` opened."""
        exchange = self._hooked
        exchange.receive_from_nodes(replies)
        for client in set(self._cohort) - exchange.accepted.keys() - exchange.rejected.keys():
            exchange.give_up(client, "no reply that Flower's own loop waits for")
        phase, *_ = self.phases(server_round)
        results = {phase.name: list(exchange.answers())}
        outcome = self._close(
            server_round, self._cohort, results, exchange.rejected, exchange.traffic
        )
        return self.arrays(), _metrics(outcome)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """No messages: the server evaluates."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        return None

    def summary(self) -> None:
        print(
            f"{type(self).__name__}: uplink {self.uplink}, downlink {self.downlink}, participation {self.rules.participation:g}"
        )


def vector_of(arrays: ArrayRecord) -> tuple[Layout, Tensor]:
    """The layout and the vector [numel] of Flower arrays. Raises ConfigError where one is not of floats."""
    values = {name: torch.from_numpy(array.numpy()) for name, array in arrays.items()}
    for name, value in values.items():
        if not value.is_floating_point():
            raise ConfigError(
                f"initial array '{name}' is of type {value.dtype}; give trainable parameters only"
            )
    layout = Layout.from_shapes({name: tuple(value.shape) for name, value in values.items()})
    return layout, torch.cat([value.reshape(-1).to(torch.float32) for value in values.values()])


def _metrics(outcome: Outcome) -> MetricRecord:
    values: dict[str, Any] = {
        "accepted": len(outcome.accepted),
        "rejected": len(outcome.rejections),
        "uplink-bytes": sum(outcome.traffic.uplink.values()),
        "downlink-bytes": sum(outcome.traffic.downlink.values()),
    }
    return MetricRecord(
        values | ({"train-loss": outcome.train_loss} if outcome.train_loss is not None else {})
    )
