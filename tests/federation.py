"""A federation of real clients, each with its own copy of the model, behind the in-process Grid; and faults by name."""

from collections.abc import Callable, Sequence

import numpy as np
from tiny_task import task
from torch import Tensor

from fedcomp import memory
from fedcomp.clients.client import Client
from fedcomp.clients.replica import Replica
from fedcomp.codecs import Context
from fedcomp.layout import Layout
from fedcomp.messages import Assignment, Report
from fedcomp.sim.grid import LocalGrid, by_index
from fedcomp.strategies import Average, RoundStrategy, Rules
from fedcomp.tasks import initial_model
from fedcomp.training.local_sgd import LocalSGD, SerialEngine

Fault = Callable[[Assignment, Report], Report | None]  # what becomes of a reply; None = it is lost


class Federation:
    """Clients 0..clients-1 of the tiny task and the strategy above them. `faults[(client, round)]` changes or loses a reply."""

    def __init__(
        self,
        rules: Rules,
        clients: int = 6,
        memory_name: str | None = None,
        strategy: type[RoundStrategy] = Average,
        at_once: int = 4,
    ):
        model = initial_model(task, rules.seed)
        self.layout = Layout.of(model)
        self.initial = self.layout.gather(model)
        self.strategy = strategy(rules, roster=by_index)
        self.strategy.begin(self.initial.clone(), self.layout)
        algorithm, layout = self.strategy.client_algorithm, self.strategy.layout
        data, engine = task.train(), SerialEngine(task, model, self.layout, "cpu")
        shards = np.array_split(np.arange(len(data)), clients)
        self.members = [
            Client(
                Replica(
                    algorithm.initial_global_state(self.initial.clone()),
                    layout,
                    self.strategy.downlink,
                ),
                memory(memory_name or rules.memory, self.strategy.uplink, layout.numel, layout),
                engine,
                data,
                shard,
                LocalSGD(steps=2, batch_size=10, lr=0.1),
                rules.seed,
                algorithm=algorithm,
                all_shards=shards,
            )
            for shard in shards
        ]
        self.clients, self.at_once = clients, at_once
        self.faults: dict[tuple[int, int], Fault] = {}
        self.grid = LocalGrid(self)

    def handle(self, assignments: Sequence[Assignment]) -> list[Report]:
        reports = []
        for a in assignments:
            report = self.members[a.client].handle(a)
            fault = self.faults.get((a.client, a.round))
            reports.append(fault(a, report) if fault else report)
        return reports


def watch_updates(client: Client, hear: Callable[[Tensor, Context], None]) -> None:
    """Call `hear` with each update [numel] that a client is about to encode."""

    class Watched(type(client.algorithm)):
        def encode(self, memories, updates, values, seeds, context):
            if updates is not None:
                hear(updates[0], context)
            return super().encode(memories, updates, values, seeds, context)

    watched = object.__new__(Watched)
    watched.__dict__.update(vars(client.algorithm))
    client.algorithm = watched


def sum_updates(client: Client, total: Tensor) -> None:
    """Add each update that a client encodes to `total` [numel]."""
    watch_updates(client, lambda update, context: total.add_(update))
