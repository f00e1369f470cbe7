"""Client updates per second of whole rounds, beside a plain loop over PyTorch modules that only trains.

    FEDCOMP_DATA=... python benchmarks/round.py [--rounds 40]

200 clients a round, 5 steps of batch 20 each, logistic regression of MNIST's shape. The plain loop loads the global
state, trains with torch.optim.SGD and subtracts; it sends nothing and keeps nothing. A whole round trains, adds
residuals, makes STC frames at 1/400, carries Flower messages both ways, checks and averages the replies, compresses
the broadcast, and writes a checkpoint. Rounds and loops take turns in one process.
"""

import argparse
import os
import statistics
import tempfile
import time

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command line does

from local_sgd import examples, plain_loop  # noqa: E402

from fedcomp import RunConfig  # noqa: E402
from fedcomp.clients.local_sgd import LocalSGD, plan_batches  # noqa: E402
from fedcomp.observe import Observer, RoundRecord  # noqa: E402
from fedcomp.sim import simulate  # noqa: E402
from fedcomp.tasks import load  # noqa: E402
from fedcomp.tasks.partition import partition  # noqa: E402

CLIENTS = 200


class Interleaved(Observer):
    """Runs the plain loop after every round, and times both."""

    def __init__(self, plain) -> None:
        self.plain, self.plain_s, self.round_s = plain, [], []

    def started(self, header) -> None:
        self.began = time.perf_counter()

    def round_done(self, record: RoundRecord) -> None:
        now = time.perf_counter()
        self.round_s.append(now - self.began)
        self.plain()
        self.began = time.perf_counter()
        self.plain_s.append(self.began - now)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    name, data = examples()
    if name != "MNIST":
        raise SystemExit("set FEDCOMP_DATA to the folder with mnist/")
    config = RunConfig(task="mnist-logreg", clients=CLIENTS, participation=1.0, partition="classes:2", uplink="stc:density=1/400",
                       downlink="stc:density=1/400", lr=0.04, rounds=rounds, eval_every=rounds)
    shards = partition(config.partition, data, CLIENTS, 0)
    sgd = LocalSGD.from_config(config)
    plans = [plan_batches(sgd, shard, 0, 1, client) for client, shard in enumerate(shards)]
    watch = Interleaved(plain_loop(load("mnist-logreg"), data, plans, sgd))
    with tempfile.TemporaryDirectory() as folder:
        simulate(RunConfig(**vars(config) | {"out": f"{folder}/run"}), watch)
    plain, whole = statistics.median(watch.plain_s[1:]), statistics.median(watch.round_s[1:-1])
    print(f"{CLIENTS} clients × {sgd.steps} steps of {sgd.batch_size}; medians of {rounds - 2} interleaved rounds\n")
    for label, seconds in (("plain loop, training alone", plain), ("whole round with STC", whole)):
        print(f"{label:30}{seconds * 1e3:8.1f} ms{CLIENTS / seconds:10,.0f} updates/s{plain / seconds:8.2f} ×")


if __name__ == "__main__":
    main()
