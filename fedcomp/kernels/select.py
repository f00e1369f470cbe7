"""Exact selection without sorting: of the k largest magnitudes, the k largest values of one sign, or all magnitudes above a threshold.

Functions take m finite vectors [n], of any float dtype and on any device: a tensor [m, n] or a sequence of tensors [n]. Selection compares
integers, called *keys*, that are computed from the bits of float32 values. For example, all bits but the sign bit are a key that increases
with the magnitude. Among equal magnitudes, those at lower positions are selected first. Zeros are never selected, so fewer than k positions
can be selected.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .parallel import Rows, map_ranges, split_runs, stacked

MAGNITUDE = 0x7FFFFFFF  # mask of all bits but the sign bit
SIGN = -0x80000000  # the sign bit of an int32
# Compiled loops save time, despite their import, if a batch has at least MANY elements in vectors of at least LONG elements.
MANY, LONG = 100_000, 1 << 10
SAMPLED = 1 << 17  # in vectors of at least this size, a sample is used to exclude small elements
SAMPLE = 1 << 14  # minimum number of elements in a sample
STEP = 251  # maximum distance between sampled elements; a prime, so that all columns of a matrix are sampled

Array = np.ndarray | Tensor  # numpy arrays on the CPU, torch tensors elsewhere


class Chosen(NamedTuple):
    """The positions selected in m vectors."""

    # Concatenated, int64, ascending within each vector, on the device of the vectors.
    positions: Tensor
    counts: np.ndarray  # number of positions in each vector, int64 [m]


class Side(NamedTuple):
    """The definition of keys: (bits ^ flip) & mask for the bits of a float32. Only values with positive keys are selected."""

    flip: int
    mask: int


MAGNITUDES, POSITIVES, NEGATIVES = Side(0, MAGNITUDE), Side(0, -1), Side(SIGN, -1)


def top_k(rows: Rows, k: int) -> Chosen:
    """Select the k coordinates of each vector with the largest magnitudes."""
    return _top(rows, k, MAGNITUDES)


def top_side(rows: Rows, k: int) -> Chosen:
    """For each vector x, select the k largest positive values of x or of −x, whichever have the larger mean (x in case of a tie)."""
    sides = [_top(rows, k, side) for side in (POSITIVES, NEGATIVES)]
    means_of = [abs(means(values_at(rows, side), side.counts)) for side in sides]
    split = [side.positions.split(side.counts.tolist()) for side in sides]
    pairs = zip(*split, *means_of, strict=True)
    kept = [up if high >= low else down for up, down, high, low in pairs]
    if not kept:
        return sides[0]
    counts = np.array([len(positions) for positions in kept], np.int64)
    return Chosen(torch.cat(kept) if len(kept) > 1 else kept[0], counts)


def at_least(rows: Rows, threshold: float) -> Chosen:
    """Select the coordinates whose magnitude is at least the threshold, a positive number that is rounded to float32."""
    return _split(_bits(rows) & MAGNITUDE >= int(np.float32(threshold).view(np.int32)))


def values_at(rows: Rows, chosen: Chosen) -> Tensor:
    """Return the selected values as float32, on the device of the vectors."""
    positions, counts = chosen
    if not len(rows):
        return torch.empty(0, dtype=torch.float32)
    if _compiles(rows):
        each = zip(rows, split_runs(positions.numpy(), counts), strict=True)
        return torch.from_numpy(np.concatenate([_floats(row)[at] for row, at in each]))
    stack, row = stacked(rows), np.arange(len(counts)).repeat(counts)
    if stack.is_cpu:
        # numpy is faster here, because torch would start threads for the indexing.
        return torch.from_numpy(_floats(stack)[row, positions.numpy()])
    return stack[torch.from_numpy(row).to(stack.device), positions].to(torch.float32)


def means(values: Array, counts: Array) -> np.ndarray:
    """Return the means of m runs of consecutive values of lengths `counts` [m], as float64 [m]. The mean of an empty run is 0.

    Values are summed on the CPU, in float64 and in order, so the result is the same for values on every device.
    """
    values, counts = (v.cpu().numpy() if isinstance(v, Tensor) else v for v in (values, counts))
    runs = np.arange(len(counts)).repeat(counts)
    return np.bincount(runs, values, len(counts)) / np.maximum(counts, 1)


def are_finite(rows: Rows) -> list[bool]:
    """Return whether each vector is finite."""
    if not len(rows):
        return []
    if _compiles(rows):
        return [_sum_is_finite(None, _floats(row)) for row in rows]
    stack = stacked(rows)
    if stack.is_cuda and stack.numel():
        return torch.stack(stack.aminmax(dim=1)).isfinite().all(0).tolist()
    return np.isfinite(_floats(stack)).all(1).tolist()


def add_finite(onto: Sequence[Tensor], rows: Rows) -> tuple[Rows, list[bool]]:
    """Add rows[i] to onto[i] in place if the sum is finite. Return the m ≥ 1 sums [n], and whether each sum is finite.

    For large vectors on the CPU, the returned sums are not copies, but the tensors in `onto`.
    """
    if _compiles(rows):
        fine = [_add_finite(e.numpy(), _floats(x)) for e, x in zip(onto, rows, strict=True)]
        return onto, fine
    sums = stacked(onto) + stacked(rows)
    finite = are_finite(sums)
    good = [i for i, fine in enumerate(finite) if fine]
    if good:
        torch._foreach_copy_([onto[i] for i in good], [sums[i] for i in good])
    return sums, finite


def _bits(rows: Rows) -> Array:
    """Return the bits of vectors as int32 [m, n]: on the CPU as a numpy array, because numpy partitions faster than torch."""
    if not len(rows):
        return np.empty((0, 0), np.int32)
    stack = stacked(rows)
    if _on_cpu(stack):
        return _floats(stack).view(np.int32)
    return stack.to(torch.float32).contiguous().view(torch.int32)


def _on_cpu(x: Tensor) -> bool:
    return x.is_cpu


def _compiles(rows: Rows) -> bool:
    """Return whether the vectors are processed one by one with compiled loops, and not as a batch with numpy or torch."""
    if not len(rows) or not _on_cpu(rows[0]):
        return False
    numel = rows[0].numel()
    return numel >= LONG and len(rows) * numel >= MANY


def keep_largest(keys: Array, k: int) -> Array:
    """Return whether each key [m, n] is positive and one of the k largest in its row."""
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


def _top(rows: Rows, k: int, side: Side) -> Chosen:
    """Select the k largest positive keys of each vector."""
    if not _compiles(rows):
        return _split(keep_largest((_bits(rows) ^ side.flip) & side.mask, k))
    found = [_largest(np.ascontiguousarray(_floats(row)).view(np.int32), k, side) for row in rows]
    counts = np.array([len(positions) for positions in found], np.int64)
    return Chosen(torch.from_numpy(np.concatenate(found)), counts)


def _largest(bits: np.ndarray, k: int, side: Side) -> np.ndarray:
    """Return the positions of the k largest positive keys, ascending, given the bits [n] of a vector."""
    from . import select_loops

    candidates = _candidates(bits, k, side) if bits.size >= SAMPLED else None
    keys = bits if candidates is None else bits[candidates]
    k = min(k, keys.size)
    kth, above = select_loops.kth_largest(keys, *side, max(k, 1))
    ties = k - above if kth else 0
    chosen = np.empty(k, np.int64)
    chosen = chosen[: select_loops.collect(keys, *side, kth, ties, 0, chosen)]
    return chosen if candidates is None else candidates[chosen]


def _candidates(bits: np.ndarray, k: int, side: Side) -> np.ndarray | None:
    """Return the positions, ascending, of slightly more than k keys: those that reach a threshold determined from a sample.

    Return None if fewer than k or far more than k keys reach the threshold.
    """
    from . import select_loops

    sample = bits[:: min(bits.size // SAMPLE, STEP)].copy()
    fraction = sample.size / bits.size
    # The sample is expected to contain k · fraction of the k largest keys. The rank of the threshold in the sample is more than 4 standard
    # deviations higher, so the k largest keys almost certainly reach it.
    rank = int(k * fraction + 4 * (k * fraction) ** 0.5 + 16)
    threshold, _ = select_loops.kth_largest(sample, *side, rank)
    room = int(2 * rank / fraction)

    def collect(start: int, stop: int) -> np.ndarray | None:
        out = np.empty(min(room, stop - start), np.int64)
        filled = select_loops.collect(bits[start:stop], *side, threshold - 1, 0, start, out)
        return out[:filled].copy() if filled <= out.size else None

    parts = map_ranges(bits.size, collect) if threshold else [None]
    if any(part is None for part in parts) or not k <= sum(map(len, parts)) <= room:
        return None
    return np.concatenate(parts)


def _add_finite(onto: np.ndarray, x: np.ndarray) -> bool:
    """Add x [n] to `onto` in place if the sum is finite. Return whether the sum is finite."""

    def add(start: int, stop: int) -> None:
        onto[start:stop] += x[start:stop]

    fine = _sum_is_finite(onto, x)
    if fine:
        map_ranges(x.size, add)
    return fine


def _sum_is_finite(onto: np.ndarray | None, x: np.ndarray) -> bool:
    from . import select_loops

    def work(start: int, stop: int) -> bool:
        part = None if onto is None else onto[start:stop]
        return select_loops.sum_is_finite(part, x[start:stop])

    return all(map_ranges(x.size, work))


def _split(keep: Array) -> Chosen:
    """Select the positions at which the flags [m, n] are true."""
    if isinstance(keep, Tensor):
        return Chosen(keep.nonzero(as_tuple=True)[1], _count(keep).cpu().numpy())
    rows, positions = np.divmod(np.flatnonzero(keep), max(keep.shape[1], 1))
    return Chosen(torch.from_numpy(positions), np.bincount(rows, minlength=len(keep)))


def _count(keep: Array) -> Array:
    if isinstance(keep, Tensor):
        return keep.count_nonzero(1)
    # np.bincount is three times as fast as count_nonzero.
    return np.bincount(np.flatnonzero(keep) // max(keep.shape[1], 1), minlength=len(keep))


def _floats(x: Tensor) -> np.ndarray:
    return x.numpy() if x.dtype == torch.float32 else x.to(torch.float32).numpy()
