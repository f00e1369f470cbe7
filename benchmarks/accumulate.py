"""What it costs a server to add a thousand sparse frames, beside adding a thousand dense vectors.

    python benchmarks/accumulate.py [--numel 1000000] [--frames 1000]

`accumulate` checks a frame to the last bit, reads it and adds it; `open_batch` reads and adds a cohort's frames together, as a round
does. The dense additions are those of torch, of vectors that are in memory already. Medians of interleaved repeats.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command line does

import torch  # noqa: E402

from fedcomp import codec  # noqa: E402
from fedcomp.codecs.update import add_all  # noqa: E402

DENSITIES = ("1/1000", "1/400", "1/100")
COHORT = 100  # frames read together
DIFFERENT = 250  # frames; they are added again and again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=1_000_000)
    parser.add_argument("--frames", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    drawn = torch.Generator().manual_seed(0)
    updates = torch.randn(DIFFERENT, given.numel, generator=drawn)
    into = torch.zeros(given.numel)
    ways: dict[tuple[str, str], Callable[[], object]] = {
        ("dense", "add_"): lambda: [into.add_(updates[i % DIFFERENT]) for i in range(given.frames)],
    }
    lengths, nonzeros = {}, {}
    for name in ("stc", "topk"):
        for density in DENSITIES:
            c = codec(f"{name}:density={density}")
            made = c.encode_batch(updates, range(DIFFERENT))
            frames = [made[i % DIFFERENT] for i in range(given.frames)]
            lengths[str(c)], nonzeros[str(c)] = len(made[0]), c.open(made[0], given.numel).nonzeros
            ways[str(c), "accumulate"] = lambda c=c, frames=frames: [
                c.accumulate(frame, into, 0.001) for frame in frames
            ]
            cohorts = [frames[start : start + COHORT] for start in range(0, len(frames), COHORT)]
            ways[str(c), "open_batch"] = lambda c=c, cohorts=cohorts: [
                add_all(c.open_batch(cohort, given.numel), [0.001] * len(cohort), into)
                for cohort in cohorts
            ]
    taken = {way: [] for way in ways}
    for repeat in range(given.repeats + 1):
        for way, run in ways.items():
            start = time.perf_counter()
            run()
            if repeat:
                taken[way].append(time.perf_counter() - start)
    dense = statistics.median(taken["dense", "add_"])
    print(
        f"{given.frames:,} frames of n = {given.numel:,}; {torch.get_num_threads()} threads; medians of {given.repeats}\n"
    )
    print(f"{'':34}{'':12}{'frame':>10}{'ms':>10}{'ns a nonzero':>15}{'× dense':>10}")
    for (name, way), times in taken.items():
        median = statistics.median(times)
        each = (
            f"{median * 1e9 / given.frames / nonzeros[name]:15.2f}"
            if name in nonzeros
            else " " * 15
        )
        print(
            f"{name:34}{way:12}{lengths.get(name, 4 * given.numel):10,}{median * 1e3:10.1f}{each}{dense / median:10.1f}"
        )


if __name__ == "__main__":
    main()
