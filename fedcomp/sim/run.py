"""The simulation of a run: prepare the run from its options, execute its rounds, and write its files."""

import dataclasses
import sys
import time
from contextlib import ExitStack, nullcontext, redirect_stdout
from functools import partial

import numpy as np
import torch

from .. import malloc
from ..callbacks import Callback, Header, RoundRecord, Summary
from ..clients.evaluation import ClientEvaluator
from ..clients.replica import Replica
from ..clients.trainer import Trainer
from ..codecs import codec
from ..config import RunConfig
from ..errors import ConfigError, RunFolderError
from ..memories import Memory, memory, with_memories
from ..messages import in_process
from ..profiling import timed
from ..server.asynchronous_loop import make_loop
from ..server.broadcasts import Broadcasts
from ..server.evaluation import Evaluator
from ..server.initial_weights import start_from
from ..server.logs import STDOUT
from ..server.option_callbacks import with_option_callbacks
from ..server.recovery import Stateful
from ..server.results import bandwidths_of, client_config
from ..server.round_loop import RoundResult
from ..server.server_run import ServerRun
from ..server.transport import Transport
from ..strategies import resolved
from ..strategies.base import cohort_size
from ..tasks import Task, initial_model
from ..tasks.check import check, data_of, data_or_none
from ..tasks.data import Examples
from ..tasks.partition import hold_out, partition, partition_advice, partition_test_data
from ..tasks.user_errors import out_of_memory
from ..training import devices
from ..training.engine import Engine
from ..training.local_sgd import LocalSGD
from ..training.optimizers import check_optimizer
from ..transports.inprocess import InProcessTransport
from ..transports.relays import check as check_relays
from ..transports.relays import warn_if_inexact
from .attacks import ByzantineClients, attacks
from .clients import ClientStore, VirtualClients
from .engine_choice import PLACEMENT_KEY, EngineChoice, batching_error, engine_reason, make_engine
from .interruption import Interruption
from .network import Network
from .placement import FILE, choose_placement
from .ray_engine import JOBS_PER_ACTOR, RayEngine
from .relays import Relays
from .save_times import SaveTimes
from .timing import Timing, random_work_s, step_counter

STACK_BYTES = 64 << 20  # approximate total bytes of the updates that are encoded together


def simulate(
    config: RunConfig, callback: Callback | None = None, task: Task | None = None
) -> Summary:
    """Run a simulation, or continue the run in `config.out` if `config.resume` is set. Return the content of summary.json.

    If `task` is given, `config.task` must be `fedcomp.tasks.OBJECT` followed by the name of the task. Otherwise, the task that
    `config.task` names is loaded.

    Raises UserError for invalid options, before any file is written, and OutOfMemoryError if memory runs out. A run that
    was interrupted after its start, by an error or otherwise, can be resumed.
    """
    simulation = None
    try:
        # If the log is written to standard output, the task's own output goes to standard error.
        with redirect_stdout(sys.stderr) if config.log_json == STDOUT else nullcontext():
            simulation = Simulation(config, callback or Callback(), task)
        return simulation.run()
    except (MemoryError, RuntimeError) as error:
        if memory_error := out_of_memory(error):
            raise memory_error from error
        raise
    finally:
        if simulation is not None:
            # Break reference cycles, so that data and model are freed at once.
            vars(simulation).clear()


