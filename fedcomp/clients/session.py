"""The client's part of a round: commit or roll back the previous update, apply the download, train, and encode the new update.

A client's memory (fedcomp.memories) stores the part of the updates that compression left out. An encoded update is called a frame. The next
assignment (message from the server) says whether the server accepted the client's frame. If so, the client commits the frame to its memory;
otherwise, it rolls the memory back.

A session runs one client on a device, or many clients in a simulation. All clients of a round train from the same version of the model, so
the clients of a session share one copy of the weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..codecs import Context
from ..errors import FedcompError, NonFiniteError
from ..memories import Memory
from ..messages import (
    FAILED,
    NEED_DENSE,
    UPDATE,
    Assignment,
    Report,
    ReportedMetrics,
    failure,
    ticket,
)
from ..profiling import timed
from ..strategies.base import ClientAlgorithm, Frame, RoundState
from ..tasks.data import Examples, LazyData, describe_non_finite
from ..tasks.user_errors import client_error
from ..training.local_sgd import Traces
from .evaluation import ClientEvaluator
from .replica import NeedDense, Replica
from .state import ClientState
from .trainer import ClientResult, Trainer


class ClientHook:
    """Methods that a `ClientSession` calls, to simulate Byzantine clients. The methods of this class change nothing."""

    needs_whole_cohort: bool = False  # whether `handle` must get all clients of a phase in one call

    def on_assignments(self, assignments: Sequence[Assignment]) -> None:
        """Receive the assignments that start a round, before the session handles them."""

    def no_answer_reason(self, assignment: Assignment) -> str:
        """Return the reason why the client sends no report, or "" if it sends one."""
        return ""

    def groups(self, assignments: Sequence[Assignment]) -> list[tuple[Any, list[Assignment]]]:
        """Divide assignments into groups that the session handles one after the other. Return pairs (group name, assignments)."""
        return [(None, list(assignments))] if assignments else []

    def training_data(self, group: Any, data: Examples) -> Examples:
        """Return the training data of a group."""
        return data

    def on_updates(self, group: Any, assignments: Sequence[Assignment], updates: Tensor) -> Tensor:
        """Return the updates [m, numel] that the m clients of a group encode. The method may overwrite `updates`."""
        return updates

    def on_report(self, assignment: Assignment, report: Report, memory: Memory) -> Report:
        """Return the report that a client sends. `memory` is the client's memory."""
        return report


class ClientStates:
    """The states of a session's clients, all in main memory. In a simulation, `ClientStore` can also keep them in the checkpoint."""

    def __init__(self) -> None:
        self.by_client: dict[int, ClientState] = {}

    def at(self, client: int) -> ClientState:
        return self.by_client[client]

    def ensure_loaded(self, clients: Sequence[int]) -> None:
        """Load the states of these clients into main memory."""

    def mark_changed(self, clients: Sequence[int]) -> None:
        """Mark the states of these clients as changed, so that the next checkpoint contains them."""


