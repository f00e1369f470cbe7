"""Client updates per second of whole rounds, compared with PyTorch loops that only train.

    FEDCOMP_DATA=... python benchmarks/round.py [--rounds 40]

The workload is logistic regression on MNIST with 200 clients per round, which train 5 steps with batches of 20. The loops of local_sgd.py
only train with torch.optim.SGD and return the updates. A whole round trains, adds residuals, encodes STC frames at 1/400, checks and
averages the updates, compresses the broadcast, and writes a checkpoint. Whole rounds and loops alternate in one process.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # idle threads sleep early

from local_sgd import examples, seconds  # noqa: E402

from fedcomp import RunConfig  # noqa: E402
from fedcomp.callbacks import Callback, RoundRecord  # noqa: E402
from fedcomp.cli.pytorch_loops import lean_loop, usual_loop  # noqa: E402
from fedcomp.config import data_folder  # noqa: E402
from fedcomp.sim import simulate  # noqa: E402
from fedcomp.tasks import load  # noqa: E402
from fedcomp.tasks.partition import partition  # noqa: E402
from fedcomp.training.local_sgd import (
    LocalSGD,  # noqa: E402
    plan_batches,  # noqa: E402
)

CLIENTS = 200


class Interleaved(Callback):
    """Callback that runs the PyTorch loops after every round, and records the times of rounds and loops."""

    def __init__(self, loops: dict[str, Callable[[], object]]) -> None:
        self.loops, self.loop_s, self.round_s = loops, {name: [] for name in loops}, []

    def on_run_start(self, header) -> None:
        self.began = time.perf_counter()

    def on_round_end(self, record: RoundRecord) -> None:
        now = time.perf_counter()
        self.round_s.append(now - self.began)
        for name, loop in self.loops.items():
            self.loop_s[name].append(seconds(loop))
        self.began = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    task = load("mnist-logreg", data_folder(None))
    name, data = examples(task)
    if name != "MNIST":
        raise SystemExit("MNIST is missing: set FEDCOMP_DATA to the folder that contains mnist/")
    config = RunConfig(
        task="mnist-logreg",
        clients=CLIENTS,
        participation=1.0,
        partition="classes:2",
        uplink="stc:density=1/400",
        downlink="stc:density=1/400",
        lr=0.04,
        rounds=rounds,
        eval_every=rounds,
    )
    shards = partition(config.partition, data, CLIENTS, 0)
    sgd = LocalSGD.from_config(config)
    plans = [plan_batches(sgd, shard, 0, 1, client) for client, shard in enumerate(shards)]
    watch = Interleaved(
        {
            "usual loop": usual_loop(task, data, shards, plans, sgd),
            "lean loop": lean_loop(task, data, shards, plans, sgd),
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        simulate(RunConfig(**vars(config) | {"out": f"{folder}/run"}), watch)
    medians = {name: statistics.median(taken[1:]) for name, taken in watch.loop_s.items()}
    medians["whole round with STC"] = statistics.median(watch.round_s[1:-1])
    print(
        f"{CLIENTS} clients × {sgd.steps} steps with batches of {sgd.batch_size}; medians over {rounds - 2} rounds\n"
    )
    for name, median in medians.items():
        ratios = f"{medians['usual loop'] / median:8.2f} × the usual loop{medians['lean loop'] / median:8.2f} × the lean loop"
        print(f"{name:24}{median * 1e3:8.1f} ms{CLIENTS / median:8,.0f} client updates/s{ratios}")


if __name__ == "__main__":
    main()
