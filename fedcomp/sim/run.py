"""A simulation from its options to its summary: prepare, run round by round, write everything down."""

import dataclasses
import gc
import time
from dataclasses import dataclass
from typing import Any

import torch

from .. import __version__
from ..clients.local_sgd import LocalSGD, SerialEngine, evaluate
from ..clients.replica import Replica
from ..codecs import codec
from ..config import RunConfig, data_folder
from ..errors import SpecError
from ..memories import Memory, memory
from ..observe import Header, Observer, RoundRecord, Summary
from ..server.run_folder import RunFolder
from ..strategies import Outcome, RoundStrategy, Rules, strategy_class
from ..strategies.cohort import size as cohort_size
from ..tasks import Data, Task, initial_model, load
from ..tasks.check import check, data_of
from ..tasks.partition import partition
from . import devices
from .batched import BatchedEngine, choose_engine
from .clients import VirtualClients
from .grid import LocalGrid, by_index
from .recovery import Recovery

COLLECT_AFTER = 50_000  # new objects
STACK_BYTES = 64 << 20  # updates of clients that are trained and packed together


def simulate(config: RunConfig, observer: Observer | None = None) -> Summary:
    """Run a simulation, or continue the one in `config.out` with `config.resume`. Returns what summary.json holds.

    Raises UserError, before anything is written, for options that cannot work. A run that is interrupted at any moment can be resumed.
    """
    return Simulation(config, observer or Observer()).run()


@dataclass(frozen=True)
class Machine:
    """What was decided for this machine; recorded in config.toml, kept by a resumed run."""

    device: str
    engine: str
    at_once: int

    def __str__(self) -> str:
        return self.engine if self.engine == "serial" else f"{self.engine}, {self.at_once} clients at once"


