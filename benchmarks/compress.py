"""What one step of sparse compression with a residual costs on this CPU, in time and in memory.

    python benchmarks/compress.py --numel 25_000_000 --density 1/400

`copy` is a plain copy into memory that is there, `torch` the usual idiom of STC (add, abs, topk, where); the others are a proposal of a
codec and its commit: the frame's bytes are made too. Times are medians of interleaved repeats; memory is the growth of the peak of a
process of its own.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from fedcomp import codec, memory


def copy(e: Tensor, x: Tensor, k: int) -> Tensor:
    return e.copy_(x)


def idiom(e: Tensor, x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions, signs, their mean magnitude, and the new residual."""
    a = e + x
    magnitudes, positions = torch.topk(a.abs(), k)
    signs, mu = a[positions].sign(), magnitudes.mean()
    sent = torch.zeros_like(a)
    sent[positions] = mu * signs
    return positions, signs, mu, torch.where(sent != 0, a - sent, a)


def ours(name: str, e: Tensor, x: Tensor, k: int) -> bytes:
    """A whole frame; the new residual is in e."""
    keeper = memory("residual", codec(f"{name}:density={k}/{x.numel()}"), x.numel())
    keeper.load_state_dict({"residual": e}, copy=False)
    frame = keeper.propose(x)
    keeper.commit()
    return frame


WAYS: dict[str, Callable] = {"copy": copy, "torch": idiom} | {
    name: partial(ours, name) for name in ("stc", "topk", "sbc")
}


def vectors(numel: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(numel, generator=draw), torch.randn(numel, generator=draw)


def seconds(numel: int, k: int, repeats: int) -> dict[str, float]:
    residual, x = vectors(numel)
    e, taken = residual.clone(), {name: [] for name in WAYS}
    for _ in range(repeats + 1):
        for name, way in WAYS.items():
            e.copy_(residual)
            start = time.perf_counter()
            way(e, x, k)
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def peak() -> int:
    """The largest memory that this process has held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def extra_memory(name: str, numel: int, k: int) -> int:
    """Bytes that a way adds to the peak of a fresh process that holds the two vectors."""
    command = [
        sys.executable,
        __file__,
        "--numel",
        str(numel),
        "--density",
        f"{k}/{numel}",
        "--memory-of",
        name,
    ]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def grow(name: str, numel: int, k: int) -> int:
    e, x = vectors(numel)
    warm = min(numel, 1 << 17)
    WAYS[name](e[:warm], x[:warm], max(1, k * warm // numel))
    before = peak()
    WAYS[name](e, x, k)
    return peak() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=25_000_000, help="elements of the vector")
    parser.add_argument(
        "--density", type=Fraction, default=Fraction(1, 400), help="share of them that is sent"
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--memory-of", choices=WAYS, help="print only the bytes that this way adds to the peak"
    )
    options = parser.parse_args()
    k = max(1, int(options.density * options.numel + Fraction(1, 2)))
    if options.memory_of:
        print(grow(options.memory_of, options.numel, k))
        return
    # First, while this process is small: on Linux a child inherits its parent's peak.
    memory = {name: extra_memory(name, options.numel, k) / (4 * options.numel) for name in WAYS}
    times = seconds(options.numel, k, options.repeats)
    print(
        f"n = {options.numel:,}   k = {k:,}   threads = {torch.get_num_threads()}   median of {options.repeats}\n"
    )
    print(f"{'':10}{'ms':>9}{'copies':>9}{'torch/this':>12}{'extra memory':>15}")
    for name, time_s in times.items():
        print(
            f"{name:10}{time_s * 1e3:9.1f}{time_s / times['copy']:9.1f}{times['torch'] / time_s:12.1f}{memory[name]:14.2f}×"
        )


if __name__ == "__main__":
    main()
