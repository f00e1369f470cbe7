"""Time of quantization on this CPU, and bits per coordinate.

    python benchmarks/quantizers.py --numel 25_000_000

The row `copy` copies the vector into existing memory. Encoding includes checking the vector and computing the checksum; decoding includes
checking the frame and allocating a vector. Times are medians of interleaved repeats (timing.py). The column `entropy` is the entropy of the
quantized values, in bits per coordinate, including a sign bit for the codec `natural`.
"""

import argparse
from collections.abc import Callable

import torch
from timing import medians
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


def entropy(c: Codec, y: Tensor) -> float:
    """Return the entropy of a decoded vector, in bits per coordinate; for the codec `natural`, that of the magnitudes plus a sign bit."""
    values = y.abs() if c.name == "natural" else y
    counts = torch.unique(values, return_counts=True)[1].double()
    p = counts / counts.sum()
    return -float((p * p.log2()).sum()) + (c.name == "natural")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--numel", type=int, default=25_000_000, help="number of elements of the vector"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--specs", nargs="+", default=SPECS, help="spec strings of the codecs to measure"
    )
    parser.add_argument(
        "--entropy",
        action="store_true",
        help="also print the entropy of the quantized values, which is slow",
    )
    options = parser.parse_args()
    x = torch.randn(options.numel, generator=torch.Generator().manual_seed(0))
    e = torch.empty_like(x)
    codecs = {spec: codec(spec) for spec in options.specs}
    frames = {spec: c.encode(x) for spec, c in codecs.items()}
    functions: dict[str, Callable[[], object]] = {"copy": lambda: e.copy_(x)}
    for spec, c in codecs.items():
        functions[f"{spec} encode"] = lambda c=c: c.encode(x)
        functions[f"{spec} decode"] = lambda c=c, spec=spec: c.decode(frames[spec], numel=x.numel())
    copy, *rest = (times.wall_s for times in medians(functions, options.repeats).values())
    print(
        f"n = {x.numel():,}   threads = {torch.get_num_threads()}   medians of {options.repeats} repeats   copy {copy * 1e3:.1f} ms\n"
    )
    print(f"{'':30}{'encode':^27}{'decode':^27}{'bits per':>12}")
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
