"""The largest compression at which FetchSGD loses at most two percentage points of accuracy, and a comparison with STC.

    FEDCOMP_DATA=... python benchmarks/fetchsgd.py [--task mnist-logreg mnist-cnn cifar10-vgg11s] [--rounds N] [--clients N] [--seeds N]
                                                   [--first-seed N]

Clients have two classes each, and 10 % of them take part in a round. The compression of a run is the number of bytes of an uncompressed
run, divided by that of the run, in both directions and with headers, missed broadcasts and first downloads. FetchSGD has server momentum
0.9, which multiplies its steps by 1/(1 − 0.9) = 10 in the long run. The uncompressed run is therefore repeated with several server learning
rates; the best accuracy is the reference. On MNIST, the table has a row for each sketch size, and the result is the largest compression
whose mean accuracy is within two percentage points of the reference. On CIFAR-10, the runs have 32 rounds with 4 of 10 clients, IID data
and client momentum. They are too short to converge, so the program prints the accuracy over the rounds. Set OMP_NUM_THREADS to the number
of free cores; with more threads, the runs are slow.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, field, replace

from fedcomp import RunConfig
from fedcomp.callbacks import Callback, RoundRecord
from fedcomp.sim import simulate

POINTS = 0.02  # largest accepted loss of accuracy, as a fraction: two percentage points
SERVER_RATES = (0.5, 1.0, 2.0, 3.0, 10.0)  # server learning rates of uncompressed runs
Choice = dict[str, str | float]  # maps the names of options of a run to their values
IDENTITY: Choice = {
    "uplink": "identity",
    "downlink": "identity",
    "memory": "none",
    "downlink_memory": "none",
}


def sized(ratio: float, density: str, momentum: float = 0.9) -> Choice:
    """Return the options of a run with FetchSGD.

    `ratio` is the size of the float32 model divided by that of a sketch. `density` is the fraction of coordinates in the server's
    update.
    """
    return {
        "strategy": f"fetchsgd:momentum={momentum:g},density={density}",
        "uplink": f"sketch:rows=3,ratio={ratio:g},cells=int8",
    }


def stc(density: str) -> Choice:
    return {"uplink": f"stc:density={density}", "downlink": f"stc:density={density}"}


@dataclass(frozen=True)
class Setting:
    """The settings of one task: its base configuration, and the compression options to compare."""

    run: RunConfig
    sizes: tuple[Choice, ...]
    steps: tuple[float, ...] = SERVER_RATES
    curve: bool = False  # print the accuracy over the rounds, not only after the last round


COMMON = RunConfig(partition="classes:2", participation=0.1, batch_size=20)
SETTINGS = {
    "mnist-logreg": Setting(
        replace(COMMON, task="mnist-logreg", clients=200, rounds=400, local_steps=1, lr=0.04),
        tuple(
            sized(*size)
            for size in ((6, "1/50"), (8, "1/100"), (12, "1/100"), (16, "1/200"), (24, "1/200"))
        ),
    ),
    "mnist-cnn": Setting(
        replace(COMMON, task="mnist-cnn", clients=100, rounds=100, local_steps=5, lr=0.05),
        tuple(sized(*size) for size in ((8, "1/100"), (16, "1/200"), (24, "1/300"), (32, "1/400"))),
        steps=(0.5, 1.0, 2.0),  # with larger server learning rates, the model does not learn
    ),
    "cifar10-vgg11s": Setting(
        replace(
            COMMON,
            task="cifar10-vgg11s",
            partition="iid",
            clients=10,
            participation=0.4,
            rounds=32,
            local_steps=25,
            lr=0.02,
            momentum=0.9,
        ),
        (sized(8, "1/100", 0.0), sized(16, "1/50", 0.0), stc("1/100")),
        curve=True,
    ),
}


@dataclass
class Watch(Callback):
    records: list[RoundRecord] = field(default_factory=list)

    def on_round_end(self, record: RoundRecord) -> None:
        self.records.append(record)

    @property
    def accuracy(self) -> float:
        return self.records[-1].accuracy

    def sent(self, name: str = "", until: int | None = None) -> int:
        """Return the bytes sent up to round `until` on the link `name` ("uplink" or "downlink"), or on both links if `name` is empty."""
        links = [name] if name else ["uplink", "downlink"]
        return sum(
            getattr(record, f"{link}_bytes") for record in self.records[:until] for link in links
        )


def runs(config: RunConfig, choice: Choice, seeds: range) -> list[Watch]:
    watches = []
    for seed in seeds:
        watches.append(Watch())
        with tempfile.TemporaryDirectory() as folder:
            simulate(replace(config, **choice, seed=seed, out=f"{folder}/run"), watches[-1])
    return watches


def choice_text(choice: Choice) -> str:
    step = f", step {choice['server_lr']:g}" if "server_lr" in choice else ""
    return ", ".join(choice[key] for key in ("strategy", "uplink") if key in choice) + step


def accuracy(watches: list[Watch]) -> float:
    return statistics.mean(watch.accuracy for watch in watches)


def measure(name: str, setting: Setting, seeds: range) -> None:
    c = setting.run
    steps = f"{c.local_steps} steps with batches of {c.batch_size} at learning rate {c.lr:g}"
    print(
        f"{name}: {c.clients} clients, {c.rounds} rounds of {steps}, seeds {', '.join(map(str, seeds))}\n",
        flush=True,
    )
    if setting.curve:
        return curve(setting, seeds[0])
    c = replace(c, eval_every=c.rounds, checkpoint_every=c.rounds)
    print(f"{'':64}{'accuracy':>9}{'up':>8}{'down':>8}{'both':>8}{'s':>6}")
    best, dense = (0.0, "none of these runs"), []
    uncompressed = [IDENTITY | {"server_lr": step} for step in setting.steps]
    for choice in (*uncompressed, *setting.sizes):
        began, mine = time.perf_counter(), runs(c, choice, seeds)
        if choice in uncompressed:
            dense = max(dense or mine, mine, key=accuracy)
        up, down, total = (
            sum(w.sent(link) for w in dense) / sum(w.sent(link) for w in mine)
            for link in ("uplink", "downlink", "")
        )
        seconds = time.perf_counter() - began
        print(
            f"{choice_text(choice):64}{100 * accuracy(mine):>8.2f}%{up:>7.1f}×{down:>7.1f}×{total:>7.1f}×{seconds:>6.0f}",
            flush=True,
        )
        if choice not in uncompressed and accuracy(mine) >= accuracy(dense) - POINTS:
            best = max(best, (total, f"{total:.1f}× by {choice_text(choice)}"))
    print(
        f"\nlargest compression within {100 * POINTS:g} percentage points of the reference accuracy "
        f"{100 * accuracy(dense):.2f} %: {best[1]}\n",
        flush=True,
    )


def curve(setting: Setting, seed: int) -> None:
    c = replace(
        setting.run, eval_every=max(1, setting.run.rounds // 8), checkpoint_every=setting.run.rounds
    )
    for choice in (IDENTITY, *setting.sizes):
        (watch,) = runs(c, choice, range(seed, seed + 1))
        evaluated = [record for record in watch.records if record.accuracy is not None]
        print(choice_text(choice))
        print(f"  {'round':10}" + "".join(f"{record.round:>10}" for record in evaluated))
        print(
            f"  {'MB':10}"
            + "".join(f"{watch.sent(until=record.round) / 1e6:>10.2f}" for record in evaluated)
        )
        print(
            f"  {'accuracy':10}"
            + "".join(f"{100 * record.accuracy:>9.1f}%" for record in evaluated)
            + "\n",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--clients", type=int)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    changes = {key: getattr(options, key) for key in ("rounds", "clients") if getattr(options, key)}
    for name in options.task:
        measure(name, replace(SETTINGS[name], run=replace(SETTINGS[name].run, **changes)), seeds)


if __name__ == "__main__":
    main()
