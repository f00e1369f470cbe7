"""Virtual clients: at rest a client is its residual, a frame that waits for news, and the name of its version.

All clients at a version hold the same weights, so one copy of the model, moved by the downloads that really arrive, serves them all.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from .. import seeds
from ..clients.client import check_phase, context_of, reason
from ..clients.local_sgd import LocalSGD, SerialEngine, plan_batches
from ..clients.replica import NeedDense, Replica
from ..errors import CheckpointError, ConfigError, FedcompError, NonFiniteError
from ..memories import Memory
from ..messages import DENSE, FAILED, NEED_DENSE, TRAIN, UPDATE, Assignment, Report, failure, ticket
from ..tasks.base import Data
from .batched import BatchedEngine

BUFFERS = "buffers"  # among a client's values in a checkpoint


@dataclass
class Resting:
    """A client between rounds."""

    memory: Memory
    version: str
    ticket: str = ""  # of the proposal that waits in the memory
    buffers: dict[str, Tensor] | None = None  # running statistics, which stay with the client


@dataclass(frozen=True)
class Trained:
    """What local SGD made of one client's assignment."""

    assignment: Assignment
    loss: float
    buffers: dict[str, Tensor] | None


class VirtualClients:
    """The clients of a simulation, by logical id; a cohort is their unit of work. `shards[i]` indexes client i's examples in `data`."""

    def __init__(
        self,
        replica: Replica,
        engine: SerialEngine | BatchedEngine,
        at_once: int,
        data: Data,
        shards: Sequence[np.ndarray],
        sgd: LocalSGD,
        make_memory: Callable[[], Memory],
        seed: int,
    ):
        self.replica, self.engine, self.at_once = replica, engine, at_once
        self.data, self.shards, self.sgd, self.make_memory, self.seed = data, shards, sgd, make_memory, seed
        self.first_version = replica.version
        self.resting: dict[int, Resting] = {}
        self.changed: set[int] = set()  # since the last checkpoint
        self._stored: Callable[[int], Resting | None] = lambda client: None

    @property
    def clients(self) -> int:
        return len(self.shards)

    def handle(self, assignments: Sequence[Assignment]) -> list[Report]:
        """What Client.handle does, for a cohort. A client that fails reports where; the others go on."""
        reports: dict[int, Report] = {}
        ready: list[Assignment] = []
        self._settle(assignments)
        for a in assignments:
            stage = "phase"
            try:
                check_phase(a)
                stage = "download"
                self._arrive(a)
                ready.append(a)
            except (FedcompError, ValueError) as error:
                kind = NEED_DENSE if isinstance(error, NeedDense) else FAILED
                reports[a.client] = self._failure(a, stage, error, kind)
        self._propose(*self._train(ready, reports), reports)
        self.changed |= {a.client for a in assignments}
        return [reports[a.client] for a in assignments]

    def at_rest(self, client: int) -> Resting:
        """The state of a client; made when it is first asked for."""
        if client not in self.resting:
            self.resting[client] = self._stored(client) or Resting(self.make_memory(), self.first_version)
        return self.resting[client]

    def _settle(self, assignments: Sequence[Assignment]) -> None:
        """What clients.client.settle does, for a cohort in the phase that trains."""
        told = [(self.at_rest(a.client), a.accepted) for a in assignments if a.phase == TRAIN]
        waiting = [(state, state.ticket == accepted) for state, accepted in told if state.memory.pending is not None]
        taken = [state.memory for state, was_taken in waiting if was_taken]
        if taken:
            type(taken[0]).commit_stack(taken)
        for state, was_taken in waiting:
            if not was_taken:
                state.memory.rollback()

    def _arrive(self, a: Assignment) -> None:
        """Bring the client to the assignment's version."""
        state = self.at_rest(a.client)
        if a.form != DENSE and state.version not in (a.base, a.version):
            raise NeedDense(f"the download starts from version {a.base[:8]}, this client is at {state.version[:8]}")
        self.replica.move(a)
        state.version = a.version

    def _train(self, ready: Sequence[Assignment], reports: dict[int, Report]) -> tuple[list[Trained], Tensor]:
        """What training made of those who did not fail, and their updates as a stack [m, n]."""
        plans = {a.client: plan_batches(self.sgd, self.shards[a.client], self.seed, a.round, a.client) for a in ready}
        if isinstance(self.engine, BatchedEngine):
            return self._train_stack(self.engine, ready, plans, reports)
        trained, updates = [], []
        for a in ready:
            try:
                result = self.engine.train(
                    self._start(), self.data, plans[a.client], self.sgd.at_rate(a.lr),
                    seed=self.seed, round=a.round, who=a.client, buffers=self.at_rest(a.client).buffers,
                )
                trained.append(Trained(a, result.loss, result.buffers))
                updates.append(result.update)
            except Exception as error:
                reports[a.client] = self._failure(a, "train", error)
        return trained, torch.stack(updates) if updates else self._no_updates()

    def _train_stack(
        self, engine: BatchedEngine, ready: Sequence[Assignment], plans: Mapping[int, Sequence[np.ndarray]], reports: dict[int, Report]
    ) -> tuple[list[Trained], Tensor]:
        """Train a stack together; where that fails, each client by itself, so that only those fail that must."""
        if not ready:
            return [], self._no_updates()
        try:
            updates, losses = engine.train(self._start(), self.data, [plans[a.client] for a in ready], self.sgd.at_rate(ready[0].lr))
            return [Trained(a, loss, None) for a, loss in zip(ready, losses.tolist(), strict=True)], updates
        except ConfigError:
            raise
        except Exception as error:
            if len(ready) > 1:
                alone = [self._train_stack(engine, [a], plans, reports) for a in ready]
                return [t for trained, _ in alone for t in trained], torch.cat([updates for _, updates in alone])
            reports[ready[0].client] = self._failure(ready[0], "train", error)
            return [], self._no_updates()

    def _no_updates(self) -> Tensor:
        return torch.empty(0, self.replica.weights.numel(), dtype=torch.float32, device=self.engine.device)

    def _propose(self, trained: Sequence[Trained], updates: Tensor, reports: dict[int, Report]) -> None:
        densities = [t.assignment.density for t in trained]
        for density in dict.fromkeys(densities):
            rows = [i for i, mine in enumerate(densities) if mine == density]
            alike = updates if len(rows) == len(trained) else updates[rows]
            self._propose_alike([trained[i] for i in rows], alike, reports)

    def _propose_alike(self, trained: Sequence[Trained], updates: Tensor, reports: dict[int, Report]) -> None:
        """Proposals of one density."""
        states = [self.at_rest(t.assignment.client) for t in trained]
        for t, state in zip(trained, states, strict=True):
            state.memory.use_density(t.assignment.density)
        encode_seeds = [seeds.key(self.seed, "encode", t.assignment.round, t.assignment.client) for t in trained]
        context = context_of(trained[0].assignment)
        frames = type(states[0].memory).propose_stack([s.memory for s in states], updates, encode_seeds, context)
        for result, state, frame in zip(trained, states, frames, strict=True):
            a = result.assignment
            if isinstance(frame, NonFiniteError):
                reports[a.client] = self._failure(a, "encode", frame)
                continue
            state.ticket, state.buffers = ticket(a.round, a.client, frame or b""), result.buffers
            reports[a.client] = Report(
                a.round, a.phase, a.client, UPDATE, self.replica.version, self.replica.fingerprint,
                frame or b"", state.ticket, len(self.shards[a.client]), result.loss, "", "",
            )

    def _start(self) -> Tensor:
        return self.replica.weights.to(self.engine.device)

    def _failure(self, a: Assignment, stage: str, error: Exception, kind: str = FAILED) -> Report:
        return failure(a, stage, reason(error), self.at_rest(a.client).version, self.replica.fingerprint, kind)

    # Checkpoints.

    def take_changes(self) -> tuple[dict[str, Tensor], dict[str, bytes | None]]:
        """Vectors and values of the clients that changed since the last call, by name."""
        vectors: dict[str, Tensor] = {}
        values: dict[str, bytes | None] = {}
        for client in sorted(self.changed & self.resting.keys()):
            state, name = self.resting[client], f"client/{client}"
            kept = state.memory.state_dict()
            mine = {key for key, value in kept.items() if isinstance(value, Tensor)}
            vectors |= {f"{name}.{key}": kept[key] for key in mine}
            small = {key: kept[key] for key in sorted(kept.keys() - mine)}
            if state.buffers:
                small[BUFFERS] = save_tensors(state.buffers)
            lengths = {key: len(value) for key, value in small.items()}
            record = {"version": state.version, "ticket": state.ticket, "vectors": sorted(mine), "values": lengths}
            values[name] = b"\n".join([json.dumps(record).encode(), b"".join(small.values())])
        self.changed.clear()
        return vectors, values

    def restore(
        self,
        vector: Callable[[str], Tensor | None],
        value: Callable[[str], bytes | None],
        weights: Tensor,
        version: str,
        passed: Iterable[str],
    ) -> None:
        """Stand where a checkpoint stood. Clients are read back when they are first asked for."""
        self.replica.restore(weights, version, passed)

        def stored(client: int) -> Resting | None:
            name = f"client/{client}"
            record = value(name)
            if record is None:
                return None
            try:
                head, _, rest = record.partition(b"\n")
                fields = json.loads(head)
                ends = itertools.pairwise(itertools.accumulate(fields["values"].values(), initial=0))
                small = {key: rest[a:b] for key, (a, b) in zip(fields["values"], ends, strict=True)}
                memory, buffers = self.make_memory(), small.pop(BUFFERS, None)
                memory.load_state_dict({key: vector(f"{name}.{key}") for key in fields["vectors"]} | small)
                return Resting(memory, fields["version"], fields["ticket"], load_tensors(buffers) if buffers else None)
            except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
                raise CheckpointError(f"what the checkpoint holds of client {client} is damaged; start a new run") from error

        self._stored = stored
