"""Client updates per second of local SGD, in two plain PyTorch loops and in fedcomp's engines.

    python benchmarks/local_sgd.py [--task mnist-logreg] [--clients 200] [--repeats 15] [--threads 2]
    python benchmarks/local_sgd.py --task mnist-cnn --clients 20

Each client trains 5 steps with batches of 20, on MNIST if FEDCOMP_DATA is set, and on random examples otherwise. For every client, the
usual loop copies the model and shuffles with a DataLoader. The lean loop reuses one model and indexes tensors in memory. It and the engines
have the same batches and return the same updates, up to rounding. Times are medians of interleaved repeats. The table also has
the processor time per client, summed over all threads and processes, which depends less on other load.
"""

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from fedcomp import config, tasks
from fedcomp.cli.pytorch_loops import lean_loop, usual_loop
from fedcomp.layout import Layout
from fedcomp.malloc import keep_freed_memory
from fedcomp.sim.batched import BatchedEngine
from fedcomp.sim.engine_choice import clients_at_once
from fedcomp.sim.processes import WorkerEngine
from fedcomp.tasks.base import Task, initial_model
from fedcomp.tasks.data import Data
from fedcomp.training.engine import Job, SerialEngine
from fedcomp.training.local_sgd import LocalSGD, plan_batches

SHAPES = {"mnist-logreg": (784,), "mnist-cnn": (1, 28, 28)}
LOW_PRECISION = "bfloat16"


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
    """Return the processor time that this process and `processes` (a list of process ids) have used so far, in seconds."""
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
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()

    folder = config.data_folder(None)
    task, sgd = tasks.load(args.task, folder), LocalSGD(steps=5, batch_size=20)
    low_precision = dataclasses.replace(sgd, precision=LOW_PRECISION)
    source, data = examples(task)
    shards = np.array_split(np.random.default_rng(0).permutation(len(data)), args.clients)

    def plan() -> list[list[np.ndarray]]:
        return [plan_batches(sgd, shard, 0, 1, client_id) for client_id, shard in enumerate(shards)]

    model, plans = initial_model(task, 0), plan()
    layout = Layout.of(model)
    start, at_once = layout.gather(model), clients_at_once(model, torch.device("cpu"), 20)
    serial = SerialEngine(task, initial_model(task, 0), layout, "cpu")
    batched = BatchedEngine(task, initial_model(task, 0), layout, "cpu", at_once)
    workers = WorkerEngine(
        config.RunConfig(task=args.task, seed=0), task, initial_model(task, 0), args.threads
    )
    data, jobs = (
        workers.place_data(data),
        [Job(1, client_id, batches) for client_id, batches in enumerate(plans)],
    )
    together = partial(batched.train, start, data, jobs, sgd, seed=0)
    loop = lean_loop(task, data, shards, plans, sgd)
    functions = {
        "usual loop": usual_loop(task, data, shards, plans, sgd),
        "lean loop": loop,
        "serial engine": lambda: [
            serial.train(start, data, batches, sgd, client=client_id).update
            for client_id, batches in enumerate(plans)
        ],
        f"batched engine, {at_once} clients": lambda: together()[0],
        f"{args.threads} processes": lambda: workers.train(start, data, jobs, sgd, seed=0)[0],
        f"serial engine, {LOW_PRECISION}": lambda: [
            serial.train(start, data, b, low_precision, client=client_id).update
            for client_id, b in enumerate(plans)
        ],
        f"{args.threads} processes, {LOW_PRECISION}": lambda: workers.train(
            start, data, jobs, low_precision, seed=0
        )[0],
    }
    expected = torch.stack(
        [torch.cat([update[e.name].flatten() for e in layout]) for update in loop()]
    )
    for name in list(functions)[2:]:
        difference = (torch.stack(list(functions[name]())) - expected).norm(dim=1) / expected.norm(
            dim=1
        )
        # Rounding can make max-pooling select another of two nearly equal pixels, so the updates of a few clients differ more.
        assert (
            difference.median() < (0.2 if LOW_PRECISION in name else 1e-4)
            and difference.max() < 0.3
        ), f"{name}: {difference}"

    times: dict[str, list[float]] = {name: [] for name in functions}
    processor_s: dict[str, list[float]] = {name: [] for name in functions}
    processes = [worker.process.pid for worker in workers.workers]
    for _ in range(args.repeats):
        for name, run in functions.items():
            before = processor_seconds(processes)
            times[name].append(seconds(run))
            processor_s[name].append(processor_seconds(processes) - before)
    workers.close()
    print(
        f"{task.name}, {source}, {args.clients} clients, {sgd.steps} steps with batches of {sgd.batch_size}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}; "
        f"planning the batches takes {1e3 * min(seconds(plan) for _ in range(3)):.1f} ms more"
    )
    usual, lean = (statistics.median(times[name]) for name in ("usual loop", "lean loop"))
    for name, wall_s in times.items():
        median, cost = (
            statistics.median(wall_s),
            1e3 * statistics.median(processor_s[name]) / args.clients,
        )
        ratios = f"{usual / median:8.2f} × the usual loop{lean / median:8.2f} × the lean loop"
        print(
            f"{name:28s}{args.clients / median:8.1f} client updates/s{ratios}{cost:10.2f} ms of processor time per client"
        )


if __name__ == "__main__":
    main()
