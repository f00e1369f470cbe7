"""Time of a Count Sketch on this CPU, compared with implementations by gather and scatter in torch.

    python benchmarks/sketches.py --numel 11_000_000 --rows 5 --columns 500_000

The torch implementation `hashed` computes hashes for each use, block by block: the bucket of coordinate i is (a·i + b) mod p mod c, where p
= 2³¹ − 1 and c is the number of columns, and the sign of i is the lowest bit of a polynomial of degree 3 in i mod p. The implementation
`tables` has all buckets (int64) and signs (float32) in memory; their construction is not timed. Torch sketches with scatter_add_ or
bincount, and reads a sketch by gathering the cells, a median over the rows, and topk. Times are medians of interleaved repeats (timing.py).
The column `copies` is the time as a multiple of a copy of the vector, and `ours` as a multiple of fedcomp's time. `CPU` is the processor
time of all threads together.
"""

import argparse
from collections.abc import Callable, Iterator

import torch
from timing import medians
from torch import Tensor

from fedcomp.codecs.sketch import SketchUpdate
from fedcomp.kernels import count_sketch

P = 2**31 - 1
BLOCK = 1 << 20  # number of coordinates that are hashed together
SEED = 1

# Function of a row of the sketch that yields slices of coordinates, their buckets and their signs.
Placed = Callable[[int], Iterator[tuple[slice, Tensor, Tensor]]]


def hashed(numel: int, rows: int, columns: int) -> Placed:
    factors = torch.randint(1, P, (rows, 6), generator=torch.Generator().manual_seed(0)).tolist()
    buckets_and_signs = torch.arange(numel)

    def row(r: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        a, b, *polynomial = factors[r]
        for start in range(0, numel, BLOCK):
            span = slice(start, start + BLOCK)
            i = buckets_and_signs[span]
            h = polynomial[0] * i
            for factor in polynomial[1:-1]:
                h.add_(factor).fmod_(P).mul_(i)
            h.add_(polynomial[-1]).fmod_(P)
            yield (
                span,
                (a * i).add_(b).fmod_(P).fmod_(columns),
                h.bitwise_and_(1).mul_(2).sub_(1).to(torch.float32),
            )

    return row


def tables(numel: int, rows: int, columns: int) -> tuple[Placed, int]:
    """Return fedcomp's buckets and signs as tables in memory, and the bytes of these tables."""
    buckets, signs = torch.empty(rows, numel, dtype=torch.int64), torch.empty(rows, numel)
    for start in range(0, numel, BLOCK):
        stop = min(start + BLOCK, numel)
        placed = count_sketch.buckets_and_signs(
            torch.arange(start, stop).numpy(), rows, columns, SEED
        )
        for r, (at, negative) in enumerate(placed):
            buckets[r, start:stop] = torch.from_numpy(at)
            signs[r, start:stop] = 1 - 2 * torch.from_numpy(negative).to(torch.float32)
    return (
        lambda r: iter([(slice(0, numel), buckets[r], signs[r])])
    ), buckets.nbytes + signs.nbytes


def scattered(x: Tensor, rows: int, columns: int, placed: Placed) -> Tensor:
    cells = torch.zeros(rows, columns)
    for r in range(rows):
        for span, buckets, signs in placed(r):
            cells[r].scatter_add_(0, buckets, signs * x[span])
    return cells


def counted(x: Tensor, rows: int, columns: int, placed: Placed) -> Tensor:
    cells = torch.zeros(rows, columns)
    for r in range(rows):
        for span, buckets, signs in placed(r):
            cells[r] += torch.bincount(buckets, signs * x[span], columns)
    return cells


def gathered(cells: Tensor, numel: int, k: int, placed: Placed) -> tuple[Tensor, Tensor]:
    rows = torch.empty(len(cells), numel)
    for r in range(len(cells)):
        for span, buckets, signs in placed(r):
            torch.mul(cells[r][buckets], signs, out=rows[r, span])
    estimates = rows.median(dim=0).values
    at = estimates.abs().topk(k, sorted=False).indices
    return at, estimates[at]


def ours(cells: Tensor, numel: int, k: int) -> tuple[Tensor, Tensor]:
    read = SketchUpdate(numel, cells.numpy(), SEED, k).decoded
    return torch.from_numpy(read.positions), torch.from_numpy(read.values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--numel", type=int, default=11_000_000, help="number of elements of the vector"
    )
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--columns", type=int, default=500_000)
    parser.add_argument(
        "--largest",
        type=int,
        default=50_000,
        help="number k of the largest estimates to read from the sketch",
    )
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    n, shape, k = options.numel, (options.rows, options.columns), options.largest
    x = torch.randn(n, generator=torch.Generator().manual_seed(0)) ** 5
    out, by_hash, (by_table, table_bytes) = torch.empty(n), hashed(n, *shape), tables(n, *shape)

    cells = torch.from_numpy(count_sketch.sketch(x, *shape, SEED))
    torch.testing.assert_close(
        scattered(x, *shape, by_table), cells, rtol=1e-4, atol=1e-4 * float(cells.abs().max())
    )
    for one, other in zip(
        map(torch.sort, ours(cells, n, k)),
        map(torch.sort, gathered(cells, n, k, by_table)),
        strict=True,
    ):
        torch.testing.assert_close(one.values, other.values, rtol=0, atol=0)

    sketching = {
        "ours": lambda: count_sketch.sketch(x, *shape, SEED),
        "tables, scatter_add_": lambda: scattered(x, *shape, by_table),
        "tables, bincount": lambda: counted(x, *shape, by_table),
        "hashed, scatter_add_": lambda: scattered(x, *shape, by_hash),
        "hashed, bincount": lambda: counted(x, *shape, by_hash),
    }
    reading = {
        "ours": lambda: ours(cells, n, k),
        "tables, gather": lambda: gathered(cells, n, k, by_table),
        "hashed, gather": lambda: gathered(cells, n, k, by_hash),
    }
    functions = {("", "copy"): lambda: out.copy_(x)}
    functions |= {("sketch", name): function for name, function in sketching.items()}
    functions |= {("read", name): function for name, function in reading.items()}
    times = medians(functions, options.repeats)
    print(f"n = {n:,} into {options.rows} x {options.columns:,}, the {k:,} largest read   threads = {torch.get_num_threads()}"
          f"   medians of {options.repeats} repeats   tables: {table_bytes / 1e6:,.0f} MB\n")  # fmt: skip
    print(f"{'':30}{'ms':>9}{'copies':>9}{'ours':>8}{'CPU ms':>10}{'ours':>8}")
    for (operation, name), (time_s, cpu_s) in times.items():
        our_s, our_cpu_s = times.get((operation, "ours"), (time_s, cpu_s))
        line = f"{f'{operation:8}{name}':30}{time_s * 1e3:9.1f}{time_s / times['', 'copy'][0]:9.1f}"
        print(
            line
            + (
                f"{time_s / our_s:8.1f}{cpu_s * 1e3:10.1f}{cpu_s / our_cpu_s:8.1f}"
                if operation
                else f"{cpu_s * 1e3:18.1f}"
            )
        )


if __name__ == "__main__":
    main()
