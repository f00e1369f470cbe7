"""A simulation from its options to its summary: prepare, run round by round, write everything down."""

import dataclasses
import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..clients import devices
from ..clients.local_sgd import LocalSGD, SerialEngine
from ..clients.replica import Replica
from ..codecs import codec
from ..config import RUN_FILE, RunConfig, data_folder
from ..errors import ConfigError, DataError, RunFolderError
from ..memories import Memory, memory
from ..observe import Header, Observer, RoundRecord, Summary
from ..server.recovery import Recovery
from ..server.results import declare_bandwidths, evaluated, on, record_of, strategy_of, summary_of
from ..server.run_folder import RunFolder
from ..server.watching import watched
from ..strategies import Outcome, RoundStrategy, resolved
from ..strategies.cohort import size as cohort_size
from ..tasks import Data, Task, initial_model, load
from ..tasks.check import check, data_of
from ..tasks.partition import partition
from .attacks import Liars, attacks
from .batched import BatchedEngine, choose_engine
from .clients import VirtualClients
from .contraction import ROUNDS
from .grid import LocalGrid, by_index
from .growth import GROWS
from .interruption import Interruption
from .pace import pace
from .relays import INEXACT, Relays, missed
from .relays import check as check_relays

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

    @classmethod
    def stored(cls, values: Any, folder: Path) -> "Machine":
        """Of a run folder's config.toml. Raises RunFolderError unless it is what was written there."""
        kinds = {f.name: f.type for f in dataclasses.fields(cls)}
        whole = isinstance(values, dict) and {name: type(value) for name, value in values.items()} == kinds
        if not whole or values["engine"] not in ("serial", "batched") or values["at_once"] < 1:
            raise RunFolderError(f"[resolved] in {folder / RUN_FILE} is damaged; start a new run with another --out")
        return cls(**values)

    def __str__(self) -> str:
        return self.engine if self.engine == "serial" else f"{self.engine}, {self.at_once} clients at once"


