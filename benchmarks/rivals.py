"""Client updates per second of fedcomp, of other simulators and of plain PyTorch loops.

    FEDCOMP_DATA=... python benchmarks/rivals.py [--workload mnist-cnn] [--repeats 5] [--threads 2] [--rivals FOLDER [--install]]

The workloads are logistic regression on MNIST with 200 clients per round, and two CNNs on MNIST with 28,938 and 1,663,370 parameters and 20
of 200 clients per round. Each client trains 5 steps with batches of 20. Every row of the table is a separate process with the same data,
shards, steps and threads, whose first round is not counted. fedcomp runs whole rounds with STC at 1/400 in both directions, error feedback
and checkpoints, and ten additional rounds, because the rounds in which its worker processes start are not counted. The loops and
torch.func.vmap only train the clients of a round. `one big batch` trains one model on the same examples; its speed is an upper limit.
Accuracies are measured after the last round. The other simulators are pfl (rival_pfl.py), which --install installs into FOLDER, and
Flower's Ray engine (rival_flower_ray.py), if Ray is installed. pfl runs as one process with all threads, and as processes of torchrun with
one thread each.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # idle threads sleep early

HERE = Path(__file__).resolve().parent
PFL = ("pfl==0.6.0", "torch==2.13.0")
DENSITY = "stc:density=1/400"
WARM_UP_ROUNDS = 10  # additional rounds of fedcomp, since rounds in which its worker processes start are not counted


@dataclass(frozen=True)
class Workload:
    task: str
    clients: int
    cohort: int
    rounds: int
    steps: int = 5
    batch_size: int = 20
    lr: float = 0.05

    @property
    def spec(self) -> str:
        """The task as a value of fedcomp's option --task."""
        own = {"mnist-small-cnn": f"{HERE / 'rival_tasks.py'}:small_cnn"}
        return own.get(self.task, self.task)


WORKLOADS = {
    w.task: w
    for w in (
        Workload("mnist-logreg", 200, 200, 16),
        Workload("mnist-small-cnn", 200, 20, 16),
        Workload("mnist-cnn", 200, 20, 6),
    )
}
LOOPS = ("usual loop", "lean loop", "torch.func.vmap", "one big batch")


# The functions below run in the separate process of a table row.


def run_loop(name: str, w: Workload) -> dict[str, object]:
    import numpy as np
    import torch

    from fedcomp.cli import pytorch_loops
    from fedcomp.training.local_sgd import LocalSGD, plan_batches

    task, data, shards = load(w)
    sgd, shards = LocalSGD(w.steps, batch_size=w.batch_size, lr=w.lr), shards[: w.cohort]
    plans = [plan_batches(sgd, shard, 0, 1, client) for client, shard in enumerate(shards)]
    loops: dict[str, Callable[[], Callable[[], object]]] = {
        "usual loop": lambda: pytorch_loops.usual_loop(task, data, shards, plans, sgd),
        "lean loop": lambda: pytorch_loops.lean_loop(task, data, shards, plans, sgd),
        "torch.func.vmap": lambda: vmapped(task, data, torch.from_numpy(np.array(plans)), sgd.lr),
        "one big batch": lambda: pytorch_loops.big_batch(task, data, plans, sgd),
    }
    loop = loops[name]()
    return {
        "seconds": [pytorch_loops.seconds_of(loop, torch.device("cpu")) for _ in range(w.rounds)]
    }


def vmapped(task, data, rows, lr: float) -> Callable[[], object]:
    """Return a loop that trains a stack of models as in torch.func's tutorial on ensembles. `rows`: indices [clients, steps, batch]."""
    import torch
    from torch.func import functional_call, grad, stack_module_state, vmap

    from fedcomp.tasks import initial_model

    model = initial_model(task, 0)
    stacked, _ = stack_module_state([model] * len(rows))
    start = {name: value.detach() for name, value in stacked.items()}
    gradient = vmap(
        grad(lambda weights, x, y: task.criterion(functional_call(model, weights, (x,)), y))
    )

    def run() -> dict[str, torch.Tensor]:
        weights = start
        for step in range(rows.shape[1]):
            gradients = gradient(weights, data.inputs[rows[:, step]], data.targets[rows[:, step]])
            weights = {name: value - lr * gradients[name] for name, value in weights.items()}
        return {name: value - start[name] for name, value in weights.items()}

    return run


