"""A federation of real clients, each with its own copy of the model, behind the in-process Grid; and faults by name."""

from collections.abc import Callable, Sequence

import numpy as np
from tiny_task import task

from fedcomp import memory
from fedcomp.clients.client import Client
from fedcomp.clients.replica import Replica
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
        work, travels = self.strategy.work, self.strategy.layout
        data, engine = task.train(), SerialEngine(task, model, self.layout, "cpu")
        shards = np.array_split(np.arange(len(data)), clients)
        self.members = [
            Client(
                Replica(work.first(self.initial.clone()), travels, self.strategy.downlink),
                memory(memory_name or rules.memory, self.strategy.uplink, travels.numel, travels),
                engine,
                data,
                shard,
                LocalSGD(steps=2, batch_size=10, lr=0.1),
                rules.seed,
                work=self.strategy.work,
                data_sets=shards,
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
