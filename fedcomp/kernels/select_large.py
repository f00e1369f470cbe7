"""Exact selection on large vectors in main memory: threads, bounded extra memory, no sort.

A sample says above which key somewhat more than k elements are to be expected. One pass collects those, and the exact cut
is made among them. Where the sample was wrong, or ties or the density make them too many, the k-th largest key is found
digit by digit instead: a histogram over its leading bits, then over the next bits within the bin that holds it. Each range
of the vector has its own histogram, so the histograms also say where in the result it has to write.

Nothing but `add` writes to e.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import loops
from .parallel import PIECE, starmap
from .select import INFINITE, Array, Side, keep_largest, nonfinite

WIDE = 1 << 22  # elements from which histograms of 2^16 bins are a small part of the vector


@dataclass(frozen=True)
class Sum:
    """e + x, or x where e is None, never held as a whole. e is float32, both are contiguous [n]."""

    e: Tensor | None
    x: Tensor

    @property
    def numel(self) -> int:
        return self.x.numel()

    def ranges(self) -> list[tuple[int, int]]:
        """The vector cut into (start, stop): four for each thread, so that none waits long for one whose core is busy."""
        parts = min(4 * torch.get_num_threads(), self.numel >> 20) or 1
        edges = [self.numel * i // parts for i in range(parts + 1)]
        return list(zip(edges, edges[1:]))

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, np.ndarray | None, np.ndarray]]:
        """One range as (start, e, x) in float32: whole if x is float32, else in pieces."""
        length = max(stop - start, 1) if self.x.dtype is torch.float32 else PIECE
        for a in range(start, stop, length):
            b = min(a + length, stop)
            yield (
                a,
                None if self.e is None else self.e[a:b].numpy(),
                self.x[a:b].to(torch.float32).numpy(),
            )

    def keys(self, at: Callable[[Array], Array], side: Side) -> np.ndarray:
        """The keys of the few elements that `at` takes from a vector: by numpy, since waiting for torch's threads costs more."""
        values = at(self.x.numpy() if self.x.dtype is torch.float32 else self.x)
        values = torch.as_tensor(values).to(torch.float32).numpy()
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # a sum that is not finite is an error of its own
            values = values if self.e is None else values + at(self.e.numpy())
        return (values.view(np.int32) ^ side.flip) & side.mask


def select(total: Sum, k: int, side: Side) -> Tensor:
    """Positions of the k largest keys above 0, ascending. Raises NonFiniteError if one is not finite."""
    floor, expected = _floor(total, k, side)
    found = _candidates(total, side, floor) if floor > 1 and expected <= _room(total) else None
    if found is None or len(found) < k:
        return _by_digits(total, k, side, floor)
    keys = total.keys(lambda v: v[found], side)
    if keys.max() >= INFINITE:
        raise nonfinite(total.x, total.e)
    return torch.from_numpy(found[keep_largest(keys[None], k)[0]])


def at_least(total: Sum, floor: int, side: Side) -> Tensor:
    """Positions of the keys >= floor, which is above 0, ascending. Raises NonFiniteError if one is not finite."""
    found = _candidates(total, side, floor)
    if found is not None:
        strange = len(found) > 0 and total.keys(lambda v: v[found], side).max() >= INFINITE
    else:
        counts = _histogram(total, side, floor, 0, 23, 8)  # by exponent
        strange = counts[:, -1].any()
        counts = counts.sum(1)
        found = np.empty(counts.sum(), np.int64)
        _collect(total, side, floor - 1, [0] * len(counts), np.split(found, counts.cumsum()[:-1]))
    if strange:
        raise nonfinite(total.x, total.e)
    return torch.from_numpy(found)


def add(total: Sum) -> None:
    """e += x."""

    def work(i: int, start: int, stop: int) -> None:
        for _, e, x in total.pieces(start, stop):
            e += x

    _each(total, work)


def _room(total: Sum) -> int:
    """The most candidates that are looked at: with all that is done to them they take less than a quarter of the vector's memory."""
    return total.numel // 64