def run_fedcomp(engine: str, precision: str, w: Workload) -> dict[str, object]:
    """Return the seconds of each round with its checkpoint, after all workers have started and without the evaluated last round."""
    from fedcomp import RunConfig
    from fedcomp.callbacks import Callback
    from fedcomp.sim.run import Simulation

    class Rounds(Callback):
        def __init__(self) -> None:
            self.seconds, self.engine = [], ""
            self.settled = lambda: True

        def on_run_start(self, header) -> None:
            self.engine, self.began = header.engine, time.perf_counter()

        def on_round_end(self, record) -> None:
            if not self.settled():  # worker processes are starting
                self.seconds.clear()
            self.seconds.append(time.perf_counter() - self.began)
            self.began, self.record = time.perf_counter(), record

    watch, rounds = Rounds(), w.rounds + WARM_UP_ROUNDS
    with tempfile.TemporaryDirectory() as folder:
        simulation = Simulation(
            RunConfig(
                task=w.spec,
                clients=w.clients,
                participation=w.cohort / w.clients,
                rounds=rounds,
                local_steps=w.steps,
                lr=w.lr,
                batch_size=w.batch_size,
                uplink=DENSITY,
                downlink=DENSITY,
                eval_every=rounds,
                engine=engine,
                device="cpu",
                out=f"{folder}/run",
                **({"precision": precision} if precision else {}),
            ),
            watch,
        )
        watch.settled = lambda: getattr(simulation.engine, "settled", True)
        simulation.run()
    last = watch.record
    return {
        "seconds": watch.seconds[:-1],
        "accuracy": last.accuracy,
        "engine": watch.engine,
        "uplink_bytes": last.uplink_bytes,
    }


def load(w: Workload):
    from fedcomp import config, tasks
    from fedcomp.tasks.partition import partition

    task = tasks.load(w.spec, config.data_folder(None))
    data = task.train()
    return task, data, partition("iid", data, w.clients, 0, task.name)


# The table.


@dataclass(frozen=True)
class Rival:
    """A row of the table, with the command that measures it."""

    name: str
    command: tuple[str, ...]


def rivals(w: Workload, args: argparse.Namespace, folder: Path) -> list[Rival]:
    """Return the rows that can run on this machine. Simulators that are not installed are named on standard error."""

    def own(name: str) -> Rival:
        return Rival(
            name,
            (
                sys.executable,
                __file__,
                "--one",
                name,
                "--workload",
                w.task,
                "--rounds",
                str(w.rounds),
                "--threads",
                str(args.threads),
            ),
        )

    found = [own(name) for name in LOOPS]
    pfl = Path(args.rivals or "") / "pfl" / "bin"
    if args.rivals and (pfl / "python").exists():
        stored = export(w, folder)
        words = (
            str(HERE / "rival_pfl.py"),
            str(stored),
            "--model",
            w.task,
            "--rounds",
            str(w.rounds),
            "--cohort",
            str(w.cohort),
            "--steps",
            str(w.steps),
            "--batch-size",
            str(w.batch_size),
            "--lr",
            str(w.lr),
        )
        found.append(
            Rival("pfl 0.6", (str(pfl / "python"), *words, "--threads", str(args.threads)))
        )
        launch = (
            str(pfl / "python"),
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(args.threads),
        )
        found.append(
            Rival(f"pfl 0.6, {args.threads} processes", (*launch, *words, "--threads", "1"))
        )
        found.append(
            Rival(
                "pfl 0.6, bf16",
                (str(pfl / "python"), *words, "--threads", str(args.threads), "--bf16"),
            )
        )
    else:
        print(
            "pfl is skipped, since it is not installed: pass --rivals FOLDER --install",
            file=sys.stderr,
        )
    ray = HERE / "rival_flower_ray.py"
    if importlib.util.find_spec("ray") and ray.exists():
        found.append(
            Rival(
                "Flower's Ray engine",
                (
                    sys.executable,
                    str(ray),
                    "--task",
                    w.task,
                    "--clients",
                    str(w.clients),
                    "--cohort",
                    str(w.cohort),
                    "--rounds",
                    str(w.rounds),
                    "--steps",
                    str(w.steps),
                    "--batch-size",
                    str(w.batch_size),
                    "--lr",
                    str(w.lr),
                    "--cores",
                    str(args.threads),
                ),
            )
        )
    else:
        print(
            "Flower's Ray engine is skipped, since Ray is not installed: pip install 'flwr[simulation]'",
            file=sys.stderr,
        )
    found += [own(name) for name in fedcomp_rows(w)]
    names = {rival.name for rival in found}
    return [
        r
        for r in found
        if not args.only
        or any(r.name == only or (only in r.name and only not in names) for only in args.only)
    ]


def fedcomp_rows(w: Workload) -> list[str]:
    """Return the names of fedcomp's rows, `fedcomp ENGINE [PRECISION]`."""
    from fedcomp import RunConfig

    options = {f.name: f.metadata for f in dataclasses.fields(RunConfig)}
    engines = [engine for engine in options["engine"]["choices"] if engine != "ray"]
    coarse = [p for p in options.get("precision", {}).get("choices", ()) if "bf" in p]
    return [f"fedcomp {engine}" for engine in engines] + [f"fedcomp auto {p}" for p in coarse]