class PreparedRun(ServerRun):
    """A run with its task, data, initial model and strategy, before any training or writing. Raises UserError for invalid options."""

    def __init__(self, config: RunConfig, callback: Callback, task: Task | None = None):
        config = resolved(config)
        _check_options(config, task)
        self.network = (
            Network.of(config.network, config.clients, config.seed) if config.network else None
        )
        attackers = attacks(config.attack) if config.attack else ()
        self.byzantine = ByzantineClients(attackers, config.clients, config.seed)
        self.devices = devices.parse_devices(config.device)
        self.device = self.devices[0]
        malloc.keep_freed_memory()
        super().__init__(config, callback, task)
        self.sgd = LocalSGD.from_config(client_config(config, self.strategy))
        read_test = data_or_none if config.evaluate == "clients" else data_of
        train, self.test = data_of(self.task, "train"), read_test(self.task, "test")
        self.layout = check(self.task, config.batch_size, train, self.test or train, config.augment)
        self.sent_layout = self.strategy.layout  # layout of the vectors that clients send
        self.config = config = with_memories(config, self.sent_layout.numel)
        check_relays(config, self.strategy)
        self.train = train
        self.shards = partition(
            config.partition, train, config.clients, config.seed, self.task.name
        )
        if advice := partition_advice(config.partition, self.train, config.clients):
            self.warnings(advice)
        # Indices of the examples on which each client evaluates: of test examples in `test_shards`, or of training examples in `held_out`.
        self.test_shards: list[np.ndarray] | None = None
        self.held_out: list[np.ndarray] = []
        if config.clients_evaluate and self.test is not None:
            self.test_shards = partition_test_data(
                config.partition, train, self.test, config.clients
            )
        if config.clients_evaluate and self.test_shards is None:
            self.shards, self.held_out = hold_out(self.shards, config.holdout, config.seed)
        self.model = initial_model(self.task, config.seed)
        check_optimizer(self.task, self.model, self.sgd)
        self.weights = self.layout.gather(self.model)
        self.engine_choice = self._choose_engine(self.model)
        self.engine_reason = engine_reason(config, self.task, self.train, self.model, self.device)
        cohort = cohort_size(config.participation, config.clients)
        max_participants = min(config.clients, config.rounds * cohort)  # in the whole run
        client_bytes = self._client_bytes(self.strategy.memory)
        self.placement = choose_placement(
            config.residuals, self.device, max_participants, client_bytes
        )
        self.broadcasts = Broadcasts.of(self.strategy, self.weights.clone())
        start_from(config, self.folder, self.task, self.strategy, self.broadcasts)
        self.bandwidths = bandwidths_of(
            self.strategy, config, self.network.profiles.up.tolist() if self.network else None
        )

    def write_config(self) -> None:
        choices = dataclasses.asdict(self.engine_choice) | {PLACEMENT_KEY: self.placement.name}
        self.folder.write_config(self.config, choices)

    def _memory(self) -> Memory:
        return memory(
            self.config.memory, self.strategy.uplink, self.sent_layout.numel, self.sent_layout
        )

    def _client_bytes(self, memory: Memory) -> int:
        values = memory.state_dict(copy=False).values()
        vectors = sum(isinstance(value, torch.Tensor) for value in values)
        vectors = (vectors or memory.counterpart is not None) + self.config.keep_momentum
        return 4 * self.sent_layout.numel * vectors

    def _choose_engine(self, model: torch.nn.Module) -> EngineChoice:
        if self.folder.resumed:
            choice = EngineChoice.read(self.folder.stored.get("resolved"), self.folder.path)
            if not choice.device.startswith(self.device.type):
                raise RunFolderError(
                    f"the run in {self.folder.path} used {choice.device}, not {self.device}; give the same --device as before"
                )
            return choice
        choice = EngineChoice.choose(self.config, self.task, self.train, model, self.device)
        return dataclasses.replace(choice, device=", ".join(map(devices.describe, self.devices)))


