"""Accuracy, bytes and encoding time of every codec: the tables of docs/how-to/choose-a-codec.md.

    FEDCOMP_DATA=... python benchmarks/choosing.py [--task mnist-logreg] [--clients 100] [--rounds 50] [--participation 0.2] [--seeds 2]
                                                   [--partition iid dirichlet:0.1] [--numel 1_000_000]

In the first table, only the uplink is compressed, except with the strategy `vote`, which also sends signs to clients. Its rows differ in
the uplink codec, the memory of the clients (such as error feedback) and the strategy. In the second table, all clients send
`stc:density=1/100`, and rows differ in the downlink codec and the server's memory. Bytes are means per client and round, with headers, and
with broadcasts that a client missed and received later. Accuracy is the mean over seeds after the last round. All rows have the same
learning rate, except `vote`, which needs smaller steps. Encoding time is the median processor time over nine frames of standard normal
values.
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

# learning rate of the strategy `vote` on mnist-logreg, the same as in benchmarks/byzantine.py
VOTE_LR = 0.002


@dataclass(frozen=True)
class Compression:
    """A codec, the memory that wraps it (such as error feedback), and the strategy that decodes its frames."""

    codec: str
    memory: str = "residual"
    strategy: str = "average"


UPLINKS = (
    Compression("identity", "none"),
    Compression("fp16"),
    Compression("bf16"),
    Compression("topk:density=1/100"),
    Compression("topk:density=1/100,values=fp16"),
    Compression("stc:density=1/25"),
    Compression("stc:density=1/100"),
    Compression("stc:density=1/100@layer"),
    Compression("stc:density=1/400"),
    Compression("sbc:density=1/100"),
    Compression("threshold:tau=0.01"),
    Compression("randomk:density=1/100"),
    Compression("randomk:density=1/100,scaled=true", "none"),
    Compression("randomk:density=1/100,scaled=true,by=magnitude", "none"),
    Compression("sign", "none", "vote"),
    Compression("efsign"),
    Compression("onebit"),
    Compression("drive:damped=true"),
    Compression("eden:bits=2", "none"),
    Compression("eden:bits=2,damped=true"),
    Compression("qsgd:levels=16", "none"),
    Compression("qsgd:levels=16,damped=true"),
    Compression("terngrad", "none"),
    Compression("natural", "none"),
    Compression("natural", "diana"),
    Compression("adaptive:levels=4"),
    Compression("srq:levels=16", "none"),
    Compression("vlc", "none"),
    Compression("atomo:budget=3", "none"),
    Compression("powersgd:rank=2"),
    Compression("sketch:rows=3,ratio=8,cells=int8", "none", "fetchsgd:momentum=0,density=1/50"),
    Compression("topk:density=1/100+s2"),
    Compression("topk:density=1/100+qsgd:levels=4,damped=true"),
    Compression("topk:density=1/25+eden:bits=2,damped=true"),
)
DOWNLINKS = (
    Compression("identity", "none"),
    Compression("fp16"),
    Compression("topk:density=1/25"),
    Compression("topk:density=1/100"),
    Compression("stc:density=1/25"),
    Compression("stc:density=1/100"),
    Compression("stc:density=1/400"),
    Compression("efsign"),
    Compression("eden:bits=2,damped=true"),
    Compression("qsgd:levels=16,damped=true"),
)


def run(config: RunConfig, seeds: int) -> list[Summary]:
    summaries = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            summaries.append(simulate(replace(config, seed=seed, out=f"{folder}/run")))
        gc.collect()  # free the data of the finished run, which is large
    return summaries


def encode_ms(spec: str, vector: bench_codecs.Vector) -> float:
    chosen, times_ms = codec(spec), []
    for _ in range(10):
        start = time.process_time()
        chosen.encode(vector.values, seed=1, layout=vector.layout)
        times_ms.append(1e3 * (time.process_time() - start))
    return statistics.median(times_ms[1:])


def print_row(cells: list[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def print_head(cells: list[str]) -> None:
    print_row(cells)
    print_row(["---", "---"] + ["--:"] * (len(cells) - 2))


def accuracies(results: list[list[Summary]]) -> list[str]:
    return [
        f"{100 * statistics.mean(summary.accuracy for summary in runs):.1f} %" for runs in results
    ]


def per_client(results: list[list[Summary]], link: str) -> list[str]:
    """Return the bytes per client and round on a link, and the compression ratio, over all runs."""
    runs = [summary for summaries in results for summary in summaries]
    sent, dense = (
        sum(getattr(summary, f"{prefix}{link}_bytes") for summary in runs)
        for prefix in ("", "dense_")
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
        "--numel",
        type=int,
        default=1_000_000,
        help="number of elements of the vector whose encoding is timed",
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    base = RunConfig(task=args.task, clients=args.clients, rounds=args.rounds, participation=args.participation,
                     eval_every=args.rounds, checkpoint_every=args.rounds)  # fmt: skip
    print(
        f"{args.task}, {args.clients} clients, {args.participation:.0%} per round, {args.rounds} rounds of {base.local_steps} steps with "
        f"batches of {base.batch_size}, learning rate {base.lr:g}; {args.seeds} seeds, load {os.getloadavg()[0]:.1f}\n"
    )

    vector = bench_codecs.normal(args.numel)
    print_head(
        [
            "uplink",
            "memory",
            "bytes up",
            "ratio",
            *args.partition,
            "encode 10⁶" if args.numel == 10**6 else f"encode {args.numel:,}",
        ]
    )
    for compression in UPLINKS:
        own = (
            {"lr": VOTE_LR}
            if compression.strategy == "vote"
            else {"downlink": "identity", "downlink_memory": "none"}
        )
        config = replace(
            base,
            uplink=compression.codec,
            memory=compression.memory,
            strategy=compression.strategy,
            **own,
        )
        results = [
            run(replace(config, partition=partition), args.seeds) for partition in args.partition
        ]
        name = f"`{compression.codec}`" + (
            f" under `{compression.strategy}`" if compression.strategy != "average" else ""
        )
        print_row(
            [
                name,
                f"`{compression.memory}`",
                *per_client(results, "uplink"),
                *accuracies(results),
                f"{encode_ms(compression.codec, vector):.1f} ms",
            ]
        )

    print()
    print_head(["downlink", "memory of the server", "bytes down", "ratio", *args.partition])
    for compression in DOWNLINKS:
        config = replace(
            base,
            uplink="stc:density=1/100",
            downlink=compression.codec,
            downlink_memory=compression.memory,
        )
        results = [
            run(replace(config, partition=partition), args.seeds) for partition in args.partition
        ]
        print_row(
            [
                f"`{compression.codec}`",
                f"`{compression.memory}`",
                *per_client(results, "downlink"),
                *accuracies(results),
            ]
        )


if __name__ == "__main__":
    main()