def export(w: Workload, folder: Path) -> Path:
    """Write the workload to an .npz file for processes without fedcomp, and return the path of the file."""
    import numpy as np

    from fedcomp.tasks import initial_model

    task, data, shards = load(w)
    test = task.test()
    weights = {
        f"weights.{name}": value.detach().numpy()
        for name, value in initial_model(task, 0).state_dict().items()
    }
    np.savez(
        folder / f"{w.task}.npz",
        inputs=data.inputs,
        targets=data.targets,
        shards=np.array(shards),
        test_inputs=test.inputs,
        test_targets=test.targets,
        **weights,
    )
    return folder / f"{w.task}.npz"


def run(rival: Rival, threads: int, limit_s: float = 1800) -> dict[str, object] | None:
    """Run the process of a row and return its result, or print a message and return None if the process fails."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLWR_TELEMETRY_ENABLED": "0",
    }
    done = subprocess.run(
        rival.command, env=environment, capture_output=True, encoding="utf-8", timeout=limit_s
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(
            f"{rival.name} failed with status {done.returncode}, and is skipped: {done.stderr[:1000]}…",
            file=sys.stderr,
        )
        return None
    return json.loads(lines[-1])


def install(folder: Path) -> None:
    venv.create(folder / "pfl", with_pip=True)
    subprocess.run(
        [folder / "pfl" / "bin" / "python", "-m", "pip", "install", "--quiet", *PFL], check=True
    )


def print_table(w: Workload, results_of: dict[str, list[dict]]) -> None:
    def rate(results: list[dict]) -> float:
        return w.cohort / statistics.median(statistics.median(r["seconds"][1:]) for r in results)

    rates = {name: rate(results) for name, results in results_of.items()}
    pfl = max(
        (r for name, r in rates.items() if name.startswith("pfl") and "bf16" not in name),
        default=None,
    )
    references = {
        "the usual loop": rates.get("usual loop"),
        "pfl": pfl,
        "Ray": rates.get("Flower's Ray engine"),
    }
    print(
        f"\n{w.task}: {w.cohort} of {w.clients} clients per round, {w.steps} steps with batches of {w.batch_size}"
    )
    for name, results in results_of.items():
        ratios = "".join(
            f"{rates[name] / rate:8.2f} × {reference}"
            for reference, rate in references.items()
            if rate
        )
        accuracy_text = next(
            (f"   accuracy {r['accuracy']:.3f}" for r in results if r.get("accuracy") is not None),
            "",
        )
        print(
            f"{name:26}{rates[name]:8,.0f} client updates/s{ratios}{accuracy_text}   {results[0].get('engine', '')}"
        )


def workload(name: str, rounds: int | None) -> Workload:
    return dataclasses.replace(WORKLOADS[name], rounds=rounds or WORKLOADS[name].rounds)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument(
        "--workload",
        choices=WORKLOADS,
        action="append",
        help="workload to measure; may be repeated; default: all workloads",
    )
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument(
        "--rounds",
        type=int,
        help="number of rounds in each process; default: 16, or 6 for mnist-cnn",
    )
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options.add_argument(
        "--rivals", metavar="FOLDER", help="folder into which --install installs other simulators"
    )
    options.add_argument("--install", action="store_true")
    options.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="measure only the row of this name, or all rows whose names contain TEXT; may be repeated",
    )
    options.add_argument(
        "--json",
        metavar="FILE",
        help="append the result of each process to this file, as a line of JSON",
    )
    options.add_argument(
        "--one", metavar="ROW", help="measure one row in this process and print its times"
    )
    args = options.parse_args()
    if args.one:
        import torch

        torch.set_num_threads(args.threads)
        w, (kind, *rest) = workload(args.workload[0], args.rounds), args.one.split()
        print(
            json.dumps(
                run_fedcomp(rest[0], *(rest[1:] or [""]), w)
                if kind == "fedcomp"
                else run_loop(args.one, w)
            )
        )
        return
    if args.install:
        install(Path(args.rivals or sys.exit("--install needs --rivals FOLDER")))
    with tempfile.TemporaryDirectory() as folder:
        for name in args.workload or WORKLOADS:
            w, results_of = workload(name, args.rounds), {}
            chosen = rivals(w, args, Path(folder))
            for repeat in range(args.repeats):
                for rival in chosen:
                    if (result := run(rival, args.threads)) is None:
                        continue
                    results_of.setdefault(rival.name, []).append(result)
                    if args.json:
                        with open(args.json, "a") as file:
                            file.write(
                                json.dumps(
                                    {"workload": name, "rival": rival.name, "repeat": repeat}
                                    | result
                                )
                                + "\n"
                            )
            print_table(w, results_of)
            print(
                f"medians of {args.repeats} interleaved processes, {args.threads} threads, load {os.getloadavg()[0]:.1f}"
            )


if __name__ == "__main__":
    main()