class Simulation:
    """The parts of a run, made in the order in which a mistake can be told soonest."""

    def __init__(self, config: RunConfig, observer: Observer):
        config = resolved(config)
        _refuse_what_is_real(config)
        self.config, self.observer, self._lost = config, observer, False
        self._said: list[str] = []  # warnings since the last round
        self.strategy = self._strategy()
        self.strategy.warn = self._warn
        self.liars = Liars(attacks(config.attack) if config.attack else (), config.clients, config.seed)
        self.device = devices.choose(config.device)
        devices.keep_freed_memory()
        self.folder = RunFolder(config)
        folder = data_folder(config)
        if folder is not None and config.data and not folder.is_dir():
            raise DataError(f"--data {config.data} is no folder; give the one that holds the task's data")
        self.task: Task = load(config.task, folder)
        train, self.test = data_of(self.task, "train"), data_of(self.task, "test")
        self.layout = check(self.task, config.batch_size, train, self.test)
        waiting = self._memory()
        if config.relays:
            check_relays(config, self.strategy, waiting)
        shards = partition(config.partition, train, config.clients, config.seed, self.task.name)
        model = initial_model(self.task, config.seed)
        weights = self.layout.gather(model)
        self.machine = self._machine(model)
        self.strategy.begin(weights.clone(), self.layout)
        self.strategy.pace = pace(config.seed)
        declare_bandwidths(self.strategy, config)
        train = on(train, self.device)
        self.liars.follow(self.strategy, train)
        engine = self._engine(model, weights, train)
        self.clients = VirtualClients(
            Replica(weights.clone(), self.layout, codec(config.downlink)),
            engine,
            max(self.machine.at_once, STACK_BYTES // (4 * self.layout.numel)),
            train,
            shards,
            LocalSGD.from_config(config),
            self._memory,
            config.seed,
            self.strategy.work,
            self._warn,
            self.strategy.feeds_back,
            self.liars,
        )
        self.relays = Relays(self.clients, config.relays, self.strategy.uplink, self.layout) if config.relays else None
        self.test = on(self.test, self.device)
        self.evaluated = initial_model(self.task, config.seed).to(self.device)

    def run(self) -> Summary:
        with ExitStack() as ends:
            self.observer = ends.enter_context(watched(self.config, self.observer, self.folder.path))
            self.folder.open()
            ends.callback(self.folder.close)
            if not self.folder.resumed:
                self.folder.write_config(self.config, dataclasses.asdict(self.machine))
            recovery = Recovery(self.folder, self.strategy, self.clients, self.config.rounds)
            ends.callback(recovery.close)
            done = recovery.restore()
            self._recall(done)
            if self.folder.resumed:
                self.folder.write_config(self.config, dataclasses.asdict(self.machine))
            self.observer.started(self._header(done + 1))
            ends.enter_context(_resting_collector())
            self._rounds(recovery, done, ends.enter_context(Interruption(self.config.checkpoint_every > 1)))
            return self._finish()

    def _rounds(self, recovery: Recovery, done: int, interruption: Interruption) -> None:
        began = time.perf_counter()
        for outcome in self.strategy.rounds(LocalGrid(self.relays or self.clients), range(done + 1, self.config.rounds + 1)):
            record = self._record(outcome, began)
            length = self.folder.append(record)
            due = outcome.round % self.config.checkpoint_every == 0 or outcome.round == self.config.rounds
            whole, saving = due or interruption.asked, time.perf_counter()
            recovery.keep(outcome, length, whole=whole)
            took_s = time.perf_counter() - saving
            self.observer.round_done(record)
            if whole:
                self.observer.checkpoint(record.round, took_s)
            interruption.act()
            began = time.perf_counter()

    # Preparation.

    def _strategy(self) -> RoundStrategy:
        return strategy_of(
            self.config, roster=by_index, on_answer=lambda round, answered, asked: self.observer.progress(round, answered, asked)
        )

    def _memory(self) -> Memory:
        return memory(self.config.memory, self.strategy.uplink, self.layout.numel, self.layout)

    def _machine(self, model: torch.nn.Module) -> Machine:
        if self.folder.resumed:
            machine = Machine.stored(self.folder.stored.get("resolved"), self.folder.path)
            if not machine.device.startswith(self.device.type):
                raise RunFolderError(f"the run in {self.folder.path} was on {machine.device}, not {self.device}; give a --device like it")
            return machine
        if self.config.engine == "serial" and self.config.cohort_batch > 1:
            raise ConfigError("--cohort-batch is for the batched engine; leave it out, or give --engine batched")
        engine, at_once = choose_engine(model, self.device, self.config.engine, self.config.batch_size)
        return Machine(devices.name(self.device), engine, self.config.cohort_batch or at_once)

    def _engine(self, model: torch.nn.Module, weights: torch.Tensor, data: Data) -> SerialEngine | BatchedEngine:
        """The engine that was chosen; where auto chose batched and one step shows that the model cannot be mapped, the serial one."""
        if self.machine.engine == "serial":
            return SerialEngine(self.task, model, self.layout, self.device)
        engine = BatchedEngine(self.task, model, self.layout, self.device, self.machine.at_once)
        try:
            engine.train(weights.to(self.device), data, [[np.zeros(1, np.int64)]], LocalSGD(steps=1, batch_size=1))
        except ConfigError:
            if self.config.engine != "auto" or self.folder.resumed:
                raise
            self.machine = Machine(self.machine.device, "serial", 1)
            return self._engine(model, weights, data)
        except Exception:  # of the user's model on this example: a client's failure, in its round
            return engine
        return engine

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
            relays=c.relays,
            attack=str(self.liars),
            liars=self.liars.size,
            notice=self.strategy.notice,
        )

    # A round.

    def _record(self, outcome: Outcome, began: float) -> RoundRecord:
        weights = self.strategy.broadcasts.weights
        measured = evaluated(self.config, outcome, self.task, self.evaluated, self.layout, weights, self.test, self.device)
        record = record_of(outcome, self.layout, *measured, time.perf_counter() - began)
        if self.relays is not None:
            record = self._relayed(outcome, record)
        said, self._said = self._said, []
        return dataclasses.replace(record, warnings=tuple(said))

    def _recall(self, done: int) -> None:
        """What an interrupted run has said, it does not say again."""
        said = [sentence for record in self.folder.records() for sentence in record.warnings]
        self._lost = any(INEXACT in sentence for sentence in said)
        self.clients.growth.warned = any(GROWS in sentence for sentence in said)
        self.clients.contraction.over |= done >= ROUNDS

    def _warn(self, sentence: str) -> None:
        self._said.append(sentence)
        self.observer.warning(sentence)

    def _relayed(self, outcome: Outcome, record: RoundRecord) -> RoundRecord:
        """The record of a round behind relays: what clients sent to them, and what they passed on."""
        passed, lost = self.relays.take(), sum(missed(a.update) for a in outcome.accepted)
        if lost and not self._lost:
            self._lost = True
            self._warn(
                f"round {outcome.round}: {lost} of {record.uplink_nonzeros} coordinates that relays added {INEXACT}; "
                "give s2 in --uplink a larger 'union', or more 'columns'"
            )
        return dataclasses.replace(
            record, uplink_bytes=passed.client_bytes, relayed_bytes=record.uplink_bytes, skipped=passed.empty
        )

    # The end.

    def _finish(self) -> Summary:
        self.folder.write_model(self.strategy.broadcasts.weights, self.layout)
        summary = summary_of(self.folder.records(), self.config, self.machine.device)
        self.folder.write_summary(summary)
        if not summary.client_updates:
            self.observer.warning("no client's update was accepted in any round: metrics.jsonl has the reasons")
        self.observer.finished(summary, str(self.folder.path))
        return summary


def _refuse_what_is_real(config: RunConfig) -> None:
    """Options that have no meaning for virtual clients."""
    if config.deadline or config.quorum != 1:
        raise ConfigError("--deadline and --quorum are for real clients, virtual ones have no clock that runs out; leave them out, or use "
                          "fedcomp server start")


@contextmanager
def _resting_collector() -> Iterator[None]:
    """Python's collector of cycles, less eager: what was made so far stays, and messages leave no cycles."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
