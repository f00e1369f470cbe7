"""Client updates per second of local SGD: two plain loops over PyTorch modules, and the engines.

    python benchmarks/local_sgd.py [--task mnist-logreg] [--clients 200] [--repeats 15] [--threads 2]
    python benchmarks/local_sgd.py --task mnist-cnn --clients 20

5 steps of batch 20, on MNIST where FEDCOMP_DATA names its folder, else on random examples. The usual loop copies the model and
shuffles with a DataLoader for every client; the lean loop keeps one model and indexes resident tensors. The lean loop and the
engines get the same batches and give the same updates, those in bfloat16 to its rounding; all take turns, and the table has the
medians. Beside the rate stands the processor's time for a client, of all threads and processes: it says more where others use the
machine as well.
"""

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fedcomp import config, tasks
from fedcomp.cli.pytorch_loops import lean_loop, usual_loop
from fedcomp.layout import Layout
from fedcomp.sim.batched import BatchedEngine, choose_engine
from fedcomp.sim.processes import WorkerEngine
from fedcomp.tasks.base import Task, initial_model
from fedcomp.tasks.data import Data
from fedcomp.training.batches import plan_batches
from fedcomp.training.devices import keep_freed_memory
from fedcomp.training.engine import Job
from fedcomp.training.local_sgd import LocalSGD
from fedcomp.training.serial_engine import SerialEngine

SHAPES = {"mnist-logreg": (784,), "mnist-cnn": (1, 28, 28)}
COARSE = "bfloat16"


def examples(task: Task) -> tuple[str, Data]:
    if config.data_folder(None):
        return "MNIST", task.train()
    drawn, shape = torch.Generator().manual_seed(0), SHAPES[task.name]
    return "random examples", Data(
        torch.randn(60_000, *shape, generator=drawn),
        torch.randint(0, 10, (60_000,), generator=drawn),
    )


def seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def processor_seconds(processes: list[int]) -> float:
    """Of this process and others, so far."""
    ticks = [
        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in processes
    ]
    return time.process_time() + sum(int(tick) for both in ticks for tick in both) / os.sysconf(
        "SC_CLK_TCK"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--task", choices=SHAPES, default="mnist-logreg")
    options.add_argument("--clients", type=int, default=200)
    options.add_argument("--repeats", type=int, default=15)
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    keep_freed_memory()

    folder = config.data_folder(None)
    task, sgd = tasks.load(given.task, folder), LocalSGD(steps=5, batch_size=20)
    coarse = dataclasses.replace(sgd, precision=COARSE)
    source, data = examples(task)
    shards = np.array_split(np.random.default_rng(0).permutation(len(data)), given.clients)

    def plan() -> list[list[np.ndarray]]:
        return [plan_batches(sgd, shard, 0, 1, who) for who, shard in enumerate(shards)]

    model, plans = initial_model(task, 0), plan()
    layout = Layout.of(model)
    start, at_once = layout.gather(model), choose_engine(model, "cpu", "batched")[1]
    serial = SerialEngine(task, initial_model(task, 0), layout, "cpu")
    batched = BatchedEngine(task, initial_model(task, 0), layout, "cpu", at_once)
    workers = WorkerEngine(
        config.RunConfig(task=given.task, seed=0), task, initial_model(task, 0), given.threads
    )
    data, jobs = workers.resident(data), [Job(1, who, batches) for who, batches in enumerate(plans)]
    loop = lean_loop(task, data, shards, plans, sgd)
    ways = {
        "usual loop": usual_loop(task, data, shards, plans, sgd),
        "lean loop": loop,
        "serial engine": lambda: [
            serial.train(start, data, batches, sgd, client=who).update
            for who, batches in enumerate(plans)
        ],
        f"batched engine, {at_once} at once": lambda: batched.train(start, data, plans, sgd)[0],
        f"{given.threads} processes": lambda: workers.train(start, data, jobs, sgd, seed=0)[0],
        f"serial engine, {COARSE}": lambda: [
            serial.train(start, data, b, coarse, client=who).update for who, b in enumerate(plans)
        ],
        f"{given.threads} processes, {COARSE}": lambda: workers.train(
            start, data, jobs, coarse, seed=0
        )[0],
    }
    expected = torch.stack(
        [torch.cat([update[e.name].flatten() for e in layout]) for update in loop()]
    )
    for name in list(ways)[2:]:
        difference = (torch.stack(list(ways[name]())) - expected).norm(dim=1) / expected.norm(dim=1)
        # of a maximum over two equal values rounding chooses, so that a client in a hundred is further off in any two layouts
        assert difference.median() < (0.2 if COARSE in name else 1e-4) and difference.max() < 0.3, (
            f"{name}: {difference}"
        )

    times: dict[str, list[float]] = {name: [] for name in ways}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    processes = [worker.process.pid for worker in workers.workers]
    for _ in range(given.repeats):
        for name, run in ways.items():
            before = processor_seconds(processes)
            times[name].append(seconds(run))
            spent[name].append(processor_seconds(processes) - before)
    workers.close()
    print(
        f"{task.name}, {source}, {given.clients} clients, {sgd.steps} steps of {sgd.batch_size}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}; planning the batches takes {1e3 * min(seconds(plan) for _ in range(3)):.1f} ms more"
    )
    usual, lean = (statistics.median(times[name]) for name in ("usual loop", "lean loop"))
    for name, taken in times.items():
        median, cost = (
            statistics.median(taken),
            1e3 * statistics.median(spent[name]) / given.clients,
        )
        ratios = f"{usual / median:8.2f} × the usual loop{lean / median:8.2f} × the lean loop"
        print(
            f"{name:28s}{given.clients / median:8.1f} client updates/s{ratios}{cost:10.2f} ms of processor a client"
        )


if __name__ == "__main__":
    main()
