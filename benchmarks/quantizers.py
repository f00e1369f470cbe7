"""What quantizing a vector costs on this CPU, in time and in bits a coordinate.

    python benchmarks/quantizers.py --numel 25_000_000

`copy` is a plain copy into memory that is there. Encoding includes the checks of the vector, the coding and the frame with its checksum,
decoding all checks of the frame and a new vector. Times are medians of interleaved repeats. `entropy` is that of the levels one by one, in
bits a coordinate, for `natural` with a bit for the sign.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fedcomp import codec
from fedcomp.codecs import Codec

SPECS = (
    "qsgd",
    "qsgd:levels=127",
    "terngrad",
    "natural",
    "adaptive",
    "adaptive:rounding=stochastic",
    "bf16",
)


def seconds(call: Callable[[], object], taken: list[float]) -> None:
    start = time.perf_counter()
    call()
    taken.append(time.perf_counter() - start)


def entropy(c: Codec, y: Tensor) -> float:
    """Of the values of a decoded vector, in bits; of `natural` that of the magnitudes, and a bit for the sign."""
    values = y.abs() if c.name == "natural" else y
    counts = torch.unique(values, return_counts=True)[1].double()
    shares = counts / counts.sum()
    return -float((shares * shares.log2()).sum()) + (c.name == "natural")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=25_000_000, help="elements of the vector")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--specs", nargs="+", default=SPECS, help="codecs")
    parser.add_argument(
        "--entropy", action="store_true", help="also the entropy of the levels, which is slow"
    )
    options = parser.parse_args()
    x = torch.randn(options.numel, generator=torch.Generator().manual_seed(0))
    e = torch.empty_like(x)
    codecs = {spec: codec(spec) for spec in options.specs}
    frames = {spec: c.encode(x) for spec, c in codecs.items()}
    taken: dict[str, list[float]] = {"copy": []} | {
        f"{spec} {way}": [] for spec in codecs for way in ("encode", "decode")
    }
    for _ in range(options.repeats + 1):
        seconds(lambda: e.copy_(x), taken["copy"])
        for spec, c in codecs.items():
            seconds(lambda c=c: c.encode(x), taken[f"{spec} encode"])
            seconds(
                lambda c=c, spec=spec: c.decode(frames[spec], numel=x.numel()),
                taken[f"{spec} decode"],
            )
    copy, *rest = (statistics.median(times[1:]) for times in taken.values())
    print(
        f"n = {x.numel():,}   threads = {torch.get_num_threads()}   median of {options.repeats}   copy {copy * 1e3:.1f} ms\n"
    )
    print(f"{'':30}{'encode':^27}{'decode':^27}{'bits a':>12}")
    print(
        f"{'':30}{'ms':>9}{'M/s':>9}{'copies':>9}{'ms':>9}{'M/s':>9}{'copies':>9}{'coordinate':>12}{'entropy':>10}"
    )
    for (spec, frame), encode_s, decode_s in zip(frames.items(), rest[::2], rest[1::2]):
        columns = "".join(
            f"{s * 1e3:9.1f}{x.numel() / s / 1e6:9.0f}{s / copy:9.1f}" for s in (encode_s, decode_s)
        )
        bound = (
            f"{entropy(codecs[spec], codecs[spec].decode(frame, numel=x.numel())):10.4f}"
            if options.entropy
            else ""
        )
        print(f"{spec:30}{columns}{8 * len(frame) / x.numel():12.4f}{bound}")


if __name__ == "__main__":
    main()
