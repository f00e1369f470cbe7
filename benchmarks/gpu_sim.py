"""Local SGD of many clients on a GPU: speed, memory, and whether batched training returns the same updates as serial training.

    python benchmarks/gpu_sim.py [--device cuda] [--models mnist-cnn,...] [--clients 100] [--json FILE]

The benchmark needs neither Flower nor data sets: examples are random, with the shapes of MNIST and CIFAR-10. For each model, in float32 and
bfloat16, it runs the serial engine (clients one by one), the batched engine (many clients at once), and one model on one big batch of the
same examples, whose speed is an upper limit. It prints

- client updates per second;
- the floating point operations per second of training (counted by torch), as a percentage of those of a large matrix product;
- the peak memory per additional client;
- the largest relative distance of an update from that of the serial engine. By torch's default, float32 convolutions of cuDNN may use TF32,
  with 10 bits of mantissa, which increases this distance.

Then it times the compression of a stack of updates, counts how often the host waits for the device, and tests training with too little
memory and on several devices. The exit status is 1 if an update does not agree with serial training. On a CPU (--device cpu), the sizes are
small.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedcomp import codec, memory
from fedcomp.layout import Layout
from fedcomp.sim.batched import BatchedEngine
from fedcomp.sim.multi_device import MultiDevice
from fedcomp.tasks import cifar10, mnist
from fedcomp.tasks.base import Task, initial_model
from fedcomp.tasks.data import Data
from fedcomp.training.engine import Job, SerialEngine
from fedcomp.training.local_sgd import LocalSGD, plan_batches

IMAGES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
# Maximum relative distance of an update from serial training. It is large, because rounding can make max-pooling select another pixel.
TOLERANCES = {"float32": 1e-2, "bfloat16": 0.5}
# Maximum median of this distance over clients in float32. It is smaller, because max-pooling selects another pixel only for a few clients.
MEDIAN_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    examples: str  # kind of the examples: a key of IMAGES, or "rows"
    sgd: LocalSGD


CASES = {
    "mnist-logreg": Case(mnist.linear, "rows", LocalSGD(5, batch_size=20)),
    "mlp": Case(
        lambda: nn.Sequential(
            nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)
        ),
        "rows",
        LocalSGD(5, batch_size=20),
    ),
    "mnist-cnn": Case(mnist.network, "mnist", LocalSGD(5, batch_size=20)),
    "cifar10-vgg11s": Case(cifar10.network, "cifar10", LocalSGD(5, batch_size=20)),
    "cifar10-resnet18": Case(cifar10.ResNet18, "cifar10", LocalSGD(5, batch_size=20, momentum=0.9)),
}
HEAVY = "cifar10-resnet18"


@dataclass(frozen=True)
class Row:
    model: str
    method: str
    precision: str
    at_once: int
    updates_per_s: float
    arithmetic: float  # fraction of the device's peak floating point operations per second
    bytes_a_client: int  # peak memory per additional client; 0 on a CPU
    distance: float  # maximum over clients of the relative distance from the serial engine's update
    typical: float  # median over clients of the relative distance from the serial engine's update


def examples(kind: str, count: int) -> Data:
    drawn = torch.Generator().manual_seed(0)
    shape = (784,) if kind == "rows" else IMAGES[kind]
    return Data(
        torch.randn(count, *shape, generator=drawn), torch.randint(0, 10, (count,), generator=drawn)
    )


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(
    run: Callable[[], object], device: torch.device, repeats: int, warm_up: int = 3
) -> float:
    times = []
    for _ in range(warm_up + repeats):
        synchronise(device)
        began = time.perf_counter()
        run()
        synchronise(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[warm_up:])


def peak_per_s(device: torch.device, precision: str) -> float:
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device, dtype=getattr(torch, precision)) for _ in range(2))
    return 2 * n**3 / seconds(lambda: a @ b, device, 10)


class Bench:
    """The measurements of one model that many clients train."""

    def __init__(self, name: str, clients: int, device: torch.device, repeats: int):
        self.name, self.case, self.device, self.repeats = name, CASES[name], device, repeats
        data = examples(self.case.examples, 40 * clients)
        self.task = Task(name, self.case.make, lambda: data, lambda: data)
        self.data = Data(data.inputs.to(device), data.targets.to(device))
        model = initial_model(self.task, 0)
        # With this model's zero weights, the first step would be the same for all clients.
        if name == "mnist-logreg":
            nn.init.normal_(model.weight, std=0.05)
        self.model, self.layout = model, Layout.of(model)
        self.start = self.layout.gather(model).to(device)
        self.plans = [
            plan_batches(self.case.sgd, np.arange(40) + 40 * client, 0, 1, client)
            for client in range(clients)
        ]

    def fresh(self) -> nn.Module:
        return initial_model(self.task, 0)

    def serial(self, sgd: LocalSGD) -> tuple[Tensor, float]:
        engine = SerialEngine(self.task, self.fresh(), self.layout, self.device)

        def train():
            return torch.stack(
                [engine.train(self.start, self.data, plan, sgd).update for plan in self.plans]
            )

        return train(), seconds(train, self.device, 1, 1)

    def one_batch(self, sgd: LocalSGD) -> float:
        """Return the seconds to train one model on the examples of all clients, a lower limit for the batched engine."""
        engine = SerialEngine(self.task, self.fresh(), self.layout, self.device)
        together = [np.concatenate(step) for step in zip(*self.plans, strict=True)]
        return seconds(
            lambda: engine.train(self.start, self.data, together, sgd), self.device, self.repeats
        )

    def operations(self) -> int:
        engine = BatchedEngine(self.task, self.fresh(), self.layout, self.device)
        # The first call of the engine also verifies its gradients, which is not counted.
        train_together(engine, self, self.plans[:1])
        with FlopCounterMode(display=False) as counter:
            train_together(engine, self, self.plans[:1])
        return counter.get_total_flops()

    def batched(
        self,
        sgd: LocalSGD,
        exact: Tensor,
        fraction: Callable[[float], float],
    ) -> Row:
        engine = BatchedEngine(
            self.task,
            self.fresh(),
            self.layout,
            self.device,
            len(self.plans),
            warn=print,
        )
        each = self._bytes_per_client(engine, sgd)

        def train() -> Tensor:
            return train_together(engine, self, self.plans, sgd)

        time_s = seconds(train, self.device, self.repeats)
        distance = (train() - exact).norm(dim=1) / exact.norm(dim=1)
        return Row(
            self.name,
            engine.gradient_method,
            sgd.precision,
            min(engine.at_once, len(self.plans)),
            len(self.plans) / time_s,
            fraction(time_s),
            each,
            float(distance.max()),
            float(distance.median()),
        )

    def _bytes_per_client(self, engine: BatchedEngine, sgd: LocalSGD) -> int:
        if self.device.type != "cuda":
            return 0
        some = [plan[:2] for plan in self.plans[:8]]
        few, more = (
            peak_bytes(self.device, lambda m=m: train_together(engine, self, some[:m], sgd))
            for m in (4, 8)
        )
        return max(0, more - few) // 4

    def rows(self, peaks: dict[str, float]) -> list[Row]:
        operations, found = self.operations(), []
        exact, _ = self.serial(self.case.sgd)
        for precision, peak in peaks.items():
            sgd = replace(self.case.sgd, precision=precision)

            def fraction(time_s: float, peak: float = peak) -> float:
                return operations * len(self.plans) / time_s / peak

            updates, time_s = self.serial(sgd)
            distance = (updates - exact).norm(dim=1) / exact.norm(dim=1)
            found.append(
                Row(
                    self.name,
                    "serial",
                    precision,
                    1,
                    len(self.plans) / time_s,
                    fraction(time_s),
                    0,
                    float(distance.max()),
                    float(distance.median()),
                )
            )
            time_s = self.one_batch(sgd)
            found.append(
                Row(
                    self.name,
                    "one big batch",
                    precision,
                    0,
                    len(self.plans) / time_s,
                    fraction(time_s),
                    0,
                    0.0,
                    0.0,
                )
            )
            found.append(self.batched(sgd, exact, fraction))
        return found


def show(row: Row) -> None:
    speed = f"{row.updates_per_s:11.1f} updates/s{100 * row.arithmetic:7.2f} %"
    print(
        f"{row.model:18}{row.method:24}{row.precision:10}{row.at_once:6} at once{speed}"
        f"{row.bytes_a_client / 1e6:10.2f} MB per client   distance from serial {row.distance:.1e}, median {row.typical:.1e}",
        flush=True,
    )


def compression(device: torch.device, clients: int) -> dict[str, float]:
    """Return the milliseconds to compress a stack of updates and store the residuals, and how often the host waits for the device."""
    n, stc = (
        (1_663_370, codec("stc:density=1/400"))
        if device.type == "cuda"
        else (166_337, codec("stc:density=1/400"))
    )
    memories = [memory("residual", stc, numel=n) for _ in range(clients)]
    x = torch.randn(clients, n, device=device)

    def propose() -> None:
        type(memories[0]).propose_batch(memories, x.clone(), range(clients))

    def commit() -> None:
        type(memories[0]).commit_batch(memories)

    times: dict[str, list[float]] = {"propose": [], "commit": []}
    for _ in range(6):
        times["propose"].append(seconds(propose, device, 1, 0))
        times["commit"].append(seconds(commit, device, 1, 0))
    found = {f"{name}_ms": 1e3 * statistics.median(time_s[2:]) for name, time_s in times.items()}
    if device.type == "cuda":
        for name, work in (("propose", propose), ("commit", commit)):
            found[f"{name}_waits"] = waits(work)
    return found | {"clients": clients, "elements": n}


def waits(work: Callable[[], None]) -> int:
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def train_together(
    engine: BatchedEngine,
    bench: Bench,
    plans: Sequence[Sequence[np.ndarray]],
    sgd: LocalSGD | None = None,
) -> Tensor:
    """Train a client on each plan of batches, and return the updates."""
    jobs = [Job(1, client, plan) for client, plan in enumerate(plans)]
    return engine.train_together(bench.start, bench.data, jobs, sgd or bench.case.sgd, 0)[0]


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def memory_runs_out(device: torch.device) -> bool:
    """Return whether the batched engine trains fewer clients at once, with the same updates, if memory runs out."""
    bench, messages = Bench("mnist-cnn", 64, device, 1), []
    engine = BatchedEngine(bench.task, bench.fresh(), bench.layout, device, warn=messages.append)
    expected = train_together(engine, bench, bench.plans)
    each = peak_bytes(device, lambda: train_together(engine, bench, bench.plans)) // 64
    engine = BatchedEngine(bench.task, bench.fresh(), bench.layout, device, warn=messages.append)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved(device) + 20 * each) / total, device
    )
    try:
        found = train_together(engine, bench, bench.plans)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    distance = ((found - expected).norm(dim=1) / expected.norm(dim=1)).max()
    print(
        f"with memory for about 20 of 64 clients: {messages}; {engine.at_once} clients at once in the end, relative distance {distance:.1e}"
    )
    return (
        len(messages) == 1 and 0 < engine.at_once < 64 and float(distance) < TOLERANCES["float32"]
    )


def agrees_on_several_devices(device: torch.device, clients: int) -> bool:
    """Return whether training on several devices (or by two engines on one GPU) returns the same updates as on one device."""
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    gpus = [torch.device("cuda", i) for i in range(count)] if count > 1 else [device] * 2
    bench = Bench("mnist-cnn", clients, gpus[0], 3)
    engines = [
        BatchedEngine(bench.task, bench.fresh(), bench.layout, place, warn=print) for place in gpus
    ]
    jobs = [Job(1, client, plan) for client, plan in enumerate(bench.plans)]
    several, found = MultiDevice(engines, []), {}
    for name, engine in (("one", engines[0]), ("several", several)):
        time_s = seconds(
            lambda e=engine: e.train(bench.start, bench.data, jobs, bench.case.sgd, seed=0),
            gpus[0],
            3,
        )
        found[name] = engine.train(bench.start, bench.data, jobs, bench.case.sgd, seed=0)[0]
        print(
            f"mnist-cnn on {name}: {clients / time_s:.1f} updates/s ({', '.join(map(str, gpus)) if name == 'several' else gpus[0]})"
        )
    several.close()
    return (
        float(((found["one"] - found["several"]).norm(dim=1) / found["one"].norm(dim=1)).max())
        < TOLERANCES["float32"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--models",
        help="models to train, separated by commas; default: "
        + ", ".join(CASES)
        + "; on a CPU, without "
        + HEAVY,
    )
    parser.add_argument(
        "--clients",
        type=int,
        default=0,
        help="number of clients; default: 100 on a GPU, 4 on a CPU",
    )
    parser.add_argument(
        "--repeats", type=int, default=0, help="number of repeats; default: 5 on a GPU, 1 on a CPU"
    )
    parser.add_argument("--json", help="write the results to this JSON file")
    args = parser.parse_args()
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    clients, repeats = args.clients or (100 if cuda else 4), args.repeats or (5 if cuda else 1)
    name = (
        torch.cuda.get_device_name(device)
        if cuda
        else f"{torch.get_num_threads()} threads on a CPU"
    )
    peaks = {precision: peak_per_s(device, precision) for precision in TOLERANCES}
    print(
        f"{name}, torch {torch.__version__}, {clients} clients, medians of {repeats} repeats; a large matrix product reaches "
        + ", ".join(
            f"{peak / 1e12:.2f} TFLOP/s in {precision}" for precision, peak in peaks.items()
        ),
        flush=True,
    )
    rows: list[Row] = []
    for model in (
        args.models.split(",")
        if args.models
        else [model for model in CASES if cuda or model != HEAVY]
    ):
        for row in Bench(model, clients, device, repeats).rows(peaks):
            show(row)
            rows.append(row)
    wrong = [
        row
        for row in rows
        if not (
            row.distance < TOLERANCES[row.precision]
            and (row.precision != "float32" or row.typical < MEDIAN_TOLERANCE)
        )
    ]
    packing = compression(device, clients)
    print(
        "compression with STC at 1/400 and residuals:",
        ", ".join(f"{key} {value:,.2f}" for key, value in packing.items()),
        flush=True,
    )
    checks = {"several": agrees_on_several_devices(device, clients)} | (
        {"memory": memory_runs_out(device)} if cuda else {}
    )
    if args.json:
        found = {
            "device": name,
            "peaks": peaks,
            "rows": [asdict(row) for row in rows],
            "compression": packing,
            "checks": checks,
        }
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found, file)
    print(f"{len(rows) - len(wrong)} of {len(rows)} rows agree with serial training; {checks}")
    for row in wrong:
        print("DIFFERENT:", end=" ")
        show(row)
    sys.exit(bool(wrong) or not all(checks.values()))


if __name__ == "__main__":
    main()
