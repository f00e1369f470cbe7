"""Time and memory of robust aggregation rules, compared with the same rules in torch on a dense stack of all updates.

    python benchmarks/robust.py --clients 20 --numel 1M

fedcomp aggregates updates whose frames are already parsed. The columns `dense` are measured with the codec `identity`, and are also valid
for other dense codecs, such as fp16 and qsgd. Updates of the other codecs stay compressed in memory. The torch implementation has the stack
of all updates, [clients, elements], in memory. Times are medians of interleaved repeats (timing.py). Memory is the peak that Python and
numpy allocate during a call, without the updates and the result.
"""

import argparse
import tracemalloc
from collections.abc import Callable

import torch
from timing import medians

from fedcomp import Layout, codec, spec
from fedcomp.strategies import StrategyConfig, strategy
from fedcomp.strategies.base import AcceptedUpdate, RoundUpdates

UPLINKS = {"dense": "identity", "stc 1 %": "stc:density=1%", "eden 1 bit": "eden:bits=1"}
RULES = (
    "average",
    "median:{f}",
    "trimmed-mean:{f}",
    "krum:{f}",
    "multi-krum:{f}",
    "geometric-median:{f}",
    "centered-clipping:{f}",
    "median:{f},mix=true",
    "krum:{f},buckets=2",
)


def baselines(stack: torch.Tensor, byzantine: int) -> dict[str, Callable[[], object]]:
    m = len(stack)

    def distances() -> torch.Tensor:
        products = stack @ stack.T
        squares = products.diagonal()
        return squares[:, None] + squares - 2 * products

    def krum() -> torch.Tensor:
        return stack[distances().sort(1).values[:, 1 : m - byzantine - 1].sum(1).argmin()].clone()

    return {
        "average": lambda: stack.mean(0),
        "median": lambda: stack.median(0).values,
        "trimmed-mean": lambda: stack.sort(0).values[byzantine : m - byzantine].mean(0),
        "krum": krum,
    }


def opened_updates(stack: torch.Tensor, uplink: str) -> list[AcceptedUpdate]:
    c, n = codec(uplink), stack.shape[1]
    return [
        AcceptedUpdate(i, c.open(c.encode(row, seed=i), n), 1, 0.0, "")
        for i, row in enumerate(stack)
    ]


def aggregation(
    text: str, uplink: str, answers: list[AcceptedUpdate], out: torch.Tensor
) -> Callable[[], object]:
    """Return a function that aggregates the updates of one round by the rule `text`."""
    rule = strategy(text, StrategyConfig(uplink=uplink, memory="none"), Layout.flat(out.numel()))
    updates = RoundUpdates(1, {"train": answers}, torch.zeros_like(out))
    return lambda: rule.aggregate(updates, out.zero_())


def peak_bytes(function: Callable[[], object]) -> float:
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument(
        "--numel", type=spec.parse_count, default=1_000_000, help="number of elements of the model"
    )
    parser.add_argument("--byzantine", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    m, n, f = options.clients, options.numel, options.byzantine
    stack = torch.randn(m, n, generator=torch.Generator().manual_seed(0))
    torch_times = medians(baselines(stack, f), options.repeats)
    torch_s = {name: times.wall_s for name, times in torch_times.items()}
    print(
        f"{m} clients, {f} of them Byzantine, {n:,} parameters, {torch.get_num_threads()} threads; "
        f"the dense stack has {stack.nbytes / 1e6:,.0f} MB\n"
    )
    print(
        f"{'':28}{'torch':>9}"
        + "".join(f"{name:>12}{'of torch':>10}{'MB':>7}" for name in UPLINKS)
        + "   (ms)"
    )
    rows: dict[str, list[str]] = {text.format(f=f): [] for text in RULES}
    for uplink in UPLINKS.values():
        answers, out = opened_updates(stack, uplink), torch.zeros(n)
        functions = {text: aggregation(text, uplink, answers, out) for text in rows}
        for text, (time_s, _) in medians(functions, options.repeats).items():
            baseline = torch_s.get(text.partition(":")[0]) if "," not in text else None
            ratio = f"{time_s / baseline:9.2f}x" if baseline else f"{'':10}"
            rows[text].append(
                f"{time_s * 1e3:12.0f}{ratio}{peak_bytes(functions[text]) / 1e6:7.1f}"
            )
    for text, cells in rows.items():
        baseline = torch_s.get(text.partition(":")[0]) if "," not in text else None
        print(f"{text:28}{f'{baseline * 1e3:.0f}' if baseline else '':>9}" + "".join(cells))


if __name__ == "__main__":
    main()
