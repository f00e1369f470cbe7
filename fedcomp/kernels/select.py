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

from .rows import Rows, stacked

MAGNITUDE = 0x7FFFFFFF  # bits without the sign
SIGN = -0x80000000  # the sign bit of an int32
SAMPLED = 1 << 15  # elements of a vector from which a sample of its keys is taken
SAMPLE = 1 << 14  # keys in a sample, or up to twice as many

Array = np.ndarray | Tensor  # numpy on the CPU, torch elsewhere


class Chosen(NamedTuple):
    """Positions in m vectors, one vector after the other, ascending in each, and how many there are in each."""

    positions: Tensor  # int64, on the vectors' device
    counts: np.ndarray  # int64 [m]


def top_k(rows: Rows, k: int) -> Chosen:
    """Select the k largest magnitudes of each vector."""
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
    """`onto[i] += rows[i]`, in place, where the sum is finite; return the sums of m ≥ 1 vectors, [m, n], and where they are finite."""
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
    elif n < SAMPLED:
        kth = np.partition(keys, n - k, axis=1)[:, n - k, None].clip(1)
    else:
        kth = np.array([[_kth_largest(row, k)] for row in keys], np.int32).clip(1)
    keep = keys >= kth
    tied = _count(keep) > k
    if tied.any():
        above, ties = keys[tied] > kth[tied], keys[tied] == kth[tied]
        keep[tied] = above | (ties & (ties.cumsum(1) <= k - _count(above)[:, None]))
    return keep


def _kth_largest(keys: np.ndarray, k: int) -> int:
    """Return the k-th largest of many keys [n]. A sample tells which keys are too small; all are searched if it misled."""
    sample = keys[:: keys.size // SAMPLE]
    expected = k * sample.size / keys.size
    rank = int(expected + 4 * expected**0.5 + 16)  # four deviations, so that too few are rare
    if rank < sample.size:
        floor = np.partition(sample, -rank)[-rank]
        large = keys[keys >= floor]
        keys = large if large.size >= k else keys
    return int(np.partition(keys, -k)[-k])


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
