"""Exact selection on large vectors in main memory: threads, bounded extra memory, no sort.

The k-th largest key is found digit by digit: a histogram over its leading bits, then one over the next bits within the
bin that holds it. A floor taken from a sample lets the first pass skip nearly everything. Each thread keeps its own
histogram over its own stretch of the vector, so the histograms also say where in the result it has to write.

Passes over e and x only read, until the sum is known to be finite.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import loops
from .select import INFINITE

PIECE = 1 << 17  # elements converted to float32 at a time
WIDE = 1 << 22  # elements from which histograms of 2^16 bins are a small part of the vector


class Side(NamedTuple):
    """What is large: a key is (bits ^ flip) & mask."""

    flip: int
    mask: int


MAGNITUDE, POSITIVE, NEGATIVE = Side(0, 0x7FFFFFFF), Side(0, -1), Side(-0x80000000, -1)


@dataclass(frozen=True)
class Sum:
    """e + x, or x where e is None, never held as a whole. e is float32 and contiguous, x contiguous."""

    e: Tensor | None
    x: Tensor

    def stretches(self) -> list[tuple[int, int]]:
        """The vector cut into one (start, stop) for each thread."""
        n = self.x.numel()
        threads = min(torch.get_num_threads(), n >> 20) or 1
        edges = [n * i // threads for i in range(threads + 1)]
        return list(zip(edges, edges[1:]))

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, np.ndarray | None, np.ndarray]]:
        """A stretch as (start, e, x) in float32: whole if x is float32 already, else in pieces."""
        length = stop - start if self.x.dtype is torch.float32 else PIECE
        for a in range(start, stop, max(length, 1)):
            b = min(a + length, stop)
            yield a, None if self.e is None else self.e[a:b].numpy(), self.x[a:b].to(torch.float32).numpy()

    def sample(self, step: int) -> "Sum":
        """Every `step`-th block of the vector."""
        blocks = self.x.numel() // loops.BLOCK
        e, x = (v if v is None else v[: blocks * loops.BLOCK].view(blocks, loops.BLOCK)[::step].reshape(-1) for v in (self.e, self.x))
        return Sum(e, x)


@dataclass(frozen=True)
class Cut:
    """What is selected: every key above the threshold, and the first `ties` equal to it."""

    side: Side
    threshold: int
    counts: np.ndarray  # int64 [threads]: selected in each stretch
    ties: np.ndarray  # int64 [threads]: of them equal to the threshold


def cut(total: Sum, k: int, side: Side) -> Cut | None:
    """Where to cut `total` for its k largest keys above 0, or all of them where there are fewer; None if one is not finite."""
    widths = (15, 16) if total.x.numel() >= WIDE else (11, 10, 10)
    shift = 31 - widths[0]
    counts = _leading(total, side, k, shift, widths[0])
    if counts[:, INFINITE >> shift :].any():
        return None
    left = min(k, int(counts.sum()))
    if left == 0:
        return Cut(side, INFINITE, np.zeros(len(counts), np.int64), np.zeros(len(counts), np.int64))
    base, above = 0, np.zeros(len(counts), np.int64)
    for width in (*widths[1:], 0):
        downward = counts.sum(0)[::-1].cumsum()
        rank = int(np.searchsorted(downward, left))
        bin = counts.shape[1] - 1 - rank
        above += counts[:, bin + 1 :].sum(1)
        left -= int(downward[rank - 1]) if rank else 0
        base += bin << shift
        here = counts[:, bin].astype(np.int64)
        if left == here.sum():
            return Cut(side, max(base - 1, 0), above + here, np.zeros_like(here))
        if width:
            shift -= width
            counts = _histogram(total, side, max(base, 1), base, shift, width)
    ties = np.clip(left - (here.cumsum() - here), 0, here)
    return Cut(side, base, above + ties, ties)


def collect(total: Sum, where: Cut, *, add: bool = False) -> Tensor:
    """The positions that `where` selects, int64, ascending. With `add`, e += x in the same pass."""
    positions = np.empty(where.counts.sum(), np.int64)
    ends = where.counts.cumsum()

    def work(t: int, start: int, stop: int) -> None:
        ties, out = where.ties[t], positions[ends[t] - where.counts[t] : ends[t]]
        for a, e, x in total.pieces(start, stop):
            ties, out = loops.collect(e, x, *where.side, where.threshold, ties, a, out, add)

    _each(total, work)
    return torch.from_numpy(positions)


def _leading(total: Sum, side: Side, k: int, shift: int, width: int) -> np.ndarray:
    """The histogram of the leading bits, complete from the bin of the k-th largest key upwards; bins below may be empty."""
    step = max(total.x.numel() >> 16, 32)
    expected = k / step
    enough = expected + 4 * expected**0.5 + 16  # so that a floor too high is rare
    sampled = _histogram(total.sample(step), side, 1, 0, shift, width).sum(0)
    floor = int(np.count_nonzero(sampled[::-1].cumsum() >= enough) - 1) << shift
    if floor > 0:
        counts = _histogram(total, side, floor, 0, shift, width)
        if counts.sum() >= k:
            return counts
    return _histogram(total, side, 1, 0, shift, width)


def _histogram(total: Sum, side: Side, floor: int, base: int, shift: int, width: int) -> np.ndarray:
    """int32 [threads, 2^width]: how many keys of each stretch are >= floor and have (key - base) >> shift at that index."""
    counts = np.zeros((len(total.stretches()), 1 << width), np.int32)

    def work(t: int, start: int, stop: int) -> None:
        for _, e, x in total.pieces(start, stop):
            loops.histogram(e, x, *side, floor, base, shift, counts[t])

    _each(total, work)
    return counts


def _each(total: Sum, work: Callable[[int, int, int], None]) -> None:
    """Call work(thread, start, stop) for every stretch, at once."""
    calls = [(t, *stretch) for t, stretch in enumerate(total.stretches())]
    if len(calls) == 1:
        return work(*calls[0])
    with ThreadPoolExecutor(len(calls)) as pool:
        for done in [pool.submit(work, *call) for call in calls]:
            done.result()
