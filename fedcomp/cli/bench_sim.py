"""`fedcomp bench sim`: measure the time of each part of a simulated round, and of PyTorch loops that train the same number of clients.

Simulated rounds and PyTorch loops alternate in one process, so that the machine is in the same state for both.
"""

import dataclasses
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from .. import __version__, seeds
from ..callbacks import Callback, Header, RoundRecord
from ..config import RunConfig
from ..errors import ConfigError, nearest
from ..formatting import NOTHING
from ..profiling import Recorder, recording
from ..sim.run import Simulation
from ..strategies.base import cohort_size
from ..training.local_sgd import plan_batches
from . import pytorch_loops
from .tables import print_table

TRAINING = "local SGD"
# Parts of a round. Each part has the name of the profiler span (timed section of code) that measures it. The time of a span excludes the
# spans nested in it.
PARTS = (
    *(TRAINING, "compression", "memories", "messages"),
    *("aggregation", "downlink", "checkpoint", "evaluation"),
)
MESSAGES = {"round": "messages", "clients": "messages"}  # other spans → the part that includes them
OTHER = (
    "rest"  # name of the time outside of all these spans, such as the time to write metrics to disk
)
HEADER_FIELDS = "task clients cohort parameters strategy uplink memory device engine".split()
LARGEST_COSTS = 3  # how many of the most expensive parts of a round are named below the tables
MAX_WARM_UP = 200  # rounds
WHOLE, LOCAL = "whole rounds", "only local SGD"
LEAN, MATRIX_PRODUCT = "lean loop", "matrix product"
BIG_BATCH = "big-batch"
LOOPS = {"lean": LEAN, "usual": "usual loop", BIG_BATCH: "one big batch"}
NO_LOOPS = "none"
LEGENDS = {
    "lean": "lean loop: plain PyTorch with one model for all clients; examples are selected by index",
    "usual": "usual loop: plain PyTorch; each client has a copy of the model, a DataLoader and an optimizer",
    BIG_BATCH: "one big batch: one model trained on the merged batches of all clients; its speed is an upper bound for the other loops",
}
PEAK_LEGEND = (
    "per cohort: time for all clients of a round\n"
    "of peak: FLOP/s of the forward and backward passes, divided by the FLOP/s of a large matrix product on this device\n"
    "the PyTorch loops only train; they neither compress nor aggregate updates"
)
RATES = ("", "client updates/s", "per cohort", f"vs {LEAN}", "GFLOP/s", "of peak")
TIMES = ("part of a round", "ms", "share")


def bench(config: RunConfig, rounds: int, loops: str, as_json: bool) -> None:
    """Measure rounds of a simulation and print the results."""
    names = parse_loops(loops)
    results = measure(config, rounds, names)
    if as_json:
        print(json.dumps(results, indent=2))
    else:
        _print_tables(results, names)


def parse_loops(text: str) -> list[str]:
    """Return the names of the PyTorch loops that --loops selects. Raises ConfigError for an unknown name."""
    names = [] if text == NO_LOOPS else text.split(",")
    if NO_LOOPS in names:
        raise ConfigError(
            f"--loops is '{text}', but '{NO_LOOPS}' cannot be combined with names of loops"
        )
    if unknown := [name for name in names if name not in LOOPS]:
        raise ConfigError(
            f"--loops cannot be '{unknown[0]}'; {nearest(unknown[0], [*LOOPS, NO_LOOPS])}"
        )
    return list(dict.fromkeys(names))


