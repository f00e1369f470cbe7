"""Time of a round with almost no training: milliseconds of each part with 200 clients per round, and the effect of more idle clients.

    python benchmarks/overhead.py [--cohort 200] [--rounds 30] [--populations 200 2000 20000] [--clock cpu] [--profile]

Training is one step of a model with 42 parameters on one example. Rounds are complete, with messages in both directions, error feedback,
STC frames, checks, an average, a compressed broadcast and a checkpoint, but without evaluation. Runs with different numbers of clients
alternate, and the table has medians over the rounds of all repeats. --clock cpu measures the processor time of the main thread, which
excludes waiting for the disk. --profile prints the functions in which an additional run spends the most time.
"""

import argparse
import cProfile
import os
import pstats
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # idle threads sleep early

import torch  # noqa: E402
from torch import nn  # noqa: E402

from fedcomp import Data, RunConfig, Task  # noqa: E402
from fedcomp.callbacks import Callback, RoundRecord  # noqa: E402
from fedcomp.profiling import Recorder, recording  # noqa: E402
from fedcomp.sim import simulate  # noqa: E402

CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
EXAMPLES = 20_000  # one example for each client of the largest default population


def clouds(examples: int) -> Data:
    drawn = torch.Generator().manual_seed(0)
    return Data(torch.randn(examples, 2, generator=drawn), torch.arange(examples) % 2)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))


task = Task("tiny", model, train=lambda: clouds(EXAMPLES), test=lambda: clouds(100))


class Rounds(Callback):
    """Callback that records the milliseconds of each round and of its parts, except for the first ten rounds and the last one."""

    def __init__(self, clock: Callable[[], float], rounds: int):
        self.last = 10 + rounds
        self.clock, self.recorder = clock, Recorder(clock=clock)
        self.ms, self.parts = [], defaultdict(list)

    def on_run_start(self, header) -> None:
        self.began = self.clock()

    def on_round_end(self, record: RoundRecord) -> None:
        now = self.clock()
        own = {name: 1e3 * seconds for name, seconds in self.recorder.take().items()}
        if 10 < record.round <= self.last:
            self.ms.append(1e3 * (now - self.began))
            for name, ms in (own | {"rest": self.ms[-1] - sum(own.values())}).items():
                self.parts[name].append(ms)
        self.began = self.clock()


def run(clients: int, cohort: int, rounds: int, clock: str) -> Rounds:
    watch = Rounds(CLOCKS[clock], rounds)
    with tempfile.TemporaryDirectory() as folder, recording(watch.recorder):
        simulate(
            RunConfig(
                task=f"{__file__}:task",
                clients=clients,
                participation=cohort / clients,
                rounds=rounds + 11,
                eval_every=rounds + 11,
                local_steps=1,
                batch_size=1,
                uplink="stc:density=1/10",
                downlink="stc:density=1/10",
                device="cpu",
                out=f"{folder}/run",
            ),
            watch,
        )
    return watch


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--cohort", type=int, default=200)
    options.add_argument("--rounds", type=int, default=30)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--populations", type=int, nargs="+", default=[200, 2000, 20_000])
    options.add_argument("--clock", choices=CLOCKS, default="wall")
    options.add_argument("--profile", action="store_true")
    args = options.parse_args()
    runs: dict[int, list[Rounds]] = {clients: [] for clients in args.populations}
    for _ in range(args.repeats):
        for clients in runs:
            runs[clients].append(run(clients, args.cohort, args.rounds, args.clock))

    def median(clients: int, part: str = "") -> float:
        return statistics.median(
            ms for watch in runs[clients] for ms in (watch.parts[part] if part else watch.ms)
        )

    parts = list(runs[args.populations[0]][0].parts)
    print(
        f"{args.cohort} clients per round, medians over {args.repeats} × {args.rounds} rounds in milliseconds of {args.clock} time; "
        f"load {os.getloadavg()[0]:.1f}"
    )
    print(
        f"{'clients':>10}{'round':>9}" + "".join(f"{part:>13}" for part in parts) + f"{'other':>9}"
    )
    for clients in runs:
        other = median(clients) - median(clients, "aggregation")
        print(
            f"{clients:10,}{median(clients):9.1f}"
            + "".join(f"{median(clients, part):13.1f}" for part in parts)
            + f"{other:9.1f}"
        )
    print("other: time of a round without its aggregation")
    if args.profile:
        with cProfile.Profile() as profile:
            run(args.populations[-1], args.cohort, args.rounds, args.clock)
        pstats.Stats(profile).sort_stats("cumulative").print_stats("fedcomp", 60)


if __name__ == "__main__":
    main()
