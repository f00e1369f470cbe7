"""Time to add 1,000 sparse frames (encoded updates) on a server, compared with the time to add 1,000 dense vectors.

    python benchmarks/accumulate.py [--numel 1000000] [--frames 1000]

`accumulate` checks, decodes and adds the frames one by one, and `open_batch` 100 frames together, as the server does in a round. `add_` is
PyTorch's sum of the dense vectors, which are already in memory. Times are medians of interleaved repeats (timing.py).
"""

import argparse
import os
from collections.abc import Callable

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # idle threads sleep early

import torch  # noqa: E402
from timing import medians  # noqa: E402

from fedcomp import codec  # noqa: E402
from fedcomp.codecs.update import add_all  # noqa: E402

DENSITIES = ("1/1000", "1/400", "1/100")
COHORT = 100  # number of frames that `open_batch` decodes together
DISTINCT = 250  # number of distinct frames; each is added several times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=1_000_000)
    parser.add_argument("--frames", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    updates = torch.randn(DISTINCT, args.numel, generator=generator)
    total = torch.zeros(args.numel)
    functions: dict[tuple[str, str], Callable[[], object]] = {
        ("dense", "add_"): lambda: [total.add_(updates[i % DISTINCT]) for i in range(args.frames)],
    }
    lengths, nonzeros = {}, {}
    for name in ("stc", "topk"):
        for density in DENSITIES:
            c = codec(f"{name}:density={density}")
            distinct = c.encode_batch(updates, range(DISTINCT))
            frames = [distinct[i % DISTINCT] for i in range(args.frames)]
            lengths[str(c)] = len(distinct[0])
            nonzeros[str(c)] = c.open(distinct[0], args.numel).nonzeros
            functions[str(c), "accumulate"] = lambda c=c, frames=frames: [
                c.accumulate(frame, total, 0.001) for frame in frames
            ]
            cohorts = [frames[start : start + COHORT] for start in range(0, len(frames), COHORT)]
            functions[str(c), "open_batch"] = lambda c=c, cohorts=cohorts: [
                add_all(c.open_batch(cohort, args.numel), [0.001] * len(cohort), total)
                for cohort in cohorts
            ]
    times = medians(functions, args.repeats)
    dense_s = times["dense", "add_"].wall_s
    print(
        f"{args.frames:,} frames of {args.numel:,} elements; {torch.get_num_threads()} threads; medians of {args.repeats} repeats\n"
    )
    print(f"{'':34}{'':12}{'frame':>10}{'ms':>10}{'ns/nonzero':>15}{'× dense':>10}")
    for (name, method), (median_s, _) in times.items():
        per_nonzero = (
            f"{median_s * 1e9 / args.frames / nonzeros[name]:15.2f}"
            if name in nonzeros
            else " " * 15
        )
        print(
            f"{name:34}{method:12}{lengths.get(name, 4 * args.numel):10,}{median_s * 1e3:10.1f}{per_nonzero}{dense_s / median_s:10.1f}"
        )


if __name__ == "__main__":
    main()