class RoundMeasurement(Callback):
    """A callback that measures every second round, and runs the PyTorch `loops` after round 1 (to warm up) and after each measured round.

    The round after a PyTorch loop is not measured, because the loop has filled the CPU caches with other data. Measuring starts after the
    warm-up rounds, in which the engine starts workers and compiles kernels.
    """

    def __init__(self, rounds: int):
        self.rounds = rounds
        self.recorder = Recorder()
        self.device = torch.device("cpu")
        self.loops: Mapping[str, Callable[[], object]] = {}
        self.settled: Callable[[], bool] = lambda: True
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.parts: list[dict[str, float]] = []
        self.records: list[RoundRecord] = []
        self.header: Header
        self._warm = self._measuring = False

    def on_run_start(self, header: Header) -> None:
        self.header, self._start_s = header, time.perf_counter()

    def on_round_end(self, record: RoundRecord) -> None:
        round_s, spans = time.perf_counter() - self._start_s, self.recorder.take()
        if self._measuring:
            parts = dict.fromkeys(PARTS, 0.0)
            for name, seconds in spans.items():
                part = MESSAGES.get(name, name)
                if part in parts:
                    parts[part] += seconds
            self.parts.append(parts | {OTHER: max(0.0, round_s - sum(parts.values()))})
            self.seconds[WHOLE].append(round_s)
            self.seconds[LOCAL].append(parts[TRAINING])
            self.records.append(record)
        if self._measuring or record.round == 1:
            for name, run in self.loops.items():
                seconds = pytorch_loops.seconds_of(run, self.device)
                if self._measuring:
                    self.seconds[name].append(seconds)
        if len(self.parts) == self.rounds:
            raise MeasurementComplete
        self._warm = self._warm or self.settled() or record.round >= MAX_WARM_UP
        self._measuring = self._warm and not self._measuring
        self._start_s = time.perf_counter()


class MeasurementComplete(Exception):
    """Raised when the requested number of rounds has been measured."""


def measure(config: RunConfig, rounds: int, loops: Sequence[str]) -> dict[str, Any]:
    """Simulate until `rounds` rounds have been measured. Return the results in the form that --json prints, with times in seconds.

    Raises UserError for invalid options.
    """
    measurement = RoundMeasurement(rounds)
    with tempfile.TemporaryDirectory(prefix="fedcomp-bench-") as folder:
        out: dict[str, Any] = {"out": str(Path(folder) / "run"), "resume": False, "log_json": None}
        out |= {"metrics_port": -1, "tensorboard": False}
        config = dataclasses.replace(config, rounds=MAX_WARM_UP + 2 * rounds, **out)
        simulation = Simulation(config, measurement)
        device, engine = simulation.device, simulation.engine
        devices = [each.device for each in getattr(engine, "engines", [engine])]
        gpus = [each for each in devices if each.type == "cuda"]

        def synchronize() -> None:
            for gpu in gpus:
                torch.cuda.synchronize(gpu)

        dtype = getattr(torch, config.precision)
        multiply, product_flops = pytorch_loops.matrix_product(device, dtype)
        loop_calls, client_flops = _cohort_loops(simulation, loops)
        measurement.recorder = Recorder(synchronize)
        measurement.device, measurement.settled = device, lambda: getattr(engine, "settled", True)
        measurement.loops = loop_calls | {MATRIX_PRODUCT: multiply}
        with recording(measurement.recorder), suppress(MeasurementComplete):
            simulation.run()
    peak = len(devices) * product_flops / min(measurement.seconds[MATRIX_PRODUCT])
    header, accepted = measurement.header, [record.accepted for record in measurement.records]
    mean = statistics.mean
    parts = {part: mean(each[part] for each in measurement.parts) for part in (*PARTS, OTHER)}
    updates = dict.fromkeys((WHOLE, LOCAL), mean(accepted))
    updates |= dict.fromkeys(loop_calls, header.cohort)
    result = {
        **{name: getattr(header, name) for name in HEADER_FIELDS},
        "precision": config.precision,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "fedcomp": __version__,
        "rounds": len(measurement.parts),
        "accepted": sum(accepted),
        "accuracy": measurement.records[-1].accuracy,
        "client_flops": client_flops,
        "peak_flops_per_s": peak,
        "parts": {n: {"seconds": s, "share": s / sum(parts.values())} for n, s in parts.items()},
        "ways": [
            _rate(name, measurement.seconds[name], count, client_flops, peak)
            for name, count in updates.items()
        ],
    }
    return result


