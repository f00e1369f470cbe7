"""Randomized Hadamard rotation: every coordinate of a block becomes a sum of all of them under random signs.

Ailon, Chazelle: Approximate nearest neighbors and the fast Johnson–Lindenstrauss transform. STOC 2006.

    u = W·D·x·2^−e      back: x = D·W·u·2^e/d

for each block of d coordinates. D holds the signs: coordinate i turns where bit i mod 32, the lowest first, of word ⌊i/32⌋ of stream
SIGNS (kernels/philox.py) is 1. W is the Walsh–Hadamard matrix of ±1, W·W = d. 2^e brings the largest magnitude into [½, 1), so nothing
overflows and denormals keep their bits. W·D/√d is a rotation; the square root is left to the scale that a codec sends. The butterfly
has the strides d/2, …, 2, 1 and puts a + b and a − b in the place of a and b: float32 sums of two in a fixed order, so every path
has the same bits, as sums over blocks do, which are integers.

Blocks have 2¹⁴ coordinates. The rest is cut into powers of two, the largest first; what fits into one, at least 8, with no more than 32
zeros behind it is the last. So a vector is never more than 32 coordinates longer when it is turned, against up to twice as long with
one block. What is proven of a rotation of d coordinates holds for each block by itself, with its own norm and d ≤ 2¹⁴: bounds that grow
with d are those of 2¹⁴, and those that shrink with d are weak for the last few coordinates, which are mixed with few others.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from . import backend, philox
from .parallel import map_ranges

BLOCK, LEAST, SPARE = (
    1 << 14,
    8,
    32,
)  # coordinates of a block, of the smallest one; zeros that may fill up the last
CHUNK = 8 * BLOCK  # coordinates that one thread turns at a time: they stay in its cache
SIGNS = 3  # stream of the signs
SQUARES, PRODUCTS = 2.0**33, 2.0**38  # units in which sums over a block are below 2⁶²
LARGEST = float(np.finfo(np.float32).max)

Array = np.ndarray | Tensor  # numpy of a chunk, torch of a stack


@lru_cache(256)
def edges(numel: int) -> np.ndarray:
    """Where the blocks of a vector [numel] begin, and where the last ends: int64, multiples of 8. Not to be written to."""
    whole, rest = divmod(numel, BLOCK)
    sizes = [BLOCK] * whole
    while rest > 0:
        size = max(LEAST, 1 << (rest - 1).bit_length())
        sizes.append(size if size - rest <= SPARE else size // 2)
        rest -= sizes[-1]
    return np.cumsum([0, *sizes])


class Cut(NamedTuple):
    """Blocks that follow one another, as loops over whole stacks need them."""

    sizes: np.ndarray  # d of each, int64
    runs: list[tuple[int, int, int]]  # start and stop of those of one size, and that size
    stages: list[
        tuple[int, int]
    ]  # strides, and how many coordinates take part in them: blocks do not grow


@lru_cache(256)
def _cut(numel: int, first: int, last: int) -> Cut:
    sizes = np.diff(edges(numel)[first : last + 1])
    stops = {size: int(sizes[sizes >= size].sum()) for size in dict.fromkeys(sizes.tolist())}
    runs = [(start, stop, size) for (size, stop), start in zip(stops.items(), [0, *stops.values()])]
    strides = [1 << bit for bit in reversed(range(int(sizes.max(initial=1)).bit_length() - 1))]
    return Cut(sizes, runs, [(h, int(sizes[sizes > h].sum())) for h in strides])


def is_large(x: Tensor) -> bool:
    """Whether rows of x [.., n] are turned one by one, by compiled loops."""
    return x.device.type == "cpu" and backend.compile_vector(x.shape[-1])


class Turned(Protocol):
    """Blocks that were turned, u [m, N] float32: what a quantizer may ask of them. Numbers are float64 [m, blocks], on the host."""

    sizes: np.ndarray  # d of each block, int64 [blocks]
    exponents: np.ndarray  # e, int64 [m, blocks]
    blocks: slice  # of the vector's blocks
    span: slice  # of the vector's coordinates, with the zeros behind them

    def squares(self) -> np.ndarray:
        """‖u‖², which is d·‖x·2^−e‖²."""

    def extremes(self) -> tuple[np.ndarray, np.ndarray]:
        """The smallest and the largest u."""

    def bins(self, thresholds: np.ndarray) -> Array:
        """Codes [m, N], uint8: 1 where u > 0, plus twice the number of thresholds, float32 [m, blocks, t], that are below |u|."""

    def products(self, table: np.ndarray, codes: Array) -> tuple[np.ndarray, np.ndarray]:
        """⟨u, q⟩ and ‖q‖² for q = table[codes], a float32 table of magnitudes below 4."""

    def rounded(self, low: np.ndarray, step: np.ndarray, top: int, kind: type) -> Array:
        """Integers r [m, N], int16 or uint8, at most `top`, with low + step·r = u in the mean over seeds; 0 where step = 0."""


def turn(x: Tensor, seed: int, use: Callable[[Turned], None]) -> None:
    """Turn a large vector [n] in main memory and hand it to `use`, chunk after chunk, by threads."""
    map_ranges(
        int(edges(x.numel())[-1]),
        lambda start, stop: [use(Chunk(x, seed, a)) for a in range(start, stop, CHUNK)],
        CHUNK,
    )


def turn_back(
    values: np.ndarray, seed: int, numel: int, first: int, scale: np.ndarray, shift: np.ndarray
) -> np.ndarray:
    """The coordinates, float32, of blocks of a vector [numel] from number `first` on, whose u·2^e/d are scale·values + shift/d.

    `values` [whole blocks] is float32 and is overwritten; `scale` and `shift` [blocks] are float64. What is beyond the range of float32
    becomes its end.
    """
    marks = edges(numel)[first : first + scale.size + 1]
    if not backend.compile_vector(values.size):
        return turn_back_torch(torch.from_numpy(values), seed, numel, first, scale, shift).numpy()
    from . import hadamard_loops

    out = np.empty_like(values)
    hadamard_loops.turn_back(
        values, _sign_bytes(seed, *marks[[0, -1]], True), marks - marks[0], scale, shift, out
    )
    return out[: numel - int(marks[0])]


def turn_back_torch(
    values: Tensor, seed: int, numel: int, first: int, scale: np.ndarray, shift: np.ndarray
) -> Tensor:
    """`turn_back` on the device of the values."""
    marks = edges(numel)[first : first + scale.size + 1]
    cut = _cut(numel, first, first + scale.size)
    v = values[None]
    _butterfly(v, cut)
    wide = v.double() * _spread(scale[None], cut, v.device)
    wide[0, torch.from_numpy(marks[:-1] - marks[0]).to(v.device)] += torch.from_numpy(shift).to(
        v.device
    )
    turned = (wide * _signs([seed], *marks[[0, -1]], v.device)).clip(
        -LARGEST, LARGEST
    ).float() + 0.0
    return turned[0, : min(numel, int(marks[-1])) - int(marks[0])]


class Stack:
    """Rows x [m, n] that are turned together, by torch, on their device."""

    def __init__(self, x: Tensor, seeds: list[int]):
        marks = edges(x.shape[1])
        self.seeds, self.cut = seeds, _cut(x.shape[1], 0, marks.size - 1)
        self.sizes = self.cut.sizes
        self.blocks = slice(0, marks.size - 1)
        self.span = slice(0, int(marks[-1]))
        u = torch.nn.functional.pad(x.to(torch.float32), (0, int(marks[-1]) - x.shape[1]))
        self.exponents = np.frexp(self._blockwise(u.abs(), "amax"))[1].astype(np.int64)
        half = self.exponents >> 1
        for exponents in (half, self.exponents - half):
            u = u * _spread(np.ldexp(np.float32(1), -exponents), self.cut, u.device)
        self.u = u * _signs(seeds, 0, int(marks[-1]), u.device)
        _butterfly(self.u, self.cut)

    def squares(self) -> np.ndarray:
        wide = self.u.double()
        return self._blockwise((wide * wide * SQUARES).long(), "sum") / SQUARES

    def extremes(self) -> tuple[np.ndarray, np.ndarray]:
        low, high = (self._blockwise(self.u, name).astype(np.float64) for name in ("amin", "amax"))
        return low, high

    def bins(self, thresholds: np.ndarray) -> Tensor:
        codes, magnitudes = (self.u > 0).to(torch.uint8), self.u.abs()
        for threshold in np.moveaxis(thresholds, -1, 0):
            codes += (magnitudes > _spread(threshold, self.cut, self.u.device)).to(torch.uint8) * 2
        return codes

    def products(self, table: np.ndarray, codes: Tensor) -> tuple[np.ndarray, np.ndarray]:
        q = _look_up(table.astype(np.float64), codes)
        along, squared = (
            self._blockwise((v * q * PRODUCTS).long(), "sum") / PRODUCTS
            for v in (self.u.double(), q)
        )
        return along, squared

    def rounded(self, low: np.ndarray, step: np.ndarray, top: int, kind: type) -> Tensor:
        lows, inverses = (_spread(v, self.cut, self.u.device) for v in (low, _inverse(step)))
        whole = (self.u.double() - lows) * inverses
        cut_off = whole.long()  # not floor(), for which torch starts its threads
        down = cut_off - (whole < cut_off).long()
        words = np.stack([philox.words(seed, self.span.stop) for seed in self.seeds]).astype(
            np.int64
        )
        up = torch.from_numpy(words).to(self.u.device) < ((whole - down) * 2.0**32).long()
        return (down + up).clip(max=top).to(torch.from_numpy(np.empty(0, kind)).dtype)

    def _blockwise(self, values: Tensor, reduce: str) -> np.ndarray:
        """The sum, amin or amax of each block [m, blocks] of values [m, N], on the host."""
        runs = (
            values[:, start:stop].view(len(values), -1, size) for start, stop, size in self.cut.runs
        )
        return torch.cat([getattr(run, reduce)(2) for run in runs], 1).cpu().numpy()


class Chunk:
    """The blocks of a large vector from coordinate `start` on, at most CHUNK coordinates, turned by compiled loops: m = 1."""

    def __init__(self, x: Tensor, seed: int, start: int):
        from . import hadamard_loops

        self.loops, self.seed = hadamard_loops, seed
        marks = edges(x.numel())
        first, last = np.searchsorted(marks, [start, min(start + CHUNK, marks[-1])]).tolist()
        self.blocks, self.span = slice(first, last), slice(start, int(marks[last]))
        self.edges, self.sizes = marks[first : last + 1] - start, np.diff(marks[first : last + 1])
        self.u = np.empty(self.span.stop - start, np.float32)
        exponents = np.empty(last - first, np.int64)
        held = np.ascontiguousarray(x[self.span].to(torch.float32).numpy())
        hadamard_loops.turn(
            held, _sign_bytes(seed, start, self.span.stop, True), self.edges, exponents, self.u
        )
        self.exponents = exponents[None]

    def squares(self) -> np.ndarray:
        sums = np.empty(self.sizes.size, np.int64)
        self.loops.squares(self.u, self.edges, sums)
        return sums[None] / SQUARES

    def extremes(self) -> tuple[np.ndarray, np.ndarray]:
        keys = np.empty((2, 1, self.sizes.size), np.int32)
        self.loops.extremes(self.u, self.edges, *keys[:, 0])
        low, high = (keys ^ (keys >> 31 & 0x7FFFFFFF)).view(np.float32).astype(np.float64)
        return low, high

    def bins(self, thresholds: np.ndarray) -> np.ndarray:
        codes = np.empty((1, self.u.size), np.uint8)
        self.loops.bins(self.u, self.edges, thresholds[0], codes[0])
        return codes

    def products(self, table: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        along, squared = np.empty((2, 1, self.sizes.size), np.int64)
        self.loops.products(self.u, self.edges, table, codes[0], along[0], squared[0])
        return along / PRODUCTS, squared / PRODUCTS

    def rounded(self, low: np.ndarray, step: np.ndarray, top: int, kind: type) -> np.ndarray:
        codes = np.empty((1, self.u.size), kind)
        self.loops.rounded(
            self.u,
            self.edges,
            low[0],
            _inverse(step)[0],
            top,
            np.uint64(self.seed),
            self.span.start,
            codes[0],
        )
        return codes


def _butterfly(v: Tensor, cut: Cut) -> None:
    """All stages of all blocks of v [m, N], in place."""
    for h, stop in cut.stages:
        first, second = v[:, :stop].view(v.shape[0], -1, 2, h).unbind(2)
        difference = first - second
        first += second
        second.copy_(difference)


def _spread(numbers: np.ndarray, cut: Cut, device: torch.device) -> Tensor:
    """Numbers [m, blocks] for each coordinate of their block: [m, N], or [m, 1] where there is one block."""
    if (
        cut.sizes.size == 1 or device.type == "cpu"
    ):  # by numpy, which does not wait for torch's threads
        return torch.from_numpy(numbers.repeat(cut.sizes if cut.sizes.size > 1 else 1, 1)).to(
            device
        )
    return (
        torch.from_numpy(numbers.copy())
        .to(device)
        .repeat_interleave(torch.from_numpy(cut.sizes).to(device), 1)
    )


def _look_up(table: np.ndarray, codes: Tensor) -> Tensor:
    """table[codes]; in main memory by numpy, as above."""
    if codes.device.type == "cpu":
        return torch.from_numpy(table[codes.numpy()])
    return torch.from_numpy(table).to(codes.device)[codes.long()]


def _signs(seeds: list[int], start: int, stop: int, device: torch.device) -> Tensor:
    """±1 for the coordinates start..stop-1: float32 [m, stop − start]."""
    draw = _kept_sign_bytes if stop - start <= CHUNK else _sign_bytes
    bits = np.unpackbits(
        np.stack([draw(seed, int(start), int(stop)) for seed in seeds]), axis=1, bitorder="little"
    )
    return 1 - 2 * torch.from_numpy(bits).to(device).float()


def _sign_bytes(seed: int, start: int, stop: int, compiled: bool = False) -> np.ndarray:
    """The bits of the coordinates start..stop-1, the lowest of a byte first; both are multiples of 8."""
    first, count = (
        int(start) // 128 * 4,
        -(-int(stop) // 128) * 4 - int(start) // 128 * 4,
    )  # words, in whole blocks
    if compiled:
        from . import loops

        words = np.empty(count, np.uint32)
        loops.philox_fill(*philox.halves(seed), SIGNS, first, words)
    else:
        words = philox.words(seed, count, first, SIGNS)
    return words.astype("<u4", copy=False).view(np.uint8)[int(start) % 128 // 8 :][
        : (int(stop) - int(start)) // 8
    ]


_kept_sign_bytes = lru_cache(32)(
    _sign_bytes
)  # a memory opens its own frame right after it was made


def _inverse(step: np.ndarray) -> np.ndarray:
    return np.divide(1.0, step, where=step > 0, out=np.zeros_like(step))
