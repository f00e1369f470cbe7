"""Time and memory to compress one update with a sparse codec and error feedback, on this CPU.

    python benchmarks/compress.py --numel 25_000_000 --density 1/400

The row `copy` copies a vector into existing memory. The row `torch` is the usual PyTorch implementation of STC (add, abs, topk, where),
which does not encode its result into bytes. The other rows encode an update with fedcomp (`propose`) and store the new residual (`commit`).
Times are medians of interleaved repeats (timing.py). The column `extra memory` is the growth of the peak memory, measured in a separate
process.
"""

import argparse
import resource
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import torch
from timing import medians
from torch import Tensor

from fedcomp import codec, memory


def copy(e: Tensor, x: Tensor, k: int) -> Tensor:
    return e.copy_(x)


def torch_stc(e: Tensor, x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the k largest elements as positions, signs and their mean magnitude, and the new residual."""
    a = e + x
    magnitudes, positions = torch.topk(a.abs(), k)
    signs, mu = a[positions].sign(), magnitudes.mean()
    sent = torch.zeros_like(a)
    sent[positions] = mu * signs
    return positions, signs, mu, torch.where(sent != 0, a - sent, a)


def propose_and_commit(name: str, e: Tensor, x: Tensor, k: int) -> bytes:
    """Encode the update `x` plus the residual `e`, return the bytes, and write the new residual into `e`."""
    client_memory = memory("residual", codec(f"{name}:density={k}/{x.numel()}"), x.numel())
    client_memory.load_state_dict({"residual": e}, copy=False)
    frame = client_memory.propose(x)
    client_memory.commit()
    return frame


FUNCTIONS: dict[str, Callable] = {"copy": copy, "torch": torch_stc} | {
    name: partial(propose_and_commit, name) for name in ("stc", "topk", "sbc")
}


def vectors(numel: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)


def seconds(numel: int, k: int, repeats: int) -> dict[str, float]:
    residual, x = vectors(numel)
    e = residual.clone()
    functions = {name: partial(function, e, x, k) for name, function in FUNCTIONS.items()}
    times = medians(functions, repeats, before=lambda: e.copy_(residual))
    return {name: time.wall_s for name, time in times.items()}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def extra_memory(name: str, numel: int, k: int) -> int:
    """Return how many bytes a function adds to the peak memory of a new process that holds the update and the residual."""
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


def peak_growth_bytes(name: str, numel: int, k: int) -> int:
    e, x = vectors(numel)
    warm = min(numel, 1 << 17)
    FUNCTIONS[name](e[:warm], x[:warm], max(1, k * warm // numel))
    before = peak_bytes()
    FUNCTIONS[name](e, x, k)
    return peak_bytes() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--numel", type=int, default=25_000_000, help="number of elements of the update"
    )
    parser.add_argument(
        "--density",
        type=Fraction,
        default=Fraction(1, 400),
        help="fraction of the elements that are sent",
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--memory-of",
        choices=FUNCTIONS,
        help="print only the bytes that one of the functions adds to the peak memory",
    )
    options = parser.parse_args()
    k = max(1, int(options.density * options.numel + Fraction(1, 2)))
    if options.memory_of:
        print(peak_growth_bytes(options.memory_of, options.numel, k))
        return
    # Memory is measured before time, since a child process inherits its parent's peak memory on Linux.
    memory = {
        name: extra_memory(name, options.numel, k) / (4 * options.numel) for name in FUNCTIONS
    }
    times = seconds(options.numel, k, options.repeats)
    print(
        f"n = {options.numel:,}   k = {k:,}   threads = {torch.get_num_threads()}   medians of {options.repeats} repeats\n"
    )
    print(f"{'':10}{'ms':>9}{'copies':>9}{'torch/this':>12}{'extra memory':>15}")
    for name, time_s in times.items():
        print(
            f"{name:10}{time_s * 1e3:9.1f}{time_s / times['copy']:9.1f}{times['torch'] / time_s:12.1f}{memory[name]:14.2f}×"
        )


if __name__ == "__main__":
    main()