def _floor(total: Sum, k: int, side: Side) -> tuple[int, float]:
    """A key that somewhat more than k keys reach, going by a sample, and how many are expected to reach it."""
    blocks = total.numel // loops.BLOCK
    step = max(total.numel >> 16, 32)
    sample = total.keys(
        lambda v: v[: blocks * loops.BLOCK].reshape(blocks, loops.BLOCK)[::step].reshape(-1), side
    )
    share = sample.size / total.numel
    rank = int(k * share + 4 * (k * share) ** 0.5 + 16)  # four deviations, so that too few are rare
    if rank > sample.size:
        return 1, total.numel
    floor = max(1, int(np.partition(sample, -rank)[-rank]))
    return floor, np.count_nonzero(sample >= floor) / share


def _candidates(total: Sum, side: Side, floor: int) -> np.ndarray | None:
    """Positions of the keys >= floor, or None if there is no room for them."""
    parts = len(total.ranges())
    room = _room(total) * min(parts, 4) // parts  # a range may hold four times its share
    found = _collect(
        total, side, floor - 1, [0] * parts, [np.empty(room, np.int64) for _ in range(parts)]
    )
    if any(len(part) == room for part in found) or sum(map(len, found)) > _room(total):
        return None
    return np.concatenate(found)


def _by_digits(total: Sum, k: int, side: Side, floor: int) -> Tensor:
    """`select` for any input; `floor` saves time where at least k keys reach it."""
    widths = (15, 16) if total.numel >= WIDE else (11, 10, 10)
    base, shift = 0, 31 - widths[0]
    floor = max(
        1, floor >> shift << shift
    )  # the beginning of a bin, so that none is counted in part
    counts = _histogram(total, side, floor, 0, shift, widths[0])
    if floor > 1 and counts.sum() < k:
        counts = _histogram(total, side, 1, 0, shift, widths[0])
    if counts[:, INFINITE >> shift :].any():
        raise nonfinite(total.x, total.e)
    left = min(k, int(counts.sum()))
    selected = np.zeros(len(counts), np.int64)  # in each range
    for width in (*widths[1:], 0):
        downward = counts.sum(0)[::-1].cumsum()
        above = int(np.searchsorted(downward, left))  # bins that are selected as a whole
        bin = counts.shape[1] - 1 - above
        selected += counts[:, bin + 1 :].sum(1)
        left -= int(downward[above - 1]) if above else 0
        base += bin << shift
        here = counts[:, bin].astype(np.int64)
        complete = left == here.sum()
        if width == 0 or complete:
            break
        shift -= width
        counts = _histogram(total, side, max(1, base), base, shift, width)
    ties = np.clip(left - (here.cumsum() - here), 0, here)  # lower positions first
    positions = np.empty(selected.sum() + left, np.int64)
    outs = np.split(positions, (selected + ties).cumsum()[:-1])
    _collect(total, side, max(0, base - 1) if complete else base, ties * (not complete), outs)
    return torch.from_numpy(positions)


def _collect(
    total: Sum, side: Side, threshold: int, ties: Sequence[int], outs: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Fill each range's array with the positions of the keys above the threshold and the first `ties` equal to it; what was filled."""
    filled = list(outs)

    def work(i: int, start: int, stop: int) -> None:
        left, rest = ties[i], outs[i]
        for a, e, x in total.pieces(start, stop):
            left, rest = loops.collect(e, x, *side, threshold, left, a, rest)
        filled[i] = outs[i][: len(outs[i]) - len(rest)]

    _each(total, work)
    return filled


def _histogram(total: Sum, side: Side, floor: int, base: int, shift: int, width: int) -> np.ndarray:
    """int32 [ranges, 2^width]: how many keys of each range are >= floor and have (key - base) >> shift at that index."""
    counts = np.zeros((len(total.ranges()), 1 << width), np.int32)

    def work(i: int, start: int, stop: int) -> None:
        for _, e, x in total.pieces(start, stop):
            loops.histogram(e, x, *side, floor, base, shift, counts[i])

    _each(total, work)
    return counts


def _each(total: Sum, work: Callable[[int, int, int], None]) -> None:
    """Call work(index, start, stop) for every range, by torch's number of threads."""
    starmap(work, [(i, *span) for i, span in enumerate(total.ranges())])