class EncodingSession:
    """A session that applies the downloads of its clients and encodes their updates. The caller trains the clients."""

    def __init__(
        self, replica: Replica, states: ClientStates, algorithm: ClientAlgorithm, seed: int
    ):
        self.replica, self.states = replica, states
        self.algorithm, self.seed = algorithm, seed
        self.rounds: dict[int, RoundState] = {}  # by client: the state in the current round

    def download(self, assignment: Assignment) -> None:
        """Commit or roll back the client's previous update, and apply the download in an assignment.

        Raises NeedDense if the download cannot be applied to the client's version of the model, and FrameError for a damaged frame.
        """
        a, state = assignment, self.states.at(assignment.client)
        if state.memory.pending is not None:  # `_commit_accepted` has not committed the update
            state.settle(a.accepted, a.returned)
        if state.memory.counterpart is not None and state.committed != a.accepted:
            state.memory.reset()  # the server accepted an update that is not in the client's memory
            state.committed = ""
        if state.version != a.version:
            self.replica.check_applicable(a, state.version)
        try:
            self.replica.apply(a)
        except NeedDense:
            if not self.replica.version:  # the weights match no version
                state.version = ""
            raise
        state.version = a.version

    def encode(
        self,
        assignments: Sequence[Assignment],
        updates: Tensor | None,
        traces: Sequence[Traces] | None = None,
    ) -> list[Frame]:
        """Return one frame (encoded update) per client, or a FedcompError if the client fails. Store the tickets (hashes) of the frames.

        `updates` [m, numel] may be overwritten. It is None in a later phase of a round if the clients encode no new updates. `traces`: for
        each client, the vectors that local SGD recorded besides the update.
        """
        frames: list[Frame] = [None] * len(assignments)
        by_settings: dict[tuple[Any, ...], list[int]] = {}
        for i, a in enumerate(assignments):
            by_settings.setdefault((a.density, a.lr, *a.announced), []).append(i)
        for rows in by_settings.values():
            mine = updates if updates is None or len(rows) == len(assignments) else updates[rows]
            context = context_of(assignments[rows[0]])
            if traces:
                moments = Traces.stack(
                    [Traces(sums=traces[i].sums, squares=traces[i].squares) for i in rows]
                ).moments
                context = replace(context, moments=moments)
            memories, values, seeds = [], [], []
            for a in (assignments[i] for i in rows):
                memory = self.states.at(a.client).memory
                memory.set_density(a.density)
                memories.append(memory)
                values.append(self.rounds[a.client].values if a.client in self.rounds else {})
                seeds.append(self.algorithm.seed(memory.codec, self.seed, a))
            encoded = self.algorithm.encode(memories, mine, values, seeds, context)
            for i, frame in zip(rows, encoded, strict=True):
                frames[i], a = frame, assignments[i]
                if not isinstance(frame, FedcompError):
                    self.states.at(a.client).ticket = ticket(a.round, a.client, frame or b"")
        return frames


