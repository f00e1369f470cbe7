"""Measuring rounds of a simulation, beside plain loops that train the same clients: everything takes turns in one process."""

import dataclasses
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import seeds
from ..callbacks import Callback, Header, RoundRecord
from ..config import RunConfig
from ..profiling import Event, Recorder, recording, timed
from ..sim.run import Simulation
from ..strategies.cohort import size
from ..training.batches import plan_batches
from .plain_loops import big_batch, flops_of_an_example, lean_loop, product, seconds_of, usual_loop

# Rows of the table: which stretches make it up.
PARTS = {
    "local SGD": ("local SGD",),
    "compression": ("compression",),
    "memories": ("memories",),
    "messages": ("round", "clients"),
    "aggregation": ("aggregation",),
    "downlink": ("downlink",),
    "checkpoint": ("checkpoint",),
    "evaluation": ("evaluation",),
}
REST = "rest"  # metrics on disk and what else stands in no stretch
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MOST_WARM = 200  # rounds that are not counted, at most
WHOLE = "whole rounds"
LOCAL = "local SGD in them"
USUAL = "usual loop"
LEAN = "lean loop"
BIG = "one big batch"


@dataclass(frozen=True)
class Way:
    """One way to train a cohort. Times are medians, in seconds."""

    name: str
    seconds: float
    client_updates_per_s: float
    flops_per_s: float | None  # None where torch counts no operation of the model
    share_of_peak: float | None


@dataclass(frozen=True)
class Measured:
    """What rounds came to, without the first ones, which make, start and compile what the others use."""

    header: Header
    threads: int
    precision: str
    rounds: int  # measured
    parts: Mapping[str, float]  # seconds a round by what they were for, means
    ways: tuple[Way, ...]
    client_flops: float  # of one client's update
    peak_flops_per_s: float  # of a large matrix product, on the first device, times the devices
    accepted: int  # updates, in all measured rounds
    accuracy: float | None  # after the last of them
    events: list[Event]


class Enough(Exception):
    """As many rounds as were asked for have been measured."""


class Turns(Callback):
    """Calls each function in `beside` after every measured round.

    Every other round is measured once the engine has settled, so that no function is called directly before a measured round.
    """

    def __init__(self, rounds: int):
        self.rounds = rounds
        self.recorder = Recorder()
        self.device = torch.device("cpu")
        self.seen = 0
        self.beside: Mapping[str, Callable[[], object]] = {}
        self.settled: Callable[[], bool] = lambda: True
        self.steady = self.counts = False
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.parts: list[dict[str, float]] = []
        self.records: list[RoundRecord] = []
        self.header: Header

    def started(self, header: Header) -> None:
        self.header, self.began = header, time.perf_counter()

    def round_done(self, record: RoundRecord) -> None:
        round_s, events = time.perf_counter() - self.began, self.recorder.events[self.seen :]
        if self.counts:
            self._count(record, round_s, events)
        if self.counts or record.round == 1:
            for name, run in self.beside.items():
                with timed(name):
                    taken = seconds_of(run, self.device)
                if self.counts:
                    self.seconds[name].append(taken)
        if len(self.parts) == self.rounds:
            raise Enough
        self.steady = self.steady or self.settled() or record.round >= MOST_WARM
        self.counts = self.steady and not self.counts
        self.seen, self.began = len(self.recorder.events), time.perf_counter()

    def _count(self, record: RoundRecord, round_s: float, events: list[Event]) -> None:
        own: dict[str, float] = defaultdict(float)
        for event in events:
            own[event.name] += event.own_s
        parts = {part: sum(own[name] for name in names) for part, names in PARTS.items()}
        self.parts.append(parts | {REST: max(0.0, round_s - sum(parts.values()))})
        self.seconds[WHOLE].append(round_s)
        self.seconds[LOCAL].append(parts["local SGD"])
        self.records.append(record)


def measure(config: RunConfig, rounds: int) -> Measured:
    """Run a simulation until `rounds` rounds have counted, in a folder that is removed. Raises UserError."""
    with tempfile.TemporaryDirectory(prefix="fedcomp-bench-") as folder:
        told = {
            "rounds": MOST_WARM + 2 * rounds,
            "out": str(Path(folder) / "run"),
            "resume": False,
            "log_json": None,
            "metrics_port": -1,
        }
        turns = Turns(rounds)
        simulation = Simulation(dataclasses.replace(config, **told, tensorboard=False), turns)
        device = simulation.device
        devices = [
            engine.device for engine in getattr(simulation.engine, "engines", [simulation.engine])
        ]
        multiply, product_flops = product(device, PRECISIONS[config.precision])
        beside, update_flops = _beside(simulation)
        gpus = [each for each in devices if each.type == "cuda"]
        turns.recorder = Recorder(lambda: [torch.cuda.synchronize(gpu) for gpu in gpus])
        turns.device, turns.settled = device, lambda: getattr(simulation.engine, "settled", True)
        turns.beside = {name: _as_precise(run, config, device) for name, run in beside.items()} | {
            "matrix product": multiply
        }
        with recording(turns.recorder), suppress(Enough):
            simulation.run()
    peak = len(devices) * product_flops / min(turns.seconds.pop("matrix product"))
    accepted, cohort = [r.accepted for r in turns.records], turns.header.cohort
    updates = {name: cohort for name in beside} | dict.fromkeys(
        (WHOLE, LOCAL), statistics.mean(accepted)
    )
    ways = tuple(
        _way(name, turns.seconds[name], updates[name], update_flops, peak)
        for name in (WHOLE, LOCAL, *beside)
    )
    means = {part: statistics.mean(parts[part] for parts in turns.parts) for part in (*PARTS, REST)}
    return Measured(
        turns.header,
        torch.get_num_threads(),
        config.precision,
        len(turns.parts),
        means,
        ways,
        update_flops,
        peak,
        sum(accepted),
        turns.records[-1].accuracy,
        turns.recorder.events,
    )


def _beside(simulation: Simulation) -> tuple[dict[str, Callable[[], object]], float]:
    """The plain loops over a cohort of the run, drawn once, and the operations of one client's update."""
    config, trainer, task = simulation.config, simulation.clients.trainer, simulation.task
    chosen = seeds.generator(config.seed, "bench").permutation(config.clients)[
        : size(config.participation, config.clients)
    ]
    shards = [trainer.shards[client] for client in chosen]
    plans = [
        plan_batches(trainer.sgd, shard, config.seed, 1, int(who))
        for who, shard in zip(chosen, shards, strict=True)
    ]
    examples = sum(len(batch) for plan in plans for batch in plan) / len(plans)
    loops = {
        USUAL: usual_loop(task, trainer.data, shards, plans, trainer.sgd),
        LEAN: lean_loop(task, trainer.data, plans, trainer.sgd),
        BIG: big_batch(task, trainer.data, plans, trainer.sgd),
    }
    return loops, examples * flops_of_an_example(task, trainer.data, config.batch_size)


def _as_precise(
    run: Callable[[], object], config: RunConfig, device: torch.device
) -> Callable[[], object]:
    """A loop in the precision of the run, by torch's own autocast."""
    if config.precision == "float32":
        return run

    def coarse() -> object:
        with torch.autocast(device.type, torch.bfloat16):
            return run()

    return coarse


def _way(name: str, seconds: list[float], updates: float, update_flops: float, peak: float) -> Way:
    median = max(statistics.median(seconds), 1e-9)
    flops = updates * update_flops / median if update_flops else None
    return Way(name, median, updates / median, flops, None if flops is None else flops / peak)