class Simulation(PreparedRun):
    """A prepared run with its clients, transport and round loop."""

    def __init__(self, config: RunConfig, callback: Callback, task: Task | None = None):
        super().__init__(config, callback, task)
        config, shards = self.config, self.shards
        model, weights = self.model, self.weights
        # If clients' vectors are on disk, every round loads and frees vectors. Let malloc give each vector its own memory mapping, so that
        # freed vectors leave no gaps in the heap.
        if self.placement.name == FILE:
            malloc.keep_freed_memory(vector_bytes=4 * self.sent_layout.numel)
        train = self.train.to(self.device)
        del self.train, self.model, self.weights  # free memory early
        self.engine = self._engine(model, weights, train, max(shards, key=len))
        train = self.engine.place_data(train)
        self.test = None if self.test is None else self.test.to(self.device)
        self.byzantine.set_strategy(self.strategy, train)
        algorithm = self.strategy.client_algorithm
        at_once = max(self.engine_choice.at_once, STACK_BYTES // (4 * self.sent_layout.numel))
        at_once *= len(self.devices)
        self.trainer = Trainer(
            self.engine, train, shards, self.sgd, algorithm, config.seed, at_once=at_once
        )
        initial = algorithm.initial_global_state(weights.clone())
        replica = Replica(initial, self.sent_layout, codec(config.downlink))
        self.clients = VirtualClients(
            replica,
            ClientStore(self._memory, replica.version, self.placement),
            self.trainer,
            algorithm,
            config.seed,
            hook=self.byzantine if config.attack else None,
            evaluator=self._client_evaluator(train),
        )
        self.relays: Relays | None = None
        if config.relays:
            self.relays = Relays(self.clients, config.relays, self.strategy.uplink, self.layout)
        self.transport: Transport = InProcessTransport(self.relays or self.clients)
        self.timing: Timing | None = None
        if self.network:
            steps = step_counter(algorithm, self.sgd, shards)
            self.timing = Timing(
                self.network, config, self.strategy.min_clients, self.transport, steps
            )
            self.transport = self.timing.transport
        self.loop = make_loop(
            self.strategy,
            self.broadcasts,
            self.transport,
            gather=self.timing.gather if self.timing else None,
            bandwidths=self.bandwidths,
            work_s=self.timing.work_s if self.timing else random_work_s(config.seed),
            evaluates=partial(config.evaluates, "clients"),
        )
        self.evaluator = Evaluator(config, self.task, self.layout, train, self.test, self.device)

    def run(self) -> Summary:
        """Run or continue the simulation and return its summary."""
        with ExitStack() as cleanup:
            self.callback = cleanup.enter_context(with_option_callbacks(self.config, self.callback))
            self.loop.on_answer = self.callback.on_progress
            cleanup.callback(self.engine.close)
            if isinstance(self.engine, RayEngine):
                self._start_actors(self.engine)
            others: dict[str, Stateful] = {"": self.clients.states}
            if self.timing:
                others["network/"] = self.timing
            done = self.open(cleanup, self.trainer.data, others)
            self.clients.states.checkpoint = self.recovery.checkpoint
            if done:
                self.clients.restore(self.broadcasts)
            self.callback.on_run_start(self._header(done + 1))
            slow = devices.slow_precision_warning(self.config.precision, self.device)
            for warning in filter(None, (slow, *self.evaluator.warnings)):
                self.warnings(warning)
            if self.config.attack is None:
                cleanup.enter_context(in_process())
            self._run_rounds(done, cleanup.enter_context(Interruption()))
            return self.finish(self.engine_choice.device)

    def _run_rounds(self, done: int, interruption: Interruption) -> None:
        began, times = time.perf_counter(), SaveTimes(self.config.checkpoint_every)
        rounds = range(done + 1, self.config.rounds + 1)
        for result in self.loop.rounds(rounds):
            if self.timing:
                self.timing.on_round_end(result)
            record = self.record(result, began)
            length = self.folder.append(record)
            last = result.round == self.config.rounds
            due = last or interruption.requested or times.due(result.round)
            took_s = self._save(result.round, length) if due else 0.0
            try:
                self.callback.on_round_end(record)
                if due:
                    times.record_save(took_s)
                    self.callback.on_checkpoint(record.round, took_s)
                interruption.act()
            except BaseException:
                if not due:
                    self._save(result.round, length)
                raise
            began = time.perf_counter()
            del result  # free this round's encoded updates before the next round

    def _save(self, round: int, metrics_length: int) -> float:
        began = time.perf_counter()
        with timed("checkpoint"):
            self.recovery.save(round, metrics_length)
        return time.perf_counter() - began

    def _start_actors(self, engine: RayEngine) -> None:
        """Start the Ray actors, whose number decides how many clients are trained at once."""
        self.engine_choice = dataclasses.replace(self.engine_choice, at_once=engine.start_actors())
        self.trainer.at_once = max(
            self.trainer.at_once, JOBS_PER_ACTOR * self.engine_choice.at_once
        )

    def _client_evaluator(self, train: Examples) -> ClientEvaluator | None:
        if not self.config.clients_evaluate:
            return None
        model, seed = initial_model(self.task, self.config.seed), self.config.seed
        test, rows = train, self.held_out
        if self.test is not None and self.test_shards is not None:
            test, rows = self.test, self.test_shards
        return ClientEvaluator(self.task, model, self.device, seed, train, self.shards, test, rows)

    def _engine(
        self, model: torch.nn.Module, weights: torch.Tensor, data: Examples, shard: np.ndarray
    ) -> Engine:
        """Create the chosen engine. Try the batched engine on `shard`. If it fails and --engine is auto, choose another engine."""
        engine = make_engine(
            self.devices, self.engine_choice, self.config, self.task, model, self.warnings
        )
        error = batching_error(engine, weights.to(self.device), data, self.sgd, shard)
        if error is None:
            return engine
        if self.config.engine != "auto":
            raise error
        self.engine_choice = EngineChoice.unbatched(model, self.device, self.config)
        self.engine_reason = "the batched engine does not support the model"
        self.warnings(f"{error.problem}; the engine is {self.engine_choice} instead")
        return self._engine(model, weights, data, shard)

    def _header(self, first: int) -> Header:
        return self.make_header(
            first,
            device=self.engine_choice.device,
            engine=str(self.engine_choice),
            engine_reason=self.engine_reason,
            attack=str(self.byzantine),
            byzantine=self.byzantine.size,
            network=self.config.network or "",
            residuals=str(self.placement),
        )

    def record(self, result: RoundResult, began: float) -> RoundRecord:
        record = super().record(result, began)
        if self.relays is not None:
            record = self._with_relays(self.relays, result, record)
        if self.timing is not None:
            record = dataclasses.replace(record, simulated_hours=self.timing.clock.time_s / 3600)
        return dataclasses.replace(record, warnings=self.warnings.take())

    def _with_relays(self, relays: Relays, result: RoundResult, record: RoundRecord) -> RoundRecord:
        """Return `record` with separate counts of the bytes from clients to relays and from relays to the server."""
        client_bytes, empty = relays.take()
        warn_if_inexact(result.round, [a.update for a in result.accepted], self.warnings)
        return dataclasses.replace(
            record, uplink_bytes=client_bytes, relayed_bytes=record.uplink_bytes, skipped=empty
        )


def _check_options(config: RunConfig, task: Task | None) -> None:
    """Raise ConfigError for options that a simulation does not support."""
    if (config.deadline or config.quorum != 1) and not config.network:
        raise ConfigError(
            "--deadline and --quorum have no effect without --network, which simulates the time until clients answer; give --network, "
            "or use fedcomp server start"
        )
    if config.relays and config.network:
        raise ConfigError(
            "--network simulates direct uploads to the server, but --relays sends uploads to relays; leave --network or --relays out"
        )
    if task is not None and config.engine in ("processes", "ray"):
        raise ConfigError(
            f"--engine {config.engine} trains in other processes, which cannot receive the task object '{task.name}'; put the "
            "task into a file and give --task path/file.py:name, or leave --engine out"
        )
