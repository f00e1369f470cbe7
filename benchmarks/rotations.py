"""What rotated quantization costs on this CPU: time, bits, error.

    python benchmarks/rotations.py --numel 25_000_000

`copy` is a plain copy into memory that is there, `rotation` turns the vector and leaves nothing; encoding makes whole frames, decoding
adds them to a vector that is there. Times are medians of interleaved repeats; `copies` are multiples of the time of the plain copy in the
same run, `CPU` is the time of all threads together. NMSE is ‖x − C(x)‖²/‖x‖², for normal values.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fedcomp import codec
from fedcomp.kernels import hadamard

SPECS = ("srq", "vlc", "drive", "eden:bits=1", "eden:bits=2", "eden:bits=3", "eden:bits=4")


def rotate(x: Tensor) -> None:
    hadamard.rotate(x, 1, lambda turned: None)


def medians(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, tuple[float, float]]:
    """Seconds of each way, and of the processor; the first round compiles."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, way in ways.items():
            start, spent = time.perf_counter(), time.process_time()
            way()
            taken[name].append((time.perf_counter() - start, time.process_time() - spent))
    return {
        name: tuple(map(statistics.median, zip(*times[1:], strict=True)))
        for name, times in taken.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=25_000_000, help="elements of the vector")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    x = torch.randn(options.numel, generator=torch.Generator().manual_seed(0))
    into, square = torch.zeros_like(x), float(x.double().square().sum())
    frames = {spec: codec(spec).encode(x, seed=1) for spec in SPECS}
    ways: dict[str, Callable[[], object]] = {
        "copy": partial(into.copy_, x),
        "rotation": partial(rotate, x),
    }
    for spec in SPECS:
        ways[f"{spec} encode"] = partial(codec(spec).encode, x, seed=1)
        ways[f"{spec} decode"] = partial(codec(spec).accumulate, frames[spec], into)
    times = medians(ways, options.repeats)
    print(
        f"n = {options.numel:,}   threads = {torch.get_num_threads()}   median of {options.repeats}\n"
    )
    print(
        f"{'':22}{'ms':>9}{'M values/s':>12}{'copies':>8}{'CPU ms':>9}{'copies':>8}{'bits':>9}{'NMSE':>9}"
    )
    copy_s, copy_cpu_s = times["copy"]
    for name, (time_s, cpu_s) in times.items():
        line = f"{name:22}{time_s * 1e3:9.1f}{options.numel / time_s / 1e6:12,.0f}{time_s / copy_s:8.1f}"
        line += f"{cpu_s * 1e3:9.1f}{cpu_s / copy_cpu_s:8.1f}"
        spec, _, way = name.rpartition(" ")
        if way == "encode":
            lost = float(
                (x - codec(spec).decode(frames[spec], numel=options.numel)).double().square().sum()
            )
            line += f"{8 * len(frames[spec]) / options.numel:9.4f}{lost / square:9.4f}"
        print(line)


if __name__ == "__main__":
    main()
