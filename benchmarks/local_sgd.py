"""Client updates per second of local SGD: two plain loops over PyTorch modules, and the two engines.

    python benchmarks/local_sgd.py [--clients 200] [--repeats 15] [--threads 2]

Logistic regression of MNIST's shape (784 x 10), 5 steps of batch 20; MNIST itself where FEDCOMP_DATA names its folder, else
random examples. The usual loop copies the model and shuffles with a DataLoader for every client; the lean loop keeps one model
and indexes resident tensors. The lean loop and the engines get the same batches and give the same updates; all take turns, and
the table has the medians.
"""

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from fedcomp import config, tasks
from fedcomp.clients.local_sgd import LocalSGD, SerialEngine, plan_batches
from fedcomp.layout import Layout
from fedcomp.sim.batched import BatchedEngine, choose_engine
from fedcomp.tasks.base import Data, Task, initial_model


def examples() -> tuple[str, Data]:
    folder = config.data_folder(config.RunConfig())
    if folder:
        return "MNIST", tasks.load("mnist-logreg", folder).train()
    drawn = torch.Generator().manual_seed(0)
    return "random examples", Data(torch.randn(60_000, 784, generator=drawn), torch.randint(0, 10, (60_000,), generator=drawn))


def usual_loop(task: Task, data: Data, shards: list[np.ndarray], sgd: LocalSGD) -> Callable[[], list[dict[str, Tensor]]]:
    """What tutorials write: a deep copy of the model and a shuffling DataLoader for each client, torch.optim.SGD, subtract the states."""
    model = initial_model(task, 0)
    examples = TensorDataset(data.inputs, data.targets)

    def run() -> list[dict[str, Tensor]]:
        updates = []
        for shard in shards:
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), lr=sgd.lr)
            loader = DataLoader(Subset(examples, shard.tolist()), batch_size=sgd.batch_size, shuffle=True)
            for inputs, targets in itertools.islice(loader, sgd.steps):
                optimizer.zero_grad()
                task.loss(local(inputs), targets).backward()
                optimizer.step()
            updates.append({name: value - model.state_dict()[name] for name, value in local.state_dict().items()})
        return updates

    return run


def plain_loop(task: Task, data: Data, plans: list[list[np.ndarray]], sgd: LocalSGD) -> Callable[[], list[dict[str, Tensor]]]:
    """The leanest loop over a module: resident tensors, one resident model, torch.optim.SGD, subtract the states."""
    model = initial_model(task, 0)
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def run() -> list[dict[str, Tensor]]:
        updates = []
        for batches in plans:
            model.load_state_dict(state)
            optimizer = torch.optim.SGD(model.parameters(), lr=sgd.lr)
            for batch in batches:
                optimizer.zero_grad()
                rows = torch.from_numpy(batch)
                task.loss(model(data.inputs[rows]), data.targets[rows]).backward()
                optimizer.step()
            updates.append({name: value - state[name] for name, value in model.state_dict().items()})
        return updates

    return run


def seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--clients", type=int, default=200)
    options.add_argument("--repeats", type=int, default=15)
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = options.parse_args()
    torch.set_num_threads(given.threads)

    source, data = examples()
    task, sgd = Task("logistic regression", lambda: nn.Linear(784, 10), lambda: data, lambda: data), LocalSGD(steps=5, batch_size=20)
    shards = np.array_split(np.random.default_rng(0).permutation(len(data)), given.clients)

    def plan() -> list[list[np.ndarray]]:
        return [plan_batches(sgd, shard, 0, 1, who) for who, shard in enumerate(shards)]

    model, plans = initial_model(task, 0), plan()
    layout = Layout.of(model)
    start, at_once = layout.gather(model), choose_engine(model, "cpu", "batched")[1]
    serial = SerialEngine(task, initial_model(task, 0), layout, "cpu")
    batched = BatchedEngine(task, initial_model(task, 0), layout, "cpu", at_once)
    loop = plain_loop(task, data, plans, sgd)
    ways = {
        "usual loop": usual_loop(task, data, shards, sgd),
        "lean loop": loop,
        "serial engine": lambda: [serial.train(start, data, batches, sgd, who=who).update for who, batches in enumerate(plans)],
        f"batched engine, {at_once} at once": lambda: batched.train(start, data, plans, sgd)[0],
    }
    expected = torch.stack([torch.cat([update[e.name].flatten() for e in layout]) for update in loop()])
    for name in list(ways)[2:]:
        torch.testing.assert_close(torch.stack(list(ways[name]())), expected, rtol=1e-4, atol=1e-6)

    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.repeats):
        for name, run in ways.items():
            times[name].append(seconds(run))
    print(f"{source}, {given.clients} clients, {sgd.steps} steps of {sgd.batch_size}, {torch.get_num_threads()} threads, "
          f"torch {torch.__version__}; planning the batches takes {1e3 * min(seconds(plan) for _ in range(3)):.1f} ms more")
    usual, lean = (statistics.median(times[name]) for name in ("usual loop", "lean loop"))
    for name, taken in times.items():
        median = statistics.median(taken)
        ratios = f"{usual / median:8.2f} × the usual loop{lean / median:8.2f} × the lean loop"
        print(f"{name:28s}{given.clients / median:8.0f} client updates/s{ratios}")


if __name__ == "__main__":
    main()
