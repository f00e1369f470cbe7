"""Virtual clients: at rest a client is its residual, a frame that waits for news, and the name of its version.

All clients at a version hold the same weights, so one copy of the model, moved by the downloads that really arrive, serves them all.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..clients.client import context_of, encoding_error, follow, reason, settle
from ..clients.replica import NeedDense, Replica
from ..clients.state import ClientState
from ..errors import FedcompError, ProtocolError
from ..memories import Memory
from ..memories.base import Changes
from ..messages import (
    DENSE,
    FAILED,
    NEED_DENSE,
    OVERWRITE,
    UPDATE,
    Assignment,
    Report,
    failure,
    next_version,
    ticket,
)
from ..profiling import timed
from ..strategies.client_algorithm import ClientAlgorithm, RoundState
from ..tasks.base import Data
from ..training.batches import plan_each
from ..training.engine import Engine, Job, Share
from ..training.local_sgd import LocalSGD, Traces
from .attacks import Attack, Liars, Sender
from .client_store import ClientStore, Shelf
from .contraction import Contraction
from .growth import Growth
from .multi_device import MultiDevice, at
from .placement import HERE, Placement
from .shared_parts import SharedParts


class Trained(NamedTuple):
    """What local SGD made of one client's assignment."""

    assignment: Assignment
    loss: float
    buffers: dict[str, Tensor] | None
    traces: Traces
    path: float = 0.0  # the sum of the learning rates of its steps


