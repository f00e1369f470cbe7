"""The round loop: draw a cohort, exchange messages with it, aggregate the updates, broadcast the new model.

A strategy chooses the cohort (the clients of a round) and the phases (exchanges of messages), and aggregates the accepted updates. The
round loop chooses for each client the smallest download that brings it up to date, checks every report (a client's answer) as it arrives,
ends the phases, applies the server optimizer, and creates the broadcast (the encoded change of the model).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from .. import seeds
from ..callbacks import Rejection
from ..codecs.frame import unwrap_decay
from ..codecs.update import Dense
from ..errors import NonFiniteError
from ..kernels.sums import sum_squares
from ..messages import FAILED, Assignment, ClientRoundConfig, Report
from ..profiling import timed
from ..strategies.base import (
    AcceptedByPhase,
    AcceptedUpdate,
    Aggregation,
    Phase,
    RoundCompletion,
    RoundStrategy,
    RoundUpdates,
)
from ..strategies.optimizers import optimizer
from .broadcasts import Broadcast, Broadcasts
from .exchange import Exchange, Traffic
from .transport import Transport

LARGE_BYTES = 1 << 20  # dense updates of at least this size are freed once they are aggregated


@dataclass(frozen=True)
class RoundResult:
    """The result of a round. To save memory, large dense updates in `accepted` have neither values nor encoded bytes."""

    round: int
    cohort: list[int]
    accepted: list[AcceptedUpdate]
    rejections: list[Rejection]
    traffic: Traffic
    broadcast: Broadcast | None  # None if the round did not update the model
    # By client: fraction of its votes that contradicted a large majority of clients. Empty if the strategy has no votes.
    suspicion: Mapping[int, float] = field(default_factory=dict)
    simulated_s: float | None = None  # duration in virtual seconds, None in real time
    clipped: int = 0  # number of accepted updates that were clipped

    @property
    def train_loss(self) -> float | None:
        losses = [a.loss for a in self.accepted if math.isfinite(a.loss)]
        return sum(losses) / len(losses) if losses else None


class RoundLoop:
    """A loop that runs the rounds of a strategy, sends its messages over a transport, and records the state of each client.

    `gather` returns the ids of the clients from which a cohort may be drawn, in ascending order, and may wait for clients; by default, it
    returns all connected clients. `on_answer(round, answered, asked)` is called after each answer: `answered` of the `asked` clients have
    answered. `bandwidths`: uplink speeds by client, in bytes per second, if known. `evaluates(round)` returns whether the clients of a
    round evaluate the model that they receive.

    Updates are summed in the order of client ids, not in the order of their arrival, so that rounding errors are reproducible.
    """

    def __init__(
        self,
        strategy: RoundStrategy,
        broadcasts: Broadcasts,
        transport: Transport,
        *,
        gather: Callable[[], Sequence[int]] | None = None,
        on_answer: Callable[[int, int, int], None] = lambda round, answered, asked: None,
        bandwidths: Mapping[int, float] | None = None,
        evaluates: Callable[[int], bool] = lambda round: False,
    ):
        self.strategy, self.broadcasts, self.config = strategy, broadcasts, strategy.config
        self.transport, self.clock = transport, transport.clock
        self.gather = gather or transport.clients
        self.on_answer, self.evaluates = on_answer, evaluates
        self.bandwidths = dict(bandwidths or {})
        self.optimizer = optimizer(self.config.server_optimizer)
        self.versions: dict[int, str] = {}  # by client: last model version that it reported
        self.tickets: dict[int, str] = {}  # by client: ticket (hash) of its last accepted update
        # By client: number of examples in its last accepted report.
        self.examples: dict[int, int] = {}
        # By client: frame (encoded vector) with the coordinates of its last accepted update that the server did not use. An entry is
        # removed once the client has received it.
        self.dropped: dict[int, bytes] = {}
        self.changed_clients: set[int] = set()  # clients of the rounds since the last checkpoint

    @property
    def model(self) -> Tensor:
        """The model's weights [n], as a view of the vector that the server broadcasts."""
        return self.strategy.client_algorithm.model_weights(self.broadcasts.weights)

    def rounds(self, rounds: Iterable[int]) -> Iterator[RoundResult]:
        """Run rounds, and yield the result of each round before the clients receive the round's broadcast."""
        for round in rounds:
            with timed("round"):
                results = [self.run_round(round)]
            yield results.pop()  # no reference is kept, so the caller can free the result

    def run_round(self, round: int) -> RoundResult:
        strategy = self.strategy
        cohort = strategy.select_clients(self.gather(), round, self.broadcasts.fingerprint)
        traffic = Traffic()
        rejected: dict[int, Rejection] = {}
        phases: dict[str, list[AcceptedUpdate]] = {}
        configs = strategy.schedule.for_clients(round, cohort, self.bandwidths)
        completion = RoundCompletion(self.config.quorum, self.config.timeout_s)
        for phase in strategy.phases(round):
            exchange, assignments = self.start_phase(round, phase, configs, phases, traffic)
            self.broadcasts.release_downloads()  # `assignments` still refers to the downloads
            ends = phase.completion or completion
            exchange.run(assignments, ends, partial(self.on_answer, round))
            phases[phase.name] = exchange.close()
            rejected |= exchange.rejected
            configs = {a.client: configs[a.client] for a in phases[phase.name]}
            del exchange, assignments  # frees the downloads
        return self.close(round, cohort, phases, rejected, traffic)

    # The steps of a round.

    def start_phase(
        self,
        round: int,
        phase: Phase,
        configs: Mapping[int, ClientRoundConfig],
        before: AcceptedByPhase,
        traffic: Traffic,
    ) -> tuple[Exchange, list[Assignment]]:
        """Return the exchange of a phase, and the assignments to send to the clients in `configs`. Count their bytes in `traffic`.

        `before`: accepted updates of the earlier phases of the round.
        """
        b, strategy, counterpart = self.broadcasts, self.strategy, self.strategy.counterpart
        assignments = []
        for client, config in configs.items():
            version = self.versions.get(client, b.first)
            download = b.download(version)
            traffic.versions_behind.setdefault(client, b.versions_behind(version))
            announced = dict(strategy.announce(phase, client, before))
            if counterpart is not None and not before:
                announced |= counterpart.announce()
            flat = [part for name, value in announced.items() for part in (name.encode(), value)]
            returned = self.dropped.get(client, b"")
            first = client not in self.versions
            attached = [*flat, returned]
            traffic.add_download(client, download, attached, first=first, newest=b.newest_bytes)
            assignments.append(
                Assignment(
                    round,
                    phase.name,
                    client,
                    download.form,
                    download.base,
                    b.version,
                    b.fingerprint,
                    download.frames,
                    accepted=self.tickets.get(client, ""),
                    announced=flat,
                    returned=returned,
                    evaluate=int(not before and self.evaluates(round)),
                    **vars(config),
                )
            )
        exchange = Exchange(self.transport, b, strategy, phase, traffic, self._on_report)
        return exchange, assignments

    def close(
        self,
        round: int,
        cohort: list[int],
        phases: dict[str, list[AcceptedUpdate]],
        rejected: Mapping[int, Rejection],
        traffic: Traffic,
    ) -> RoundResult:
        """Aggregate the updates of the last phase, update the model, and record which client updates were accepted.

        The last phase is removed from `phases`, so that its updates can be freed during the round.
        """
        strategy, counterpart = self.strategy, self.strategy.counterpart
        name, last = phases.popitem()
        refused = dict(strategy.reject(last))
        last = [a for a in last if a.client not in refused]
        if counterpart is not None:
            counterpart.set_rates(strategy.schedule.rate(round), {a.client: a.rate for a in last})
        aggregation, broadcast = Aggregation(), None
        if last:
            try:
                aggregation, update = self._aggregate(round, {**phases, name: last})
                if counterpart is None:
                    # Free the updates' memory before the broadcast is made.
                    last = [_without_values(a) for a in last]
                broadcast = self._update_model(round, update, aggregation.decay)
            except NonFiniteError:
                reason = "the sum of this round's updates is not finite"
                refused |= {a.client: reason for a in last}
                last = []
        self.tickets |= {a.client: a.ticket for a in last if a.ticket}
        self.examples |= {a.client: a.examples for a in last}
        if counterpart is not None:
            counterpart.settle(
                [(a.client, a.update, a.fresh) for a in last], self._squared_step(broadcast)
            )
        self.dropped |= {a.client: frame for a in last if (frame := strategy.returned_frame(a))}
        self.changed_clients |= set(cohort)
        left_out = {c: Rejection(c, "aggregate", reason) for c, reason in refused.items()}
        result = RoundResult(
            round,
            cohort,
            last,
            [rejection for _, rejection in sorted((dict(rejected) | left_out).items())],
            traffic,
            broadcast,
            dict(strategy.suspicion),
            self.clock.take(),
            aggregation.clipped,
        )
        strategy.on_round_end(round, broadcast.frame if broadcast is not None else None)
        return result

    def _on_report(self, report: Report) -> None:
        """Record the client's model version. Unless the client failed, it has received its frame in `dropped`, which is then removed."""
        if report.version:
            self.versions[report.client] = report.version
        if report.kind != FAILED:
            self.dropped.pop(report.client, None)

    def _aggregate(self, round: int, phases: AcceptedByPhase) -> tuple[Aggregation, Tensor]:
        """Aggregate the updates. Return the strategy's Aggregation, and the step [numel] of the server optimizer."""
        self.broadcasts.release_downloads()
        update = torch.zeros(self.broadcasts.layout.numel, dtype=torch.float32)
        estimated, weights = self._with_estimates(phases), self.broadcasts.weights
        updates = RoundUpdates(round, estimated, weights, self.examples, len(self.versions))
        # No warnings about overflow: `Broadcasts.prepare` raises NonFiniteError if a value is not finite.
        with timed("aggregation"), np.errstate(over="ignore", invalid="ignore"):
            aggregation = self.strategy.aggregate(updates, update)
            return aggregation, self.optimizer.step(update)

    def _update_model(self, round: int, update: Tensor, decay: float) -> Broadcast | None:
        """Update the model by a broadcast, and return it, or None if there is nothing to send.

        `update`: the step [numel] of the server optimizer, which is multiplied by --server-lr in place. `decay`: factor by which the
        weights are multiplied before the step. Raises NonFiniteError, and leaves the model unchanged, if the step is not finite.
        """
        with timed("downlink"):
            seed = seeds.key(self.config.seed, "downlink", round)
            update.mul_(self.config.server_lr)
            broadcast = self.broadcasts.prepare(round, update, seed, decay)
            if broadcast is not None:
                self.broadcasts.publish(broadcast)
                self.optimizer.commit()
        return broadcast

    def _with_estimates(self, phases: AcceptedByPhase) -> AcceptedByPhase:
        """Replace the updates of the last phase by estimates if the clients' memory has a server half, the counterpart.

        The counterpart computes the estimates. It may add estimates for clients outside of the round.
        """
        counterpart = self.strategy.counterpart
        if counterpart is None:
            return phases
        name, last = list(phases.items())[-1]
        estimates = {}
        for a in last:
            estimate = counterpart.estimate(a.client, a.update, a.fresh)
            estimates[a.client] = replace(a, update=estimate)
        for client, update in counterpart.absent([*estimates]):
            examples = self.examples[client]
            estimates[client] = AcceptedUpdate(client, update, examples, math.nan, "", fresh=False)
        return {**phases, name: [estimates[client] for client in sorted(estimates)]}

    def _squared_step(self, broadcast: Broadcast | None) -> float:
        """Return ‖step / server_lr‖² for the model's step in a round, or 0 without a broadcast.

        The counterpart compares the result with ‖update‖² of the clients.
        """
        if broadcast is None:
            return 0.0
        layout = self.broadcasts.layout
        _, frame = unwrap_decay(broadcast.frame, layout.numel)
        step = self.broadcasts.codec.decode(frame, numel=layout.numel, layout=layout)
        return sum_squares(step) / self.config.server_lr / self.config.server_lr


def _without_values(accepted: AcceptedUpdate) -> AcceptedUpdate:
    """Return a large dense update without encoded bytes and with NaN for its values, and any other update unchanged."""
    update = accepted.update
    if not isinstance(update, Dense) or update.values.nbytes < LARGE_BYTES:
        return accepted
    nothing = np.broadcast_to(np.float32(np.nan), update.numel)
    return replace(accepted, update=Dense(nothing), frame=b"")
