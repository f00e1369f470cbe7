"""What one bit a coordinate costs on this CPU: encoding, decoding and accumulating a vector, beside a plain copy of it.

    python benchmarks/signs.py --numel 100_000_000

`copy` is a plain copy into memory that is there; a codec makes or reads a whole frame, checksum and checks included. Decoding makes a
vector, and `new copy` does so too. Times are medians of interleaved repeats; bits count the whole frame.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from fedcomp import Layout, codec

CODECS = "sign", "efsign", "onebit"


def ways(numel: int, rows: int) -> tuple[dict[str, Callable[[], object]], dict[str, float]]:
    """What is timed, and the bits a coordinate of each codec's frame; `onebit` sees a matrix of so many rows."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    into, layout = (
        torch.zeros(numel),
        Layout.from_shapes({"matrix": (rows, numel // rows), "rest": (numel % rows,)}),
    )
    found: dict[str, Callable[[], object]] = {"copy": lambda: into.copy_(x), "new copy": x.clone}
    bits = {}
    for name in CODECS:
        c = codec(name)
        frame = c.encode(x, layout=layout)
        bits[name] = 8 * len(frame) / numel
        found[f"{name} encode"] = lambda c=c: c.encode(x, layout=layout)
        found[f"{name} decode"] = lambda c=c, frame=frame: c.decode(
            frame, numel=numel, layout=layout
        )
        found[f"{name} accumulate"] = lambda c=c, frame=frame: c.accumulate(
            frame, into, 0.1, layout=layout
        )
    return found, bits


def seconds(found: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    taken = {name: [] for name in found}
    for _ in range(repeats + 1):
        for name, way in found.items():
            start = time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=25_000_000, help="elements of the vector")
    parser.add_argument(
        "--rows", type=int, default=1000, help="rows of the matrix that onebit takes it for"
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    found, bits = ways(options.numel, options.rows)
    times = seconds(found, options.repeats)
    print(
        f"n = {options.numel:,}   threads = {torch.get_num_threads()}   median of {options.repeats}\n"
    )
    print(f"{'':20}{'ms':>9}{'G values/s':>12}{'of a copy':>11}{'bits':>8}")
    for name, time_s in times.items():
        size = f"{bits[codec_name]:8.3f}" if (codec_name := name.partition(" ")[0]) in bits else ""
        print(
            f"{name:20}{time_s * 1e3:9.1f}{options.numel / time_s / 1e9:12.2f}{times['copy'] / time_s:10.0%}{size}"
        )


if __name__ == "__main__":
    main()