def _cohort_loops(
    simulation: Simulation, loops: Sequence[str]
) -> tuple[dict[str, Callable[[], object]], float]:
    """Return PyTorch loops that train a cohort (clients of a round), and the number of floating-point operations of one client update.

    The number of operations is 0 for a task with its own training function (`train_fn`).
    """
    config, trainer, task = simulation.config, simulation.clients.trainer, simulation.task
    if task.train_fn is not None and BIG_BATCH in loops:
        raise ConfigError(
            f"--loops {BIG_BATCH} cannot run the task's train_fn; give lean, usual or none"
        )
    cohort = seeds.generator(config.seed, "bench").permutation(config.clients)
    cohort = cohort[: cohort_size(config.participation, config.clients)]
    data, sgd, shards = trainer.data, trainer.sgd, [trainer.shards[client] for client in cohort]
    plans = [
        plan_batches(sgd, shard, config.seed, 1, int(client))
        for client, shard in zip(cohort, shards, strict=True)
    ]
    examples = sum(len(batch) for plan in plans for batch in plan) / len(plans)
    factories: dict[str, Callable[[], Callable[[], object]]] = {
        "lean": lambda: pytorch_loops.lean_loop(task, data, shards, plans, sgd),
        "usual": lambda: pytorch_loops.usual_loop(task, data, shards, plans, sgd),
        BIG_BATCH: lambda: pytorch_loops.big_batch(task, data, plans, sgd),
    }
    runs = {LOOPS[name]: factories[name]() for name in loops}
    if task.train_fn is not None:
        return runs, 0.0
    if config.precision != "float32":
        dtype = getattr(torch, config.precision)
        in_precision = torch.autocast(simulation.device.type, dtype)
        runs = {name: in_precision(run) for name, run in runs.items()}
    return runs, examples * pytorch_loops.flops_of_an_example(task, data, config.batch_size)


def _rate(
    name: str, seconds: Sequence[float], updates: float, client_flops: float, peak: float
) -> dict[str, Any]:
    """Return the median time to train the clients of a round, the client updates per second, and the floating-point operations per second.

    The last value is None if the number of operations of a client update is unknown (`client_flops` = 0).
    """
    median = max(statistics.median(seconds), 1e-9)
    flops = updates * client_flops / median if client_flops else None
    return {
        "name": name,
        "seconds": median,
        "client_updates_per_s": updates / median,
        "flops_per_s": flops,
        "share_of_peak": None if flops is None else flops / peak,
    }


def _print_tables(m: Mapping[str, Any], loops: Sequence[str]) -> None:
    lean_s = next((loop["seconds"] for loop in m["ways"] if loop["name"] == LEAN), None)
    rates = []
    for loop in m["ways"]:
        name, seconds, speed, flops, fraction = loop.values()  # as in _rate
        row = [
            name,
            f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}",
            f"{1e3 * seconds:,.1f} ms",
            NOTHING if lean_s is None else f"{lean_s / seconds:.2f} ×",
            NOTHING if flops is None else f"{flops / 1e9:,.2f}",
            NOTHING if fraction is None else f"{fraction:.1%}",
        ]
        rates.append(row)
    times = [
        (name, f"{1e3 * part['seconds']:,.1f}", f"{part['share']:.1%}")
        for name, part in m["parts"].items()
    ]
    title = (
        f"{m['task']}, {m['cohort']} of {m['clients']} clients, {m['parameters']:,} parameters; {m['strategy']}, "
        f"{m['uplink']}, {m['memory']}\n{m['device']}, {m['threads']} threads, {m['precision']}, engine {m['engine']}; "
        f"{m['rounds']} rounds; times are medians, and means for parts of a round; a large matrix product reaches "
        f"{m['peak_flops_per_s'] / 1e9:,.0f} GFLOP/s\n"
    )
    legend = "\n".join([*(LEGENDS[name] for name in loops), PEAK_LEGEND, ""])
    print_table(RATES, rates, {RATES[0]}, title=title, legend=legend)
    print_table(TIMES, times, {TIMES[0]})
    print(largest_costs(m["parts"]))


def largest_costs(parts: Mapping[str, Mapping[str, float]]) -> str:
    """Return a sentence that names the most expensive parts of a round besides training."""
    others = [(name, part) for name, part in parts.items() if name != TRAINING]
    costs = sorted(others, key=lambda item: -item[1]["seconds"])[:LARGEST_COSTS]
    named = [f"{name} {1e3 * p['seconds']:,.1f} ms ({p['share']:.1%})" for name, p in costs]
    return f"Largest costs besides training: {', '.join(named)}."
