"""Which codec: accuracy after equally many rounds, bytes and encoding time of every codec, as the tables of docs/how-to/choose-a-codec.md.

    FEDCOMP_DATA=... python benchmarks/choosing.py [--task mnist-logreg] [--clients 100] [--rounds 50] [--participation 0.2] [--seeds 2]
                                                   [--partition iid dirichlet:0.1] [--numel 1_000_000]

In the first table the uplink is compressed and the downlink is not, but for the signs that `vote` sends back: what differs between rows
is the codec, the memory of the clients and, where the table names one, the strategy. In the second all clients send `stc:density=1/100`
and the downlink differs, with the server's memory around it. Bytes are those of one client in one round, headers included: the mean over
all frames that were made, up, or sent, down, which holds what a client had missed. Accuracy is a mean over seeds after the last round.
Every row trains at the same learning rate but `vote`, whose steps are signs. Encoding is timed on standard normal values, in milliseconds
of processor time, so that other work on the machine hardly matters: the median of nine.
"""

import argparse
import gc
import os
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass, replace

from fedcomp import RunConfig, codec
from fedcomp.callbacks import Summary
from fedcomp.cli import bench_codecs
from fedcomp.sim import simulate

VOTE_LR = 0.002  # of votes on mnist-logreg, chosen beforehand (benchmarks/byzantine.py)


@dataclass(frozen=True)
class Way:
    """A codec, what is kept around it, and the strategy that reads it."""

    codec: str
    memory: str = "residual"
    strategy: str = "average"


UPLINKS = (
    Way("identity", "none"),
    Way("fp16"),
    Way("bf16"),
    Way("topk:density=1/100"),
    Way("topk:density=1/100,values=fp16"),
    Way("stc:density=1/25"),
    Way("stc:density=1/100"),
    Way("stc:density=1/100@layer"),
    Way("stc:density=1/400"),
    Way("sbc:density=1/100"),
    Way("threshold:tau=0.01"),
    Way("randomk:density=1/100"),
    Way("randomk:density=1/100,scaled=true", "none"),
    Way("randomk:density=1/100,scaled=true,by=magnitude", "none"),
    Way("sign", "none", "vote"),
    Way("efsign"),
    Way("onebit"),
    Way("drive:damped=true"),
    Way("eden:bits=2", "none"),
    Way("eden:bits=2,damped=true"),
    Way("qsgd:levels=16", "none"),
    Way("qsgd:levels=16,damped=true"),
    Way("terngrad", "none"),
    Way("natural", "none"),
    Way("natural", "diana"),
    Way("adaptive:levels=4"),
    Way("srq:levels=16", "none"),
    Way("vlc", "none"),
    Way("atomo:budget=3", "none"),
    Way("powersgd:rank=2"),
    Way("sketch:rows=3,ratio=8,cells=int8", "none", "fetchsgd:momentum=0,density=1/50"),
    Way("topk:density=1/100+s2"),
    Way("topk:density=1/100+qsgd:levels=4,damped=true"),
    Way("topk:density=1/25+eden:bits=2,damped=true"),
)
DOWNLINKS = (
    Way("identity", "none"),
    Way("fp16"),
    Way("topk:density=1/25"),
    Way("topk:density=1/100"),
    Way("stc:density=1/25"),
    Way("stc:density=1/100"),
    Way("stc:density=1/400"),
    Way("efsign"),
    Way("eden:bits=2,damped=true"),
    Way("qsgd:levels=16,damped=true"),
)


def run(config: RunConfig, seeds: int) -> list[Summary]:
    found = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            found.append(simulate(replace(config, seed=seed, out=f"{folder}/run")))
        gc.collect()  # the data of a run is large
    return found


def encode_ms(spec: str, vector: bench_codecs.Vector) -> float:
    """Processor time of a frame, of all threads together."""
    made, taken = codec(spec), []
    for _ in range(10):
        start = time.process_time()
        made.encode(vector.values, seed=1, layout=vector.layout)
        taken.append(1e3 * (time.process_time() - start))
    return statistics.median(taken[1:])


def row(cells: list[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def head(cells: list[str]) -> None:
    row(cells)
    row(["---", "---"] + ["--:"] * (len(cells) - 2))


def accuracies(found: list[list[Summary]]) -> list[str]:
    """A mean over seeds for each partition."""
    return [
        f"{100 * statistics.mean(summary.accuracy for summary in runs):.1f} %" for runs in found
    ]


def per_client(found: list[list[Summary]], link: str) -> list[str]:
    """Bytes of a client and round, and by how much dense models are longer; of all runs."""
    runs = [summary for several in found for summary in several]
    sent, dense = (
        sum(getattr(summary, f"{what}{link}_bytes") for summary in runs) for what in ("", "dense_")
    )
    return [
        f"{sent / sum(summary.client_updates for summary in runs):,.0f}",
        f"×{dense / sent:,.1f}" if sent else "–",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="mnist-logreg")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--participation", type=float, default=0.2)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--partition", nargs="+", default=["iid", "dirichlet:0.1"])
    parser.add_argument(
        "--numel", type=int, default=1_000_000, help="of the vector whose encoding is timed"
    )
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    base = RunConfig(task=given.task, clients=given.clients, rounds=given.rounds, participation=given.participation,
                     eval_every=given.rounds, checkpoint_every=given.rounds)  # fmt: skip
    print(
        f"{given.task}, {given.clients} clients, {given.participation:.0%} a round, {given.rounds} rounds of {base.local_steps} steps of "
        f"{base.batch_size}, learning rate {base.lr:g}; {given.seeds} seeds, load {os.getloadavg()[0]:.1f}\n"
    )

    vector = bench_codecs.normal(given.numel)
    head(
        [
            "uplink",
            "memory",
            "bytes up",
            "ratio",
            *given.partition,
            "encode 10⁶" if given.numel == 10**6 else f"encode {given.numel:,}",
        ]
    )
    for way in UPLINKS:
        own = (
            {"lr": VOTE_LR}
            if way.strategy == "vote"
            else {"downlink": "identity", "downlink_memory": "none"}
        )
        whole = replace(base, uplink=way.codec, memory=way.memory, strategy=way.strategy, **own)
        found = [
            run(replace(whole, partition=partition), given.seeds) for partition in given.partition
        ]
        name = f"`{way.codec}`" + (f" under `{way.strategy}`" if way.strategy != "average" else "")
        row(
            [
                name,
                f"`{way.memory}`",
                *per_client(found, "uplink"),
                *accuracies(found),
                f"{encode_ms(way.codec, vector):.1f} ms",
            ]
        )

    print()
    head(["downlink", "memory of the server", "bytes down", "ratio", *given.partition])
    for way in DOWNLINKS:
        whole = replace(
            base, uplink="stc:density=1/100", downlink=way.codec, downlink_memory=way.memory
        )
        found = [
            run(replace(whole, partition=partition), given.seeds) for partition in given.partition
        ]
        row(
            [
                f"`{way.codec}`",
                f"`{way.memory}`",
                *per_client(found, "downlink"),
                *accuracies(found),
            ]
        )


if __name__ == "__main__":
    main()
