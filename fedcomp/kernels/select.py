"""Exact selection of coordinates by magnitude, by side or by a threshold, without sorting.

Functions take m finite vectors [n], of any float dtype and on any device: the rows of a tensor, or separate tensors. A float32's bits
without the sign rise with its magnitude, so selection works on these bits as integers, the keys. Ties at the k-th magnitude go to the
lower position, zeros are never selected, and a result holds fewer than k where fewer are left.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .parallel import map_ranges
from .rows import Rows, stacked

MAGNITUDE = 0x7FFFFFFF  # bits without the sign
TINY = np.float32(1e-45)  # the least magnitude above 0
SIGN = -0x80000000  # the sign bit of an int32
LARGE = 1 << 15  # elements of a vector from which a sample tells which of them are too small
SAMPLE = 1 << 14  # elements in a sample, or up to twice as many
PIECE = 1 << 16  # elements of a large vector that are read at a time, near the processor

Array = np.ndarray | Tensor  # numpy on the CPU, torch elsewhere


class Chosen(NamedTuple):
    """Positions in m vectors, one vector after the other, ascending in each, and how many there are in each."""

    positions: Tensor  # int64, on the vectors' device
    counts: np.ndarray  # int64 [m]


def top_k(rows: Rows, k: int) -> Chosen:
    """Select the k largest magnitudes of each vector."""
    if len(rows) and _on_cpu(rows[0]) and rows[0].numel() >= LARGE:
        found = [_largest_of(_floats(row), k) for row in rows]
        counts = np.array([len(positions) for positions in found], np.int64)
        return Chosen(torch.from_numpy(np.concatenate(found)), counts)
    return _split(keep_largest(_bits(rows) & MAGNITUDE, k))


def top_side(rows: Rows, k: int) -> Chosen:
    """Select the k largest of x or the k largest of -x, of each vector x: the side with the larger mean.

    Only members above zero count; means are those of `means`; equal means go to the positive side.
    """
    bits = _bits(rows)
    sides = [_split(keep_largest(keys, k)) for keys in (bits, bits ^ SIGN)]
    means_of = [means(values_at(rows, side).abs(), side.counts) for side in sides]
    split = [side.positions.split(side.counts.tolist()) for side in sides]
    kept = [
        up if high >= low else down for up, down, high, low in zip(*split, *means_of, strict=True)
    ]
    if not kept:
        return sides[0]
    return Chosen(torch.cat(kept), np.array([len(positions) for positions in kept], np.int64))


def at_least(rows: Rows, threshold: float) -> Chosen:
    """Select the coordinates whose magnitude reaches the threshold, which is above 0 and rounded to float32."""
    return _split(_bits(rows) & MAGNITUDE >= int(np.float32(threshold).view(np.int32)))


def values_at(rows: Rows, chosen: Chosen) -> Tensor:
    """Return the selected values, float32, on the vectors' device."""
    positions, counts = chosen
    if not len(rows):
        return torch.empty(0, dtype=torch.float32)
    stack, row = stacked(rows), np.arange(len(counts)).repeat(counts)
    if stack.device.type == "cpu" and stack.dtype == torch.float32:
        return torch.from_numpy(stack.numpy()[row, positions.numpy()])  # without torch's threads
    return stack[torch.from_numpy(row).to(stack.device), positions].to(torch.float32)


def means(values: Array, counts: Array) -> np.ndarray:
    """Return the mean of each of m runs of values, `counts` [m] long, 0 of none: float64 [m].

    Values are summed in float64 on the host, one after the other: the same on every device.
    """
    values, counts = (v.cpu().numpy() if isinstance(v, Tensor) else v for v in (values, counts))
    runs = np.arange(len(counts)).repeat(counts)
    return np.bincount(runs, values, len(counts)) / np.maximum(counts, 1)


def are_finite(rows: Rows) -> list[bool]:
    """Return for each vector whether it holds neither NaN nor infinity."""
    if not len(rows):
        return []
    stack = stacked(rows)
    if stack.is_cuda and stack.numel():
        return torch.stack(stack.aminmax(dim=1)).isfinite().all(0).tolist()
    return np.isfinite(_floats(stack)).all(1).tolist()


def add_finite(onto: Sequence[Tensor], rows: Rows) -> tuple[Tensor, list[bool]]:
    """`onto[i] += rows[i]`, in place, where the sum is finite; return the sums of m ≥ 1 vectors, [m, n], and where they are finite.

    The sum of a single vector on the CPU is `onto[0]` itself.
    """
    if len(onto) == 1 and _on_cpu(onto[0]):
        return onto[0][None], [_add_finite(onto[0].numpy(), _floats(rows[0]))]
    sums = stacked(onto) + stacked(rows)
    finite = are_finite(sums)
    good = [i for i, fine in enumerate(finite) if fine]
    if good:
        torch._foreach_copy_([onto[i] for i in good], [sums[i] for i in good])
    return sums, finite


