"""Sizes of encoded frames, compared with the entropy of their content.

    python benchmarks/frame_sizes.py [--numel 1000000]

The column `bound` is the entropy of k of n uniformly distributed positions, log2 C(n, k) bits, plus the entropy of the values: signs and
the common magnitude μ for `stc`, float32 values for `topk`, and μ for `sbc`. Positions of a model's update are not uniformly distributed.
Two more tables therefore use normal vectors with the tensor shapes of `cifar10-vgg11s`, in which each tensor is scaled by 1/sqrt(fan-in) or
by a random factor. The column `by tensor` is the entropy if the number of positions in each tensor is known; the codec does not know these
numbers.
"""

import argparse
import math

import numpy as np
import torch
from torch import Tensor

from fedcomp import Layout, codec
from fedcomp.tasks.cifar10 import network

EXTRA_BITS = {"stc": lambda k: k + 32, "topk": lambda k: 32 * k, "sbc": lambda k: 32}
DENSITIES = (25, 100, 400, 1000)


def binomial_bits(numel: int, k: int) -> float:
    """Return log2 C(numel, k)."""
    return (math.lgamma(numel + 1) - math.lgamma(k + 1) - math.lgamma(numel - k + 1)) / math.log(2)


def bound_bytes(name: str, numel: int, k: int) -> float:
    return (binomial_bits(numel, k) + EXTRA_BITS[name](k)) / 8


def by_tensor_bytes(name: str, layout: Layout, positions: np.ndarray) -> float:
    """Return the entropy in bytes of a frame whose positions are uniformly distributed within each tensor."""
    counts = np.histogram(positions, [0, *(e.span.stop for e in layout)])[0].tolist()
    return (
        sum(map(binomial_bits, (e.numel for e in layout), counts))
        + EXTRA_BITS[name](positions.size)
    ) / 8


def layered(layout: Layout, how: str) -> Tensor:
    """Return a vector of normal values, in which each tensor is scaled by 1/sqrt(fan-in) or by a random factor from 1/4 to 2."""
    draw = torch.Generator().manual_seed(0)
    x, fan_in = torch.randn(layout.numel, generator=draw), 1
    for entry in layout:
        random_factor = 2 ** (3 * float(torch.rand((), generator=draw)) - 2)
        # A bias has the fan-in of the weight before it.
        fan_in = math.prod(entry.shape[1:]) if len(entry.shape) > 1 else fan_in
        x[entry.span] *= random_factor if how == "at random" else fan_in**-0.5
    return x


def print_sizes(name: str, x: Tensor, layout: Layout | None) -> None:
    numel = x.numel()
    for p in DENSITIES:
        chosen = codec(f"{name}:density=1/{p}")
        frame = chosen.encode(x)
        positions = chosen.open(frame, numel).positions
        bound = bound_bytes(name, numel, positions.size)
        line = f"{name + f':density=1/{p}':24}{positions.size:8,}{len(frame):10,} B{bound:12,.1f} B{len(frame) / bound - 1:12.2%}"
        ratio = f"{'×' + f'{4 * numel / len(frame):,.0f}':>13}"
        if layout is None:
            print(line + ratio + f"   {'yes' if len(frame) <= 1.01 * bound + 24 else 'no'}")
        else:
            print(line + ratio + f"{by_tensor_bytes(name, layout, positions):12,.1f} B")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=1_000_000)
    numel = parser.parse_args().numel
    head = f"{'codec':24}{'k':>8}{'frame':>12}{'bound':>14}{'above bound':>13}{'to float32':>12}"
    print(f"n = {numel:,}, normal values\n\n{head}   frame within 1 % + 24 bytes of the bound")
    for name in EXTRA_BITS:
        print_sizes(name, torch.randn(numel, generator=torch.Generator().manual_seed(0)), None)
    layout = Layout.of(network())
    for how in ("by fan-in", "at random"):
        print(
            f"\nn = {layout.numel:,}, the tensor shapes of cifar10-vgg11s, normal values scaled {how}\n\n{head}{'by tensor':>14}"
        )
        for name in EXTRA_BITS:
            print_sizes(name, layered(layout, how), layout)


if __name__ == "__main__":
    main()
