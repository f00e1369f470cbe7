"""A federation in one process: clients with their own copies of the model behind the in-process transport, and faults in their replies."""

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import tiny_task
import torch
from flwr.app import Array, ArrayRecord
from safetensors.torch import load_file
from torch import Tensor

from fedcomp import memory
from fedcomp.clients.replica import Replica
from fedcomp.clients.session import ClientSession, ClientStates
from fedcomp.clients.state import ClientState
from fedcomp.clients.trainer import Trainer
from fedcomp.layout import Layout
from fedcomp.memories import Memory
from fedcomp.messages import Assignment, Report
from fedcomp.server.asynchronous_loop import make_loop
from fedcomp.server.broadcasts import Broadcasts
from fedcomp.server.round_loop import RoundLoop
from fedcomp.server.transport import Delivery, Transport
from fedcomp.sim.clients import ClientStore, VirtualClients
from fedcomp.strategies import Average, RoundStrategy, StrategyConfig
from fedcomp.tasks import Data, Task, initial_model
from fedcomp.tasks.partition import partition
from fedcomp.training.engine import SequentialJobs
from fedcomp.training.local_sgd import LocalSGD
from fedcomp.training.own_loop import client_engine
from fedcomp.transports.inprocess import InProcessTransport, Population

Fault = Callable[[Assignment, Report], Report | None]  # returns the changed reply; None: it is lost


class DeployedClient(ClientSession):
    """A session with one client, whose attributes tests read and change."""

    def __init__(self, *parts, client: int):
        super().__init__(*parts, keeps_rounds=True)
        self.client = client

    def answer(self, assignment: Assignment) -> Report:
        (report,) = self.handle([assignment])
        return report

    @property
    def state(self) -> ClientState:
        return self.states.at(self.client)

    @property
    def memory(self) -> Memory:
        return self.state.memory

    @property
    def ticket(self) -> str:
        return self.state.ticket

    @property
    def momentum(self) -> Tensor | None:
        return self.state.momentum

    @property
    def data(self) -> Data:
        return self.trainer.data

    @property
    def shard(self) -> np.ndarray:
        return self.trainer.shards[self.client]

    @shard.setter
    def shard(self, shard: np.ndarray) -> None:
        self.trainer.shards[self.client] = shard

    @property
    def sgd(self) -> LocalSGD:
        return self.trainer.sgd

    @sgd.setter
    def sgd(self, sgd: LocalSGD) -> None:
        self.trainer.sgd = sgd


class Federation:
    """The clients 0..clients-1 of a task, and a round loop with a strategy. `faults[client, round]` changes a reply, or loses it."""

    def __init__(
        self,
        rules: StrategyConfig,
        clients: int = 6,
        memory_name: str | None = None,
        strategy: type[RoundStrategy] = Average,
        at_once: int = 4,
        task: Task = tiny_task.task,
        optimizer: str = "sgd",
    ):
        model = initial_model(task, rules.seed)
        self.layout = Layout.of(model)
        self.initial = self.layout.gather(model)
        made = strategy(rules, self.layout)
        broadcasts = Broadcasts.of(made, self.initial.clone())
        self.clients, self.at_once = clients, at_once
        self.transport = InProcessTransport(self)
        self.loop = make_loop(made, broadcasts, self.transport)
        algorithm, layout = self.strategy.client_algorithm, self.strategy.layout
        data, engine = task.train(), client_engine(task, model, self.layout, "cpu")
        shards = np.array_split(np.arange(len(data)), clients)
        sgd = LocalSGD(steps=2, batch_size=10, lr=0.1, optimizer=optimizer)
        self.members: list[DeployedClient] = []
        for client, shard in enumerate(shards):
            replica = Replica(
                algorithm.initial_global_state(self.initial.clone()), layout, self.strategy.downlink
            )
            kept = memory(memory_name or rules.memory, self.strategy.uplink, layout.numel, layout)
            trainer = Trainer(
                SequentialJobs(engine),
                data,
                {client: shard},
                sgd,
                algorithm,
                rules.seed,
                all_shards=shards,
            )
            states = ClientStates()
            states.by_client[client] = ClientState(kept, replica.version)
            self.members.append(
                DeployedClient(replica, states, trainer, algorithm, rules.seed, client=client)
            )
        self.faults: dict[tuple[int, int], Fault] = {}

    @property
    def strategy(self) -> RoundStrategy:
        return self.loop.strategy

    def handle(self, assignments: Sequence[Assignment]) -> list[Report]:
        reports = []
        for a in assignments:
            report = self.members[a.client].answer(replace(a))  # clients change their copy
            fault = self.faults.get((a.client, a.round))
            reports.append(fault(a, report) if fault else report)
        return reports

    def copy_of_loop(self, loop: RoundLoop | None = None) -> RoundLoop:
        """Return a copy of a loop (by default this federation's), as a server's checkpoint would restore it. Clients are not copied."""
        loop = loop or self.loop
        return copy.deepcopy(loop, {id(loop.transport): loop.transport})

    def use_partition(self) -> None:
        """Give each client the examples that it has in a simulation with --partition iid."""
        shards = partition("iid", self.members[0].data, self.clients, self.strategy.config.seed)
        for member, shard in zip(self.members, shards, strict=True):
            member.shard = shard

    def assert_same_model(self, folder: Path, tolerance: float = 0.0) -> None:
        """Assert that the global model equals the saved model of the run in `folder`."""
        saved = load_file(folder / "model.safetensors")
        for name, view in self.layout.views(self.loop.broadcasts.weights).items():
            torch.testing.assert_close(saved[name], view, rtol=0, atol=tolerance)

    def use(self, transport: Transport) -> None:
        """Use another transport in later rounds."""
        self.loop.transport, self.loop.clock = transport, transport.clock
        self.loop.gather = transport.clients

    def arrays(self) -> ArrayRecord:
        """Return the initial model as Flower arrays."""
        views = self.layout.views(self.initial)
        return ArrayRecord({name: Array(view.numpy().copy()) for name, view in views.items()})