def _bits(rows: Rows) -> Array:
    """Return the bits of vectors [m, n], int32: a numpy array if they are on the CPU, where numpy partitions several times faster."""
    if not len(rows):
        return np.empty((0, 0), np.int32)
    stack = stacked(rows)
    if _on_cpu(stack):
        return _floats(stack).view(np.int32)
    return stack.to(torch.float32).contiguous().view(torch.int32)


def _on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


def keep_largest(keys: Array, k: int) -> Array:
    """Return flags [m, n] of the k largest keys above 0 in each row, ties to the lower position."""
    n = keys.shape[1]
    k = min(k, n)
    if k == 0:
        return keys != keys
    if isinstance(keys, Tensor):
        kth = torch.topk(keys, k, dim=1, sorted=False).values.amin(1, keepdim=True).clip(1)
    else:
        kth = np.partition(keys, n - k, axis=1)[:, n - k, None].clip(1)
    keep = keys >= kth
    tied = _count(keep) > k
    if tied.any():
        above, ties = keys[tied] > kth[tied], keys[tied] == kth[tied]
        keep[tied] = above | (ties & (ties.cumsum(1) <= k - _count(above)[:, None]))
    return keep


def _largest_of(x: np.ndarray, k: int) -> np.ndarray:
    """Return the positions of the k largest magnitudes above 0 of a large vector [n], ascending, ties to the lower position.

    A sample tells which elements are too small; all nonzeros are searched if it misled.
    """
    sample = np.abs(x[:: x.size // SAMPLE]).view(np.int32)
    expected = k * sample.size / x.size
    rank = int(expected + 4 * expected**0.5 + 16)  # four deviations, so that too few are rare
    floor = _kth_largest(sample, rank).view(np.float32) if rank < sample.size else np.float32(0)
    positions = _at_least(x, max(floor, TINY))
    if len(positions) < k and floor > TINY:
        positions = _at_least(x, TINY)
    if len(positions) <= k:
        return positions
    keys = np.abs(x[positions]).view(np.int32)
    kth = _kth_largest(keys, k)
    keep = keys > kth
    keep[np.flatnonzero(keys == kth)[: k - np.count_nonzero(keep)]] = True
    return positions[keep]


def _at_least(x: np.ndarray, floor: np.float32) -> np.ndarray:
    """Return the positions of magnitudes from `floor` on, ascending."""
    found = [np.empty(0, np.int64)]
    for start in range(0, x.size, PIECE):
        piece = x[start : start + PIECE]
        found.append(np.flatnonzero((piece >= floor) | (piece <= -floor)) + start)
    return np.concatenate(found)


def _kth_largest(keys: np.ndarray, k: int) -> np.int32:
    """Return the k-th largest of keys ≥ 0, int32 [n], n ≥ k ≥ 1.

    Counts the values of the upper half of the bits, then of the lower half: numpy's partition takes seconds where many are equal.
    """
    upper = keys >> 16
    above = np.bincount(upper, minlength=1 << 15)[::-1].cumsum()  # keys from each value on
    place = int(np.searchsorted(above, k))
    high = len(above) - 1 - place
    left = k - (int(above[place - 1]) if place else 0)
    lower = np.bincount(keys[upper == high] & 0xFFFF, minlength=1 << 16)[::-1].cumsum()
    return np.int32(high << 16 | (1 << 16) - 1 - int(np.searchsorted(lower, left)))


def _add_finite(onto: np.ndarray, x: np.ndarray) -> bool:
    """Add x [n] to `onto` in place if the sum is finite. Return whether it is."""

    def finite(start: int, stop: int) -> bool:
        pieces = (slice(at, min(at + PIECE, stop)) for at in range(start, stop, PIECE))
        with np.errstate(over="ignore", invalid="ignore"):
            return all(np.isfinite(onto[piece] + x[piece]).all() for piece in pieces)

    def add(start: int, stop: int) -> None:
        onto[start:stop] += x[start:stop]

    fine = all(map_ranges(onto.size, finite))
    if fine:
        map_ranges(onto.size, add)
    return fine


def _split(keep: Array) -> Chosen:
    """Return the positions of the flags that are set in [m, n]."""
    if isinstance(keep, Tensor):
        return Chosen(keep.nonzero(as_tuple=True)[1], _count(keep).cpu().numpy())
    rows, positions = np.divmod(np.flatnonzero(keep), max(keep.shape[1], 1))
    return Chosen(torch.from_numpy(positions), np.bincount(rows, minlength=len(keep)))


def _count(keep: Array) -> Array:
    if isinstance(keep, Tensor):
        return keep.count_nonzero(1)
    # Thrice as fast as count_nonzero.
    return np.bincount(np.flatnonzero(keep) // max(keep.shape[1], 1), minlength=len(keep))


def _floats(x: Tensor) -> np.ndarray:
    return x.numpy() if x.dtype == torch.float32 else x.to(torch.float32).numpy()
