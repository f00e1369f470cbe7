"""Time to encode, decode and accumulate with codecs of one bit per coordinate on this CPU, compared with a copy of the vector.

    python benchmarks/signs.py --numel 100_000_000

The row `copy` copies the vector into existing memory, and `new copy` into new memory. Codecs write or read whole frames, with checksum and
checks. Decoding returns a new vector. Times are medians of interleaved repeats (timing.py). `bits` is the size of the frame in bits per
coordinate.
"""

import argparse
from collections.abc import Callable

import torch
from timing import medians

from fedcomp import Layout, codec

CODECS = "sign", "efsign", "onebit"


def functions_and_bits(
    numel: int, rows: int
) -> tuple[dict[str, Callable[[], object]], dict[str, float]]:
    """Return the functions to time, and the bits per coordinate of each codec. `rows` is the number of matrix rows for `onebit`."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    out, layout = (
        torch.zeros(numel),
        Layout.from_shapes({"matrix": (rows, numel // rows), "rest": (numel % rows,)}),
    )
    functions: dict[str, Callable[[], object]] = {"copy": lambda: out.copy_(x), "new copy": x.clone}
    bits = {}
    for name in CODECS:
        c = codec(name)
        frame = c.encode(x, layout=layout)
        bits[name] = 8 * len(frame) / numel
        functions[f"{name} encode"] = lambda c=c: c.encode(x, layout=layout)
        functions[f"{name} decode"] = lambda c=c, frame=frame: c.decode(
            frame, numel=numel, layout=layout
        )
        functions[f"{name} accumulate"] = lambda c=c, frame=frame: c.accumulate(
            frame, out, 0.1, layout=layout
        )
    return functions, bits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--numel", type=int, default=25_000_000, help="number of elements of the vector"
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=1000,
        help="number of rows of the matrix that the codec onebit encodes",
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    functions, bits = functions_and_bits(options.numel, options.rows)
    times = medians(functions, options.repeats)
    print(
        f"n = {options.numel:,}   threads = {torch.get_num_threads()}   medians of {options.repeats} repeats\n"
    )
    print(f"{'':20}{'ms':>9}{'G values/s':>12}{'of a copy':>11}{'bits':>8}")
    for name, (time_s, _) in times.items():
        size = f"{bits[codec_name]:8.3f}" if (codec_name := name.partition(" ")[0]) in bits else ""
        print(
            f"{name:20}{time_s * 1e3:9.1f}{options.numel / time_s / 1e9:12.2f}{times['copy'].wall_s / time_s:10.0%}{size}"
        )


if __name__ == "__main__":
    main()
