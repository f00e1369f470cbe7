"""Time to count packed one-bit votes on this CPU, compared with votes as int8 tensors in torch.

    python benchmarks/tally.py [--numel 25000000] [--voters 15] [--threads 1]

The torch row `int8 added up` adds the votes one by one in int8 and takes the sign. `stack.sum(0)` is torch's sum over the stack of votes,
[voters, elements], in int64. `stack.sum(0, int8)` sums in int8, which is correct for up to 127 voters. The torch rows do not decide ties,
and their stack is already in memory. Times are medians of interleaved repeats (timing.py). --processor-time shows processor time, which
depends less on other load.
"""

import argparse
import os
from collections.abc import Callable

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # idle threads sleep early

import numpy as np  # noqa: E402
import torch  # noqa: E402
from timing import medians  # noqa: E402

from fedcomp.kernels import votes  # noqa: E402

WIDE_MARGIN = 5  # number of votes


def functions_and_baselines(
    numel: int, voters: int
) -> tuple[dict[str, Callable[[], object]], list[str]]:
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
        "disagreement": lambda: votes.disagreement(packed, result, numel, WIDE_MARGIN),
    }
    return baselines | ours, list(baselines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=25_000_000, help="number of coordinates")
    parser.add_argument("--voters", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="show the processor time of all threads together, instead of wall-clock time",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    functions, baselines = functions_and_baselines(options.numel, options.voters)
    times = {
        name: median.processor_s if options.processor_time else median.wall_s
        for name, median in medians(functions, options.repeats).items()
    }
    print(
        f"{options.voters} votes of n = {options.numel:,}   threads = {options.threads}   medians of {options.repeats} repeats"
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
