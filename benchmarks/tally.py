"""What it costs to count one-bit votes on this CPU, packed as they are sent, beside int8 tensors in torch.

    python benchmarks/tally.py [--numel 25000000] [--voters 15] [--threads 1]

`int8 added up` adds the tensors one by one in int8 and takes the sign; `stack.sum(0)` is torch's sum of the stack [m, n], in int64 as torch
does it unless told otherwise; `stack.sum(0, int8)` is told otherwise, and is right up to 127 voters. None of the three decides ties, and
the stack is there before. Times are medians of interleaved repeats; --processor-time counts what this process got of a busy machine.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command line does

import numpy as np  # noqa: E402
import torch  # noqa: E402

from fedcomp.kernels import votes  # noqa: E402

WIDE = 5  # votes that are a wide margin


def ways(numel: int, voters: int) -> tuple[dict[str, Callable[[], object]], list[str]]:
    """What is timed, and which of it is a baseline."""
    rng = np.random.default_rng(0)
    flags = [rng.integers(0, 2, numel, dtype=np.int8) for _ in range(voters)]
    packed = [np.packbits(vote).tobytes() for vote in flags]
    stack = torch.stack([torch.from_numpy(2 * vote - 1) for vote in flags])
    total = torch.zeros(numel, dtype=torch.int8 if voters < 128 else torch.int16)

    def added_up() -> torch.Tensor:
        total.zero_()
        for vote in stack:
            total.add_(vote)
        return total.sign()

    result = votes.majority(packed, numel, 0)
    assert voters % 2 == 0 or np.array_equal(result, np.packbits(added_up().numpy() > 0))
    baselines: dict[str, Callable[[], object]] = {
        "int8 added up": added_up,
        "stack.sum(0)": lambda: stack.sum(0).sign(),
    }
    if voters < 128:
        baselines["stack.sum(0, int8)"] = lambda: stack.sum(0, dtype=torch.int8).sign()
    ours: dict[str, Callable[[], object]] = {
        "majority": lambda: votes.majority(packed, numel, 0),
        "disagreement": lambda: votes.disagreement(packed, result, numel, WIDE),
    }
    return baselines | ours, list(baselines)


def seconds(
    found: dict[str, Callable[[], object]], repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    taken = {name: [] for name in found}
    for _ in range(repeats + 1):
        for name, way in found.items():
            start = clock()
            way()
            taken[name].append(clock() - start)
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=25_000_000, help="coordinates")
    parser.add_argument("--voters", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="of all threads together, instead of the time that passes",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found, baselines = ways(options.numel, options.voters)
    times = seconds(
        found, options.repeats, time.process_time if options.processor_time else time.perf_counter
    )
    print(
        f"{options.voters} votes of n = {options.numel:,}   threads = {options.threads}   median of {options.repeats}"
        f"{', processor time' * options.processor_time}\n"
    )
    print(f"{'':20}{'ms':>10}" + "".join(f"{f'of {name}':>24}" for name in baselines))
    for name, time_s in times.items():
        ratios = (
            ""
            if name in baselines
            else "".join(f"{f'{times[base] / time_s:.1f} ×':>24}" for base in baselines)
        )
        print(f"{name:20}{time_s * 1e3:10.2f}{ratios}")


if __name__ == "__main__":
    main()