class AlteredTransport(InProcessTransport):
    """A transport that changes deliveries: `alter` gets the deliveries of a call of `receive` and returns those that the call returns."""

    def __init__(
        self, population: Population, alter: Callable[[list[Delivery]], Sequence[Delivery]]
    ):
        super().__init__(population)
        self.alter = alter

    def receive(self, timeout_s: float) -> list[Delivery]:
        return list(self.alter(super().receive(timeout_s)))


class ReversedTransport(InProcessTransport):
    """A transport with which the last client answers first."""

    def send(self, assignments: Sequence[Assignment]) -> None:
        super().send(list(assignments)[::-1])


class SlowTransport(InProcessTransport):
    """Delivers a client's answer after `takes[client]` further calls of `receive`; None: never. Clients not in `takes` answer at once."""

    def __init__(self, population: Population, takes: dict[int, int | None]):
        super().__init__(population)
        self.takes, self.calls = takes, 0
        self._kept: list[tuple[int, Delivery]] = []

    def receive(self, timeout_s: float) -> list[Delivery]:
        self.calls += 1
        for delivery in super().receive(timeout_s):
            if (takes := self.takes.get(delivery.client, 0)) is not None:
                self._kept.append((self.calls + takes, delivery))
        due = [delivery for when, delivery in self._kept if when <= self.calls]
        self._kept = [(when, delivery) for when, delivery in self._kept if when > self.calls]
        return due

    def cancel(self, clients: Collection[int]) -> None:
        super().cancel(clients)
        self._kept = [(when, d) for when, d in self._kept if d.client not in set(clients)]


def virtual_clients(
    federation: Federation, make_memory: Callable[[], Memory], at_once: int
) -> VirtualClients:
    """Return virtual clients with the data and training of a federation's members."""
    first, algorithm = federation.members[0], federation.strategy.client_algorithm
    downlink = federation.strategy.downlink
    replica = Replica(federation.initial.clone(), federation.layout, downlink)
    return VirtualClients(
        replica,
        ClientStore(make_memory, replica.version),
        Trainer(
            first.trainer.engine,
            first.data,
            [member.shard for member in federation.members],
            first.sgd,
            algorithm,
            first.seed,
            at_once=at_once,
        ),
        algorithm,
        first.seed,
    )


def watch_updates(session: ClientSession, hear: Callable[[Assignment, Tensor], None]) -> None:
    """Call `hear(assignment, update)` with each update [numel] that a client is about to encode."""
    encode = session.encode

    def heard(assignments, updates, traces=None):
        if updates is not None:  # the first phase of a round
            hear(assignments[0], updates[0])
        return encode(assignments, updates, traces)

    session.encode = heard


def sum_updates(session: ClientSession, total: Tensor) -> None:
    """Add each update that a client encodes to `total` [numel]."""
    watch_updates(session, lambda assignment, update: total.add_(update))
