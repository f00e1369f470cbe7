"""Local training of the clients of a session: it maps assignments to stacks of updates."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import DataError, ProtocolError
from ..messages import Assignment
from ..strategies.base import ClientAlgorithm
from ..tasks.data import Examples
from ..training.batches import plan_all_batches
from ..training.engine import DeviceResults, Engine, Job
from ..training.local_sgd import LocalSGD
from ..training.traces import NO_TRACES, Traces
from .partition_training import PartitionTraining, Shards
from .state import ClientState


class ClientResult(NamedTuple):
    """The result of one client's training, without its update."""

    assignment: Assignment
    loss: float
    buffers: dict[str, Tensor] | None
    traces: Traces
    lr_sum: float = 0.0  # sum of the learning rates of the steps
    # State of the optimizer or of the user's loop, if the client keeps it between rounds.
    state: dict[str, Any] | None = None
    metrics: Mapping[str, float] = {}  # further metrics from the user's loop
    examples: int | None = None  # as reported by the user's loop


Stack = tuple[
    list[ClientResult], Tensor
]  # the k clients that did not fail, and their updates [k, n]


class Trainer:
    """Trains the clients of a session. `shards[client]` are the rows of the client's examples in `data`."""

    def __init__(
        self,
        engine: Engine,
        data: Examples,
        shards: Shards,
        sgd: LocalSGD,
        algorithm: ClientAlgorithm,
        seed: int,
        *,
        all_shards: Shards | None = None,
        at_once: int = 1,
        updates_stay_on_devices: bool = False,
    ):
        """`all_shards`: the shards of all clients of the run, for algorithms that train on partitions; default: `shards`. `at_once`: number
        of clients whose updates are in memory together. `updates_stay_on_devices`: leave updates on the devices that computed them.
        """
        self.engine, self.data, self.shards, self.sgd = engine, data, shards, sgd
        self.algorithm, self.seed, self.at_once = algorithm, seed, at_once
        self.updates_stay_on_devices = updates_stay_on_devices and len(algorithm.phases) == 1
        self.partitions = PartitionTraining(
            algorithm, engine, shards if all_shards is None else all_shards, sgd, seed, at_once
        )

    def examples(self, client: int) -> int:
        """Return the number of examples of a client."""
        return len(self.shards[client])

    def train(
        self,
        assignments: Sequence[Assignment],
        data: Examples,
        global_state: Tensor,
        state_of: Callable[[int], ClientState],
        failures: dict[int, Exception],
    ) -> list[Stack]:
        """Train the clients of the assignments on `data`, starting from `global_state`. Return the stacks of their updates.

        Clients that fail are left out of the stacks and added to `failures`.
        """
        if self.algorithm.trains_on_partitions:
            return [self._train_on_partitions(assignments, data, global_state, failures)]
        by_settings: dict[tuple[Any, ...], list[Assignment]] = {}
        for a in assignments:
            if self.examples(a.client):
                by_settings.setdefault((a.lr, a.steps, a.batch_size), []).append(a)
            else:
                failures[a.client] = DataError(
                    f"client {a.client} has no examples; give fewer --clients or another --partition"
                )
        stacks = [
            stack
            for group in by_settings.values()
            for stack in self._train_group(group, data, global_state, state_of, failures)
        ]
        if len(stacks) == 1 or self.updates_stay_on_devices:
            return stacks
        updates = [self._no_updates(global_state), *(updates for _, updates in stacks)]
        return [([result for results, _ in stacks for result in results], torch.cat(updates))]

    def _train_group(
        self,
        assignments: Sequence[Assignment],
        data: Examples,
        global_state: Tensor,
        state_of: Callable[[int], ClientState],
        failures: dict[int, Exception],
    ) -> list[Stack]:
        """Train clients with the same learning rate, steps and batch size."""
        first = assignments[0]
        try:
            sgd = self.sgd.for_round(first.lr, first.steps, first.batch_size)
        except ProtocolError as error:
            failures |= {a.client: error for a in assignments}
            return [([], self._no_updates(global_state))]
        start = self._start(global_state)
        plans = plan_all_batches(
            sgd,
            [self.shards[a.client] for a in assignments],
            self.seed,
            [(a.round, a.client) for a in assignments],
        )
        jobs = []
        for a, plan in zip(assignments, plans, strict=True):
            state = state_of(a.client)
            traces = self._traces(state, start, global_state)
            jobs.append(
                Job(
                    a.round,
                    a.client,
                    plan,
                    state.buffers,
                    traces,
                    self.shards[a.client],
                    state.training,
                )
            )
        if self.updates_stay_on_devices:
            by_device = self.engine.train_on_devices(start, data, jobs, sgd, seed=self.seed)
        else:
            by_device = [
                DeviceResults(jobs, *self.engine.train(start, data, jobs, sgd, seed=self.seed))
            ]
        stacks: list[Stack] = []
        remaining = iter(assignments)
        for device in by_device:
            trained = []
            for job, result, a in zip(device.jobs, device.results, remaining, strict=False):
                if isinstance(result, Exception):
                    failures[a.client] = result
                else:
                    lr_sum = sgd.lr * len(job.batches)
                    trained.append(
                        ClientResult(
                            a,
                            result.loss,
                            result.buffers,
                            job.traces,
                            lr_sum,
                            result.state,
                            result.metrics,
                            result.examples,
                        )
                    )
            stacks.append((trained, device.updates))
        return stacks

    def _train_on_partitions(
        self,
        assignments: Sequence[Assignment],
        data: Examples,
        global_state: Tensor,
        failures: dict[int, Exception],
    ) -> Stack:
        trained, updates = [], []
        results = (
            self.partitions.updates(assignments, data, self._start(global_state))
            if assignments
            else []
        )
        for a, result in zip(assignments, results, strict=True):
            if isinstance(result, Exception):
                failures[a.client] = result
            else:
                update, loss = result
                trained.append(ClientResult(a, loss, None, NO_TRACES))
                updates.append(update)
        if not updates:
            return trained, self._no_updates(global_state)
        return trained, torch.stack(updates).to(self.engine.device)

    def _traces(self, state: ClientState, start: Tensor, global_state: Tensor) -> Traces:
        correction = self.algorithm.gradient_correction(global_state, state.buffers or {}, self.sgd)
        return Traces.for_round(
            self.sgd, state.memory.needs_moments, start, state.momentum, correction
        )

    def _start(self, global_state: Tensor) -> Tensor:
        return self.algorithm.model_weights(global_state).to(self.engine.device)

    def _no_updates(self, global_state: Tensor) -> Tensor:
        numel = self.algorithm.model_weights(global_state).numel()
        return torch.empty(0, numel, dtype=torch.float32, device=self.engine.device)
