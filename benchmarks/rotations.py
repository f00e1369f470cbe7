"""Time, size and error of codecs that rotate a vector before they quantize it, on this CPU.

    python benchmarks/rotations.py --numel 25_000_000

The row `copy` copies the vector into existing memory. The row `rotation` computes the rotated vector and discards it. Encoding returns a
frame; decoding adds a frame to an existing vector. Times are medians of interleaved repeats (timing.py). The column `copies` is the time as
a multiple of the copy. `CPU` is the processor time of all threads together. `bits` is the frame size in bits per coordinate. NMSE is the
squared error ‖x − C(x)‖²/‖x‖² of the decoded vector C(x) for normal values x.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from timing import medians
from torch import Tensor

from fedcomp import codec
from fedcomp.kernels import hadamard

SPECS = ("srq", "vlc", "drive", "eden:bits=1", "eden:bits=2", "eden:bits=3", "eden:bits=4")


def rotate(x: Tensor) -> None:
    hadamard.rotate(x, 1, lambda rotated: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--numel", type=int, default=25_000_000, help="number of elements of the vector"
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    x = torch.randn(options.numel, generator=torch.Generator().manual_seed(0))
    out, square = torch.zeros_like(x), float(x.double().square().sum())
    frames = {spec: codec(spec).encode(x, seed=1) for spec in SPECS}
    functions: dict[str, Callable[[], object]] = {
        "copy": partial(out.copy_, x),
        "rotation": partial(rotate, x),
    }
    for spec in SPECS:
        functions[f"{spec} encode"] = partial(codec(spec).encode, x, seed=1)
        functions[f"{spec} decode"] = partial(codec(spec).accumulate, frames[spec], out)
    times = medians(functions, options.repeats)
    print(
        f"n = {options.numel:,}   threads = {torch.get_num_threads()}   medians of {options.repeats} repeats\n"
    )
    print(
        f"{'':22}{'ms':>9}{'M values/s':>12}{'copies':>8}{'CPU ms':>9}{'copies':>8}{'bits':>9}{'NMSE':>9}"
    )
    copy_s, copy_cpu_s = times["copy"]
    for name, (time_s, cpu_s) in times.items():
        line = f"{name:22}{time_s * 1e3:9.1f}{options.numel / time_s / 1e6:12,.0f}{time_s / copy_s:8.1f}"
        line += f"{cpu_s * 1e3:9.1f}{cpu_s / copy_cpu_s:8.1f}"
        spec, _, direction = name.rpartition(" ")
        if direction == "encode":
            squared_error = float(
                (x - codec(spec).decode(frames[spec], numel=options.numel)).double().square().sum()
            )
            line += f"{8 * len(frames[spec]) / options.numel:9.4f}{squared_error / square:9.4f}"
        print(line)


if __name__ == "__main__":
    main()
