"""Virtual clients: at rest a client is its residual, a frame that waits for news, and the name of its version.

All clients at a version hold the same weights, so one copy of the model, moved by the downloads that really arrive, serves them all.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from ..clients.client import context_of, follow, reason, settle
from ..clients.local_sgd import LocalSGD, SerialEngine, Traces, plan_batches
from ..clients.replica import NeedDense, Replica
from ..clients.work import Held, Work
from ..errors import CheckpointError, ConfigError, FedcompError
from ..memories import Memory
from ..messages import DENSE, FAILED, NEED_DENSE, UPDATE, Assignment, Report, failure, ticket
from ..tasks.base import Data
from .attacks import Attack, Liars, Sender
from .batched import BatchedEngine
from .contraction import Contraction
from .growth import Growth
from .shared_parts import SharedParts

BUFFERS = "buffers"  # among a client's values in a checkpoint
MOMENTUM = "local-momentum"  # among its vectors


@dataclass
class Resting:
    """A client between rounds."""

    memory: Memory
    version: str
    ticket: str = ""  # of the proposal that waits in the memory
    buffers: dict[str, Tensor] | None = None  # running statistics, which stay with the client
    momentum: Tensor | None = None  # where the client's last round left it, if it is kept
    after: str = ""  # ticket of the proposal that the memory last committed


@dataclass(frozen=True)
class Trained:
    """What local SGD made of one client's assignment."""

    assignment: Assignment
    loss: float
    buffers: dict[str, Tensor] | None
    traces: Traces


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
        work: Work = Work(),  # noqa: B008 — a frozen value
        warn: Callable[[str], None] = lambda sentence: None,
        feeds_back: bool = False,
        liars: Liars | None = None,
    ):
        self.replica, self.engine, self.piece, self.liars = replica, engine, at_once, liars or Liars()
        self.data, self.shards, self.sgd, self.make_memory, self.seed, self.work = data, shards, sgd, make_memory, seed, work
        self.shared = SharedParts(work, engine, shards, sgd, seed, at_once)
        self.first_version, self.growth, self.contraction = replica.version, Growth(warn), Contraction(warn, feeds_back)
        self.resting: dict[int, Resting] = {}
        self.held: dict[int, Held] = {}  # of the round that is running
        self.changed: set[int] = set()  # since the last checkpoint
        self._stored: Callable[[int], Resting | None] = lambda client: None

    @property
    def clients(self) -> int:
        return len(self.shards)

    @property
    def at_once(self) -> int:
        return self.clients if self.liars.whole or self.work.shares else self.piece

    def handle(self, assignments: Sequence[Assignment]) -> list[Report]:
        """What Client.handle does, for a cohort. A client that fails reports where; the others go on."""
        reports: dict[int, Report] = {}
        ready: list[Assignment] = []
        later: list[Assignment] = []
        rounds = {a.round for a in assignments}
        self.held = {client: held for client, held in self.held.items() if held.round in rounds}
        self.liars.meet([a for a in assignments if a.phase == self.work.phases[0]])
        for a in assignments:
            if why := self.liars.silence(a):
                reports[a.client] = failure(a, "reply", why)
        asked = [a for a in assignments if a.client not in reports]
        self._settle(asked)
        for a in asked:
            stage = "phase"
            try:
                if not self.work.opens(a, self.held.get(a.client)):
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
                trained, updates = self._train(mine[start : start + self.piece], data, reports)
                updates = self.liars.changed(attack, [t.assignment for t in trained], updates)
                self._propose(trained, updates, reports)
        for attack, mine in self.liars.groups(later):
            self._go_on(attack, mine, reports)
        self.changed |= {a.client for a in assignments}
        return [self._said(a, reports[a.client]) for a in assignments]

    def at_rest(self, client: int) -> Resting:
        """The state of a client; made when it is first asked for."""
        if client not in self.resting:
            self.resting[client] = self._stored(client) or Resting(self.make_memory(), self.first_version)
        return self.resting[client]

    def _settle(self, assignments: Sequence[Assignment]) -> None:
        """What clients.client.settle does where a proposal was taken and nothing hangs on it, for a cohort in the phase that opens."""
        told = [(self.at_rest(a.client), a) for a in assignments if a.phase == self.work.phases[0] and not a.returned]
        plain = [(state, a) for state, a in told if state.memory.pending is not None and state.momentum is None]
        taken = [state for state, a in plain if state.ticket == a.accepted]
        if taken:
            type(taken[0].memory).commit_stack([state.memory for state in taken])
        for state in taken:
            state.after = state.ticket

    def _arrive(self, a: Assignment) -> None:
        """Bring the client to the assignment's version."""
        state = self.at_rest(a.client)
        if a.form != DENSE and state.version not in (a.base, a.version):
            raise NeedDense(f"the download starts from version {a.base[:8]}, this client is at {state.version[:8]}")
        self.replica.move(a)
        state.version = a.version

    def _train(self, ready: Sequence[Assignment], data: Data, reports: dict[int, Report]) -> tuple[list[Trained], Tensor]:
        """What training on `data` made of those who did not fail, and their updates as a stack [m, n]."""
        if self.work.shares:
            return self._train_shared(ready, data, reports)
        plans = {a.client: plan_batches(self.sgd, self.shards[a.client], self.seed, a.round, a.client) for a in ready}
        if isinstance(self.engine, BatchedEngine):
            return self._train_stack(self.engine, ready, data, plans, reports)
        trained, updates = [], []
        for a in ready:
            try:
                start = self._start()
                traces = self._traces(a, start)
                result = self.engine.train(
                    start, data, plans[a.client], self.sgd.at_rate(a.lr),
                    seed=self.seed, round=a.round, who=a.client, buffers=self.at_rest(a.client).buffers, traces=traces,
                )
                trained.append(Trained(a, result.loss, result.buffers, traces))
                updates.append(result.update)
            except Exception as error:
                reports[a.client] = self._failure(a, "train", error)
        return trained, torch.stack(updates) if updates else self._no_updates()

    def _train_stack(
        self,
        engine: BatchedEngine,
        ready: Sequence[Assignment],
        data: Data,
        plans: Mapping[int, Sequence[np.ndarray]],
        reports: dict[int, Report],
    ) -> tuple[list[Trained], Tensor]:
        """Train a stack together; where that fails, each client by itself, so that only those fail that must."""
        if not ready:
            return [], self._no_updates()
        try:
            start, mine, sgd = self._start(), [plans[a.client] for a in ready], self.sgd.at_rate(ready[0].lr)
            stack = Traces.stack([self._traces(a, start) for a in ready])
            updates, losses = engine.train(start, data, mine, sgd, **({"traces": stack} if stack else {}))
            return [Trained(a, loss, None, stack.rows(i)) for i, (a, loss) in enumerate(zip(ready, losses.tolist(), strict=True))], updates
        except ConfigError:
            raise
        except Exception as error:
            if len(ready) > 1:
                alone = [self._train_stack(engine, [a], data, plans, reports) for a in ready]
                return [t for trained, _ in alone for t in trained], torch.cat([updates for _, updates in alone])
            reports[ready[0].client] = self._failure(ready[0], "train", error)
            return [], self._no_updates()

    def _train_shared(self, ready: Sequence[Assignment], data: Data, reports: dict[int, Report]) -> tuple[list[Trained], Tensor]:
        """Likewise for clients that train on parts of the data that others train on too."""
        trained, updates = [], self._no_updates()
        for a, result in zip(ready, self.shared.updates(ready, data, self._start()) if ready else [], strict=True):
            if isinstance(result, Exception):
                reports[a.client] = self._failure(a, "train", result)
            else:
                trained.append((Trained(a, result[1], None, Traces()), result[0]))
        if trained:
            updates = torch.stack([x for _, x in trained]).to(self.engine.device)
        return [t for t, _ in trained], updates

    def _go_on(self, attack: Attack | None, later: Sequence[Assignment], reports: dict[int, Report]) -> None:
        """Answers in a phase after the one that opens, of clients who lie, or do not, in one way."""
        heard: list[tuple[Assignment, Tensor | None]] = []
        for a in later:
            state, held = self.at_rest(a.client), self.held[a.client]
            try:
                heard.append((a, self.work.hear(state.memory, held.kept, self.work.seed(state.memory.codec, self.seed, a), context_of(a))))
            except (FedcompError, ValueError) as error:
                reports[a.client] = self._failure(a, "encode", error)
        made = [(a, x) for a, x in heard if x is not None]
        if made:
            asked = [a for a, _ in made]
            updates = self.liars.changed(attack, asked, torch.stack([x for _, x in made]).to(self.engine.device))
            self._answer(asked, updates, [Traces()] * len(asked), reports)
        asked = [a for a, x in heard if x is None]
        self._answer(asked, None, [Traces()] * len(asked), reports)

    def _traces(self, a: Assignment, start: Tensor) -> Traces:
        state = self.at_rest(a.client)
        return Traces.begin(self.sgd, state.memory.needs_moments, start, state.momentum)

    def _no_updates(self) -> Tensor:
        return torch.empty(0, self.replica.weights.numel(), dtype=torch.float32, device=self.engine.device)

    def _propose(self, trained: Sequence[Trained], updates: Tensor, reports: dict[int, Report]) -> None:
        self.held |= {(a := t.assignment).client: Held(a.round, t.loss, self.work.outlasting(self.held.get(a.client), a)) for t in trained}
        clients = [t.assignment.client for t in trained]
        self.growth.look(clients, [self.at_rest(client).memory for client in clients], updates)
        if trained and not self.contraction.over and len(self.work.phases) == 1:  # values that are asked for exactly are not misread
            first, memory = trained[0].assignment, self.at_rest(clients[0]).memory
            self.contraction.look(first.round, memory.codec, self.work.seed(memory.codec, self.seed, first), memory.layout, updates)
        self._answer([t.assignment for t in trained], updates, [t.traces for t in trained], reports)
        for t in trained:
            if reports[t.assignment.client].kind == UPDATE:
                state = self.at_rest(t.assignment.client)
                state.buffers, state.momentum = t.buffers, t.traces.momentum
            else:
                del self.held[t.assignment.client]

    def _answer(self, asked: Sequence[Assignment], updates: Tensor | None, traces: Sequence[Traces], reports: dict[int, Report]) -> None:
        """Answers of a phase; `updates` [m, n] are what was trained, None after the phase that opens."""
        alike: dict[tuple, list[int]] = {}
        for i, a in enumerate(asked):
            alike.setdefault((a.density, *a.announced), []).append(i)
        for rows in alike.values():
            mine = updates if updates is None or len(rows) == len(asked) else updates[rows]
            self._answer_alike([asked[i] for i in rows], mine, [traces[i] for i in rows], reports)

    def _answer_alike(
        self, asked: Sequence[Assignment], updates: Tensor | None, traces: Sequence[Traces], reports: dict[int, Report]
    ) -> None:
        """Answers of clients that were told the same."""
        states, held = [self.at_rest(a.client) for a in asked], [self.held[a.client] for a in asked]
        for a, state in zip(asked, states, strict=True):
            state.memory.use_density(a.density)
        encode_seeds = [self.work.seed(state.memory.codec, self.seed, a) for a, state in zip(asked, states, strict=True)]
        context = replace(context_of(asked[0]), moments=Traces.stack(traces).moments)
        x = None if updates is None else updates[:, None]
        frames = self.work.answer_stack([s.memory for s in states], x, [h.kept for h in held], encode_seeds, context)
        for a, state, own, frame in zip(asked, states, held, frames, strict=True):
            if isinstance(frame, FedcompError):
                reports[a.client] = self._failure(a, "encode", frame)
                continue
            state.ticket = ticket(a.round, a.client, frame or b"")
            reports[a.client] = Report(
                a.round, a.phase, a.client, UPDATE, self.replica.version, self.replica.fingerprint,
                frame or b"", state.ticket, len(self.shards[a.client]), own.loss, "", "", state.after,
            )

    def _said(self, a: Assignment, report: Report) -> Report:
        """What the server hears of a client: its report, or what a liar makes of it."""
        attack = self.liars.lie(a)
        if attack is None or report.kind != UPDATE:
            return report
        memory = self.at_rest(a.client).memory
        context = replace(context_of(a), layout=memory.layout)
        seed = self.work.seed(memory.codec, self.seed, a)
        return attack.reply(report, Sender(memory.codec, seed, context, self.liars.generator(a), self.work))

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
            if state.momentum is not None:
                kept = kept | {MOMENTUM: state.momentum}
            mine = {key for key, value in kept.items() if isinstance(value, Tensor)}
            vectors |= {f"{name}.{key}": kept[key] for key in mine}
            small = {key: kept[key] for key in sorted(kept.keys() - mine)}
            if state.buffers:
                small[BUFFERS] = save_tensors(state.buffers)
            lengths = {key: len(value) for key, value in small.items()}
            record = {"version": state.version, "ticket": state.ticket, "after": state.after, "vectors": sorted(mine), "values": lengths}
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
                vectors = {key: vector(f"{name}.{key}") for key in fields["vectors"]}
                momentum = vectors.pop(MOMENTUM, None)
                memory.load_state_dict(vectors | small)
                running = load_tensors(buffers) if buffers else None
                return Resting(memory, fields["version"], fields["ticket"], running, momentum, fields["after"])
            except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
                raise CheckpointError(f"what the checkpoint holds of client {client} is damaged; start a new run") from error

        self._stored = stored