class Simulation:
    """The parts of a run, made in the order in which a mistake can be told soonest."""

    def __init__(self, config: RunConfig, observer: Observer):
        self.config, self.observer = config, observer
        self.strategy = self._strategy()
        self.device = devices.choose(config.device)
        devices.keep_freed_memory()
        self.folder = RunFolder(config)
        self.task: Task = load(config.task, data_folder(config))
        train, self.test = data_of(self.task, "train"), data_of(self.task, "test")
        self.layout = check(self.task, config.batch_size, train, self.test)
        self._memory()
        shards = partition(config.partition, train, config.clients, config.seed, self.task.name)
        model = initial_model(self.task, config.seed)
        weights = self.layout.gather(model)
        self.machine = self._machine(model)
        self.strategy.begin(weights.clone(), self.layout)
        self.clients = VirtualClients(
            Replica(weights.clone(), self.layout, codec(config.downlink)),
            self._engine(model),
            max(self.machine.at_once, STACK_BYTES // (4 * self.layout.numel)),
            _on(train, self.device),
            shards,
            LocalSGD.from_config(config),
            self._memory,
            config.seed,
        )
        self.test = _on(self.test, self.device)
        self.evaluated = initial_model(self.task, config.seed).to(self.device)

    def run(self) -> Summary:
        self.folder.create(self.config, dataclasses.asdict(self.machine))
        recovery = Recovery(self.folder, self.strategy, self.clients)
        thresholds = gc.get_threshold()
        gc.freeze()  # what was imported and made so far stays, and messages leave no cycles: the collector need not look every few of them
        gc.set_threshold(COLLECT_AFTER)
        try:
            done = recovery.restore()
            self.observer.started(self._header(done + 1))
            began = time.perf_counter()
            for outcome in self.strategy.rounds(LocalGrid(self.clients), range(done + 1, self.config.rounds + 1)):
                record = self._record(outcome, began)
                length = self.folder.append(record)
                last = outcome.round == self.config.rounds
                recovery.keep(outcome, length, whole=last or outcome.round % self.config.checkpoint_every == 0)
                self.observer.round_done(record)
                began = time.perf_counter()
        finally:
            gc.set_threshold(*thresholds)
            gc.unfreeze()
            recovery.close()
        return self._finish()

    # Preparation.

    def _strategy(self) -> RoundStrategy:
        c = self.config
        if c.attack is not None:
            raise SpecError(f"unknown attack '{c.attack}'; none is built in, leave --attack out")
        rules = Rules(c.participation, c.uplink, c.downlink, c.downlink_memory, c.weights, c.weight_cap, c.server_lr, c.cache, c.seed)
        return strategy_class(c.strategy)(
            rules, roster=by_index, on_answer=lambda round, answered, asked: self.observer.progress(round, answered, asked)
        )

    def _memory(self) -> Memory:
        return memory(self.config.memory, self.strategy.uplink, self.layout.numel, self.layout)

    def _machine(self, model: torch.nn.Module) -> Machine:
        if self.folder.resumed:
            return Machine(**self.folder.stored["resolved"])
        engine, at_once = choose_engine(model, self.device, self.config.engine, self.config.batch_size)
        return Machine(devices.name(self.device), engine, self.config.cohort_batch or at_once)

    def _engine(self, model: torch.nn.Module) -> SerialEngine | BatchedEngine:
        if self.machine.engine == "serial":
            return SerialEngine(self.task, model, self.layout, self.device)
        return BatchedEngine(self.task, model, self.layout, self.device, self.machine.at_once)

    def _header(self, first: int) -> Header:
        c = self.config
        return Header(
            task=self.task.name,
            clients=c.clients,
            cohort=cohort_size(c.participation, c.clients),
            parameters=self.layout.numel,
            strategy=c.strategy,
            uplink=str(self.strategy.uplink),
            downlink=str(self.strategy.downlink),
            memory=c.memory,
            partition=c.partition,
            device=self.machine.device,
            engine=str(self.machine),
            first_round=first,
            rounds=c.rounds,
            out=str(self.folder.path),
        )

    # A round.

    def _record(self, outcome: Outcome, began: float) -> RoundRecord:
        loss = accuracy = None
        if outcome.round % self.config.eval_every == 0 or outcome.round == self.config.rounds:
            loss, accuracy = self._evaluate()
        traffic, dense = outcome.traffic, 4 * self.layout.numel
        return RoundRecord(
            round=outcome.round,
            accuracy=accuracy,
            loss=loss,
            train_loss=outcome.train_loss,
            cohort=len(outcome.cohort),
            accepted=len(outcome.accepted),
            rejected=len(outcome.rejections),
            uplink_bytes=sum(traffic.uplink.values()),
            downlink_bytes=sum(traffic.downlink.values()),
            dense_uplink_bytes=dense * len(outcome.cohort),
            dense_downlink_bytes=dense * len(outcome.cohort),
            seconds=time.perf_counter() - began,
            catch_up_bytes=traffic.catch_up,
            first_download_bytes=traffic.first_download,
            uplink_nonzeros=sum(a.update.nonzeros for a in outcome.accepted if a.update is not None),
            rejections=tuple(outcome.rejections),
        )

    def _evaluate(self) -> tuple[float, float]:
        weights = self.strategy.broadcasts.weights.to(self.device)
        return evaluate(self.task, self.evaluated, self.layout, weights, self.test, self.device)

    # The end.

    def _finish(self) -> Summary:
        self.folder.write_model(self.strategy.broadcasts.weights, self.layout)
        records = self.folder.records()

        def total(field: str) -> Any:
            return sum(getattr(record, field) for record in records)

        seconds = total("seconds")
        summary = Summary(
            accuracy=records[-1].accuracy,
            loss=records[-1].loss,
            uplink_bytes=total("uplink_bytes"),
            downlink_bytes=total("downlink_bytes"),
            dense_uplink_bytes=total("dense_uplink_bytes"),
            dense_downlink_bytes=total("dense_downlink_bytes"),
            rounds=len(records),
            clients=self.config.clients,
            client_updates=total("accepted"),
            seconds=seconds,
            client_updates_per_s=total("accepted") / seconds if seconds else 0.0,
            device=self.machine.device,
            seed=self.config.seed,
            version=__version__,
        )
        self.folder.write_summary(summary)
        self.observer.finished(summary, str(self.folder.path))
        return summary


def _on(data: Data, device: torch.device) -> Data:
    return dataclasses.replace(data, inputs=data.inputs.to(device), targets=data.targets.to(device))