class VirtualClients:
    """The clients of a simulation, by logical id; a cohort is their unit of work. `shards[i]` indexes client i's examples in `data`."""

    def __init__(
        self,
        replica: Replica,
        engine: Engine,
        at_once: int,
        data: Data,
        shards: Sequence[np.ndarray],
        sgd: LocalSGD,
        make_memory: Callable[[], Memory],
        seed: int,
        algorithm: ClientAlgorithm = ClientAlgorithm(),  # noqa: B008 — a frozen value
        warn: Callable[[str], None] = lambda sentence: None,
        feeds_back: bool = False,
        liars: Liars | None = None,
        home: Placement = HERE,
    ):
        self.replica, self.engine, self.piece, self.liars = (
            replica,
            engine,
            at_once,
            liars or Liars(),
        )
        self.data, self.shards, self.sgd, self.seed = data, shards, sgd, seed
        self.algorithm = algorithm
        self.shared = SharedParts(algorithm, engine, shards, sgd, seed, at_once)
        self.store = ClientStore(make_memory, replica.version, home)
        self.growth, self.contraction = Growth(warn), Contraction(warn, feeds_back)
        self.round_states: dict[int, RoundState] = {}  # by client

    @property
    def clients(self) -> int:
        return len(self.shards)

    @property
    def at_once(self) -> int:
        return (
            self.clients if self.liars.whole or self.algorithm.trains_on_partitions else self.piece
        )

    def handle(self, assignments: Sequence[Assignment]) -> list[Report]:
        """What Client.handle does, for a cohort. A client that fails reports where; the others go on."""
        reports: dict[int, Report] = {}
        ready: list[Assignment] = []
        later: list[Assignment] = []
        rounds = {a.round for a in assignments}
        self.round_states = {
            client: state for client, state in self.round_states.items() if state.round in rounds
        }
        self.liars.meet([a for a in assignments if a.phase == self.algorithm.phases[0]])
        for a in assignments:
            if why := self.liars.silence(a):
                reports[a.client] = failure(a, "reply", why)
        asked = [a for a in assignments if a.client not in reports]
        with timed("memories"):
            self.store.bring([a.client for a in asked])
        with timed("compression"):
            self._settle(asked)
        for a in asked:
            stage = "phase"
            try:
                if not self.algorithm.starts_round(a, self.round_states.get(a.client)):
                    later.append(a)
                    continue
                stage = "download"
                state = self.at_rest(a.client)
                waiting = state.ticket if state.memory.pending is not None else ""
                settle(state.memory, state.ticket, a.accepted, a.returned, state.momentum)
                state.after = follow(state.memory, waiting, a.accepted, state.after)
                self._arrive(a)
                ready.append(a)
            except (FedcompError, ValueError) as error:
                kind = NEED_DENSE if isinstance(error, NeedDense) else FAILED
                reports[a.client] = self._failure(a, stage, error, kind)
        for attack, mine in self.liars.groups(ready):
            data = self.liars.data(attack, self.data)
            for start in range(0, len(mine), self.piece):
                with timed("local SGD", clients=len(mine[start : start + self.piece])):
                    stacks = self._train(mine[start : start + self.piece], data, reports)
                for trained, updates in stacks:
                    updates = self.liars.changed(attack, [t.assignment for t in trained], updates)
                    with timed("compression", clients=len(trained)), at(updates.device):
                        self._propose(trained, updates, reports)
        for attack, mine in self.liars.groups(later):
            with timed("compression", clients=len(mine)):
                self._go_on(attack, mine, reports)
        self.store.touch(a.client for a in assignments)
        return [self._said(a, reports[a.client]) for a in assignments]

    def at_rest(self, client: int) -> ClientState:
        """The state of a client; made when it is first asked for."""
        return self.store.at(client)

    def _settle(self, assignments: Sequence[Assignment]) -> None:
        """What clients.client.settle does where a proposal was taken and nothing hangs on it, for a cohort in the phase that opens."""
        told = [
            (self.at_rest(a.client), a)
            for a in assignments
            if a.phase == self.algorithm.phases[0] and not a.returned
        ]
        plain = [
            (state, a)
            for state, a in told
            if state.memory.pending is not None and state.momentum is None
        ]
        taken = [state for state, a in plain if state.ticket == a.accepted]
        if taken:
            type(taken[0].memory).commit_stack([state.memory for state in taken])
        for state in taken:
            state.after = state.ticket

    def _arrive(self, a: Assignment) -> None:
        """Bring the client to the assignment's version."""
        state = self.at_rest(a.client)
        if (
            a.form != DENSE
            and state.version not in (a.base, a.version)
            and not self._passes(a, state.version)
        ):
            raise NeedDense(
                f"the download starts from version {a.base[:8]}, this client is at {state.version[:8]}"
            )
        passed = self.replica.passed
        self.replica.move(a)
        if (
            self.replica.passed is not passed
        ):  # the dense model, which stands on the same way: others come from there
            self.replica.passed |= passed
        state.version = a.version

    def _passes(self, a: Assignment, version: str) -> bool:
        """Whether a download starts earlier than this version and leads past it: the server has not heard of a late answer."""
        if a.form == OVERWRITE:
            return {a.base, version} <= self.replica.passed
        return version in itertools.accumulate(a.frames, next_version, initial=a.base)

    def _train(
        self, ready: Sequence[Assignment], data: Data, reports: dict[int, Report]
    ) -> list[tuple[list[Trained], Tensor]]:
        """What training on `data` made of those who did not fail, and their updates as stacks [m, n], on the devices that made them."""
        if self.algorithm.trains_on_partitions:
            return [self._train_shared(ready, data, reports)]
        alike: dict[tuple, list[Assignment]] = {}
        for a in ready:
            alike.setdefault((a.lr, a.steps, a.batch_size), []).append(a)
        groups = [
            stack for mine in alike.values() for stack in self._train_alike(mine, data, reports)
        ]
        if len(groups) == 1 or self._apart:
            return groups
        return [
            (
                [t for trained, _ in groups for t in trained],
                torch.cat([self._no_updates(), *(updates for _, updates in groups)]),
            )
        ]

    @property
    def _apart(self) -> bool:
        """Whether updates stay on the devices that made them: nothing is made of several clients' but what the server is sent."""
        return (
            isinstance(self.engine, MultiDevice)
            and not self.liars.size
            and len(self.algorithm.phases) == 1
        )

    def _train_alike(
        self, ready: Sequence[Assignment], data: Data, reports: dict[int, Report]
    ) -> list[tuple[list[Trained], Tensor]]:
        """Likewise for clients that were told to train alike."""
        start, stacks, asked = self._start(), [], iter(ready)
        try:
            sgd = self.sgd.as_told(ready[0].lr, ready[0].steps, ready[0].batch_size)
        except ProtocolError as error:
            reports |= {a.client: self._failure(a, "train", error) for a in ready}
            return [([], self._no_updates())]
        plans = plan_each(
            sgd,
            [self.shards[a.client] for a in ready],
            self.seed,
            [(a.round, a.client) for a in ready],
        )
        jobs = [
            Job(a.round, a.client, plan, self.at_rest(a.client).buffers, self._traces(a, start))
            for a, plan in zip(ready, plans, strict=True)
        ]
        shares = (
            self.engine.train_apart(start, data, jobs, sgd, seed=self.seed)
            if self._apart
            else [Share(jobs, *self.engine.train(start, data, jobs, sgd, seed=self.seed))]
        )
        for share in shares:
            trained = []
            for job, result, a in zip(share.jobs, share.results, asked, strict=False):
                if isinstance(result, Exception):
                    reports[a.client] = self._failure(a, "train", result)
                else:
                    trained.append(
                        Trained(
                            a, result.loss, result.buffers, job.traces, sgd.lr * len(job.batches)
                        )
                    )
            stacks.append((trained, share.updates))
        return stacks

    def _train_shared(
        self, ready: Sequence[Assignment], data: Data, reports: dict[int, Report]
    ) -> tuple[list[Trained], Tensor]:
        """Likewise for clients that train on parts of the data that others train on too."""
        trained, updates = [], self._no_updates()
        for a, result in zip(
            ready, self.shared.updates(ready, data, self._start()) if ready else [], strict=True
        ):
            if isinstance(result, Exception):
                reports[a.client] = self._failure(a, "train", result)
            else:
                trained.append((Trained(a, result[1], None, Traces()), result[0]))
        if trained:
            updates = torch.stack([x for _, x in trained]).to(self.engine.device)
        return [t for t, _ in trained], updates

    def _go_on(
        self, attack: Attack | None, later: Sequence[Assignment], reports: dict[int, Report]
    ) -> None:
        """Answers in a phase after the one that opens, of clients who lie, or do not, in one way."""
        heard: list[tuple[Assignment, Tensor | None]] = []
        for a in later:
            state, held = self.at_rest(a.client), self.round_states[a.client]
            try:
                heard.append(
                    (
                        a,
                        self.algorithm.later_update(
                            state.memory,
                            held.values,
                            self.algorithm.seed(state.memory.codec, self.seed, a),
                            context_of(a),
                        ),
                    )
                )
            except (FedcompError, ValueError) as error:
                reports[a.client] = self._failure(a, "encode", error)
        made = [(a, x) for a, x in heard if x is not None]
        if made:
            asked = [a for a, _ in made]
            updates = self.liars.changed(
                attack, asked, torch.stack([x for _, x in made]).to(self.engine.device)
            )
            self._answer(asked, updates, [Traces()] * len(asked), reports)
        asked = [a for a, x in heard if x is None]
        self._answer(asked, None, [Traces()] * len(asked), reports)

    def _traces(self, a: Assignment, start: Tensor) -> Traces:
        state = self.at_rest(a.client)
        pull = self.algorithm.gradient_correction(
            self.replica.weights, state.buffers or {}, self.sgd
        )
        return Traces.begin(self.sgd, state.memory.needs_moments, start, state.momentum, pull)

    def _no_updates(self) -> Tensor:
        return torch.empty(
            0,
            self.algorithm.model_weights(self.replica.weights).numel(),
            dtype=torch.float32,
            device=self.engine.device,
        )

    def _propose(
        self, trained: Sequence[Trained], updates: Tensor, reports: dict[int, Report]
    ) -> None:
        kept = [self.at_rest(t.assignment.client).buffers or {} for t in trained]
        updates, owned = self.algorithm.after_training(
            updates, self.replica.weights, kept, self.sgd, [t.path for t in trained]
        )
        self.round_states |= {
            (a := t.assignment).client: RoundState(
                a.round, t.loss, self.algorithm.initial_values(a, self.round_states.get(a.client))
            )
            for t in trained
        }
        clients = [t.assignment.client for t in trained]
        self.growth.look(clients, [self.at_rest(client).memory for client in clients], updates)
        if (
            trained and not self.contraction.over and len(self.algorithm.phases) == 1
        ):  # values that are asked for exactly are not misread
            first, memory = trained[0].assignment, self.at_rest(clients[0]).memory
            self.contraction.look(
                first.round,
                memory.codec,
                self.algorithm.seed(memory.codec, self.seed, first),
                memory.layout,
                updates,
            )
        self._answer([t.assignment for t in trained], updates, [t.traces for t in trained], reports)
        for t, own in zip(trained, owned, strict=True):
            if reports[t.assignment.client].kind == UPDATE:
                state = self.at_rest(t.assignment.client)
                state.buffers, state.momentum = (
                    {**(t.buffers or {}), **own} or None,
                    t.traces.momentum,
                )
            else:
                del self.round_states[t.assignment.client]

    def _answer(
        self,
        asked: Sequence[Assignment],
        updates: Tensor | None,
        traces: Sequence[Traces],
        reports: dict[int, Report],
    ) -> None:
        """Answers of a phase; `updates` [m, n] are what was trained, None after the phase that opens."""
        alike: dict[tuple, list[int]] = {}
        for i, a in enumerate(asked):
            alike.setdefault((a.density, a.lr, *a.announced), []).append(i)
        for rows in alike.values():
            mine = updates if updates is None or len(rows) == len(asked) else updates[rows]
            self._answer_alike([asked[i] for i in rows], mine, [traces[i] for i in rows], reports)

    def _answer_alike(
        self,
        asked: Sequence[Assignment],
        updates: Tensor | None,
        traces: Sequence[Traces],
        reports: dict[int, Report],
    ) -> None:
        """Answers of clients that were told the same."""
        states = [self.at_rest(a.client) for a in asked]
        round_states = [self.round_states[a.client] for a in asked]
        for a, state in zip(asked, states, strict=True):
            state.memory.use_density(a.density)
        encode_seeds = [
            self.algorithm.seed(state.memory.codec, self.seed, a)
            for a, state in zip(asked, states, strict=True)
        ]
        context = replace(context_of(asked[0]), moments=Traces.stack(traces).moments)
        values = [state.values for state in round_states]
        frames = self.algorithm.encode(
            [s.memory for s in states], updates, values, encode_seeds, context
        )
        for a, state, own, frame in zip(asked, states, round_states, frames, strict=True):
            if isinstance(frame, FedcompError):
                error = encoding_error(frame, self.data, self.shards[a.client])
                reports[a.client] = self._failure(a, "encode", error)
                continue
            state.ticket = ticket(a.round, a.client, frame or b"")
            reports[a.client] = Report(
                a.round,
                a.phase,
                a.client,
                UPDATE,
                self.replica.version,
                self.replica.fingerprint,
                frame or b"",
                state.ticket,
                len(self.shards[a.client]),
                own.loss,
                "",
                "",
                state.after,
            )

    def _said(self, a: Assignment, report: Report) -> Report:
        """What the server hears of a client: its report, or what a liar makes of it."""
        attack = self.liars.lie(a)
        if attack is None or report.kind != UPDATE:
            return report
        memory = self.at_rest(a.client).memory
        context = replace(context_of(a), layout=memory.layout)
        seed = self.algorithm.seed(memory.codec, self.seed, a)
        return attack.reply(
            report, Sender(memory.codec, seed, context, self.liars.generator(a), self.algorithm)
        )

    def _start(self) -> Tensor:
        return self.algorithm.model_weights(self.replica.weights).to(self.engine.device)

    def _failure(self, a: Assignment, stage: str, error: Exception, kind: str = FAILED) -> Report:
        return failure(
            a, stage, reason(error), self.at_rest(a.client).version, self.replica.fingerprint, kind
        )

    # Checkpoints.

    def keep_in(self, shelf: Shelf) -> None:
        self.store.shelf = shelf

    def take_changes(self) -> Changes:
        return self.store.take_changes()

    def restore(self, weights: Tensor, version: str, passed: Iterable[str]) -> None:
        """Stand where the checkpoint stands. Clients are read back when they are first asked for."""
        self.replica.restore(weights, version, passed)
        self.store.clear()
