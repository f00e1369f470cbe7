"""Frame sizes against the entropy of what is in them.

    python benchmarks/frame_sizes.py [--numel 1000000]

The bound is that of uniformly spread positions, log2 C(n, k) bits, with one sign bit each and μ for `stc`, float32
values for `topk`, μ for `sbc`.
"""

import argparse
import math

import torch

from fedcomp import codec

EXTRA_BITS = {"stc": lambda k: k + 32, "topk": lambda k: 32 * k, "sbc": lambda k: 32}


def bound_bytes(name: str, numel: int, k: int) -> float:
    binomial = math.lgamma(numel + 1) - math.lgamma(k + 1) - math.lgamma(numel - k + 1)
    return (binomial / math.log(2) + EXTRA_BITS[name](k)) / 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=1_000_000)
    numel = parser.parse_args().numel
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    print(f"n = {numel:,}, normal values\n")
    print(f"{'codec':24}{'k':>8}{'frame':>12}{'bound':>14}{'above bound':>13}{'to float32':>12}   within 1 % + 24 bytes")
    for name in EXTRA_BITS:
        for p in (25, 100, 400, 1000):
            chosen = codec(f"{name}:density=1/{p}")
            frame, k = chosen.encode(x), chosen.count(numel)
            bound = bound_bytes(name, numel, k)
            kept = "yes" if len(frame) <= 1.01 * bound + 24 else "no"
            over, ratio = len(frame) / bound - 1, 4 * numel / len(frame)
            print(f"{name + f':density=1/{p}':24}{k:8,}{len(frame):10,} B{bound:12,.1f} B{over:12.2%}{'×' + f'{ratio:,.0f}':>13}   {kept}")


if __name__ == "__main__":
    main()