class ClientSession(EncodingSession):
    """A session that trains its clients, and answers assignments with reports.

    `keeps_rounds`: whether the round state of a client is kept until this client starts another round. Otherwise, it is deleted when any
    client of the session starts another round. `evaluator`: None if clients do not evaluate the model.
    """

    def __init__(
        self,
        replica: Replica,
        states: ClientStates,
        trainer: Trainer,
        algorithm: ClientAlgorithm,
        seed: int,
        *,
        hook: ClientHook | None = None,
        keeps_rounds: bool = False,
        evaluator: ClientEvaluator | None = None,
    ):
        super().__init__(replica, states, algorithm, seed)
        self.trainer = trainer
        self.hook: ClientHook = hook or ClientHook()
        self.keeps_rounds, self.evaluator = keeps_rounds, evaluator

    @property
    def at_once(self) -> int:
        """The number of assignments to pass to one call of `handle`."""
        whole = self.hook.needs_whole_cohort or self.algorithm.trains_on_partitions
        return len(self.trainer.shards) if whole else self.trainer.at_once

    def handle(self, assignments: Sequence[Assignment]) -> list[Report]:
        """Return one report for each assignment. If a client fails, its report contains the stage and the reason of the failure."""
        reports: dict[int, Report] = {}
        if not self.keeps_rounds:
            running = {a.round for a in assignments}
            self.rounds = {c: state for c, state in self.rounds.items() if state.round in running}
        self.hook.on_assignments([a for a in assignments if a.phase == self.algorithm.phases[0]])
        for a in assignments:
            if missing := self.hook.no_answer_reason(a):
                reports[a.client] = failure(a, "reply", missing)
        answering = [a for a in assignments if a.client not in reports]
        with timed("memories"):
            self.states.ensure_loaded([a.client for a in answering])
        starting, continuing = self._open(answering, reports)
        starting, measured = self._evaluate(starting, reports)
        for group, mine in self.hook.groups(starting):
            for first in range(0, len(mine), self.trainer.at_once):
                some = mine[first : first + self.trainer.at_once]
                reports |= self._start_round(group, some, measured)
        for group, mine in self.hook.groups(continuing):
            with timed("compression"):
                reports |= self._continue(group, mine)
        self.states.mark_changed([a.client for a in assignments])
        for a in assignments:
            if (report := reports[a.client]).kind == UPDATE:
                memory = self.states.at(a.client).memory
                reports[a.client] = self.hook.on_report(a, report, memory)
        return [reports[a.client] for a in assignments]

    def _open(
        self, assignments: Sequence[Assignment], reports: dict[int, Report]
    ) -> tuple[list[Assignment], list[Assignment]]:
        """Return the assignments that start a round, and those that continue a round.

        If an assignment starts a round, first commit or roll back the client's previous update, and apply the download. Add the reports of
        clients that fail to `reports`.
        """
        with timed("compression"):
            self._commit_accepted(assignments)
        starting: list[Assignment] = []
        continuing: list[Assignment] = []
        for a in assignments:
            stage = "phase"
            try:
                if not self.algorithm.starts_round(a, self.rounds.get(a.client)):
                    continuing.append(a)
                    continue
                stage = "download"
                self.download(a)
                a.frames = []  # frees memory, since frames may be as large as the model
                starting.append(a)
            except (FedcompError, ValueError) as error:
                kind = NEED_DENSE if isinstance(error, NeedDense) else FAILED
                reports[a.client] = self._failure(a, stage, error, kind)
        return starting, continuing

    def _evaluate(
        self, assignments: Sequence[Assignment], reports: dict[int, Report]
    ) -> tuple[list[Assignment], dict[int, ReportedMetrics]]:
        """Evaluate the model if an assignment asks for it. Return the assignments of clients that did not fail, and metrics by client."""
        measured: dict[int, ReportedMetrics] = {}
        if self.evaluator is not None and any(a.evaluate for a in assignments):
            weights = self.algorithm.model_weights(self.replica.weights)
            for a in assignments:
                if not a.evaluate:
                    continue
                try:
                    measured[a.client] = self.evaluator.evaluate(a.round, a.client, weights)
                except (Exception, SystemExit) as error:
                    reports[a.client] = self._failure(a, "evaluate", error)
        return [a for a in assignments if a.client not in reports], measured

    def _commit_accepted(self, assignments: Sequence[Assignment]) -> None:
        """Commit accepted updates in one batch, which is faster than `ClientState.settle`.

        Updates that the server used only partly, and updates of clients that keep the momentum of local SGD, are left to `settle`.
        """
        accepted = []
        for a in assignments:
            state = self.states.at(a.client)
            if (
                a.phase == self.algorithm.phases[0]
                and not a.returned
                and state.memory.pending is not None
                and state.momentum is None
                and state.ticket == a.accepted
            ):
                accepted.append(state)
        if accepted:
            type(accepted[0].memory).commit_batch([state.memory for state in accepted])
        for state in accepted:
            state.committed = state.ticket

    def _start_round(
        self, group: Any, assignments: Sequence[Assignment], measured: Mapping[int, ReportedMetrics]
    ) -> dict[int, Report]:
        """Train clients of a group, and return their reports for the first phase of the round."""
        failures: dict[int, Exception] = {}
        data = self.hook.training_data(group, self.trainer.data)
        with timed("local SGD"):
            trained, updates = self.trainer.train(
                assignments, data, self.replica.weights, self.states.at, failures
            )
        updates = self.hook.on_updates(group, [t.assignment for t in trained], updates)
        with timed("compression"):
            reports = self._finish_training(trained, updates, measured)
        failed = [a for a in assignments if a.client in failures]
        return reports | {a.client: self._failure(a, "train", failures[a.client]) for a in failed}

    def _finish_training(
        self, trained: list[ClientResult], updates: Tensor, measured: Mapping[int, ReportedMetrics]
    ) -> dict[int, Report]:
        """Encode the updates [m, numel] of m trained clients, and store the results of training. Return the reports by client."""
        assignments = [t.assignment for t in trained]
        states = [self.states.at(a.client) for a in assignments]
        buffers = [state.buffers or {} for state in states]
        lr_sums = [t.lr_sum for t in trained]
        updates, own_buffers = self.algorithm.after_training(
            updates, self.replica.weights, buffers, self.trainer.sgd, lr_sums
        )
        before = {a.client: self.rounds.get(a.client) for a in assignments}
        for a, result, _, _ in trained:
            values = self.algorithm.initial_values(a, before[a.client])
            evaluated = measured.get(a.client, ReportedMetrics())
            metrics = replace(evaluated, training=result.metrics).pack()
            self.rounds[a.client] = RoundState(
                a.round, result.loss, values, result.examples or 0, metrics
            )
        reports = self._report(assignments, updates, [t.traces for t in trained])
        for t, own, state in zip(trained, own_buffers, states, strict=True):
            client = t.assignment.client
            if reports[client].kind == UPDATE:
                state.buffers = {**(t.result.buffers or {}), **own} or None
                state.momentum = t.traces.momentum
                state.training = t.result.state
            elif (previous := before[client]) is not None and self.keeps_rounds:
                self.rounds[client] = previous
            else:
                del self.rounds[client]
        return reports

    def _continue(self, group: Any, assignments: Sequence[Assignment]) -> dict[int, Report]:
        """Return the clients' reports for a phase after the first."""
        reports: dict[int, Report] = {}
        proceeding: list[Assignment] = []
        new_updates: list[tuple[Assignment, Tensor]] = []
        for a in assignments:
            memory, values = self.states.at(a.client).memory, self.rounds[a.client].values
            try:
                seed = self.algorithm.seed(memory.codec, self.seed, a)
                update = self.algorithm.later_update(memory, values, seed, context_of(a))
            except (FedcompError, ValueError) as error:
                reports[a.client] = self._failure(a, "encode", error)
                continue
            if update is None:
                proceeding.append(a)
            else:
                new_updates.append((a, update))
        if new_updates:
            fresh = [a for a, _ in new_updates]
            stack = torch.stack([update for _, update in new_updates])
            stack = stack.to(self.trainer.engine.device)
            reports |= self._report(fresh, self.hook.on_updates(group, fresh, stack))
        return reports | self._report(proceeding)

    def _report(
        self,
        assignments: Sequence[Assignment],
        updates: Tensor | None = None,
        traces: Sequence[Traces] | None = None,
    ) -> dict[int, Report]:
        """Encode `updates` (see `encode` for the arguments), and return the reports by client."""
        reports: dict[int, Report] = {}
        frames = self.encode(assignments, updates, traces)
        for a, frame in zip(assignments, frames, strict=True):
            if isinstance(frame, FedcompError):
                error = encoding_error(frame, self.trainer, a.client)
                reports[a.client] = self._failure(a, "encode", error)
                continue
            state, round_state = self.states.at(a.client), self.rounds[a.client]
            reports[a.client] = Report(
                a.round,
                a.phase,
                a.client,
                UPDATE,
                self.replica.version,
                self.replica.fingerprint,
                frame or b"",
                state.ticket,
                round_state.examples or self.trainer.examples(a.client),
                round_state.loss,
                committed=state.committed,
                metrics=round_state.metrics,
            )
        return reports

    def _failure(
        self, a: Assignment, stage: str, error: Exception | SystemExit, kind: str = FAILED
    ) -> Report:
        version = self.states.at(a.client).version
        return failure(a, stage, failure_reason(error), version, self.replica.fingerprint, kind)


def context_of(assignment: Assignment) -> Context:
    """Return the parts of an assignment that codecs and memories need."""
    a = assignment
    return Context(round=a.round, phase=a.phase, announced=a.announcements, rate=a.lr)


def encoding_error(error: FedcompError, trainer: Trainer, client: int) -> FedcompError:
    """Return `error`, or a more specific error if NaN or infinity in the training data may have caused it."""
    if not isinstance(error, NonFiniteError):
        return error
    if isinstance(trainer.data, LazyData):  # searching this data for NaN may take too long
        return NonFiniteError(f"{error}, and check the data of train() for NaN and infinity")
    if found := describe_non_finite(trainer.data, trainer.shards[client]):
        return NonFiniteError(
            f"the update is not finite because this client's training data contains {found}; correct train()"
        )
    return error


def failure_reason(error: Exception | SystemExit) -> str:
    """Return the first line of a fedcomp error, or the file, line and message of an error in the user's code."""
    return str(client_error(error)).strip().split("\n")[0]
