"""Which coordinates are sent: exact selection by magnitude, by side or by a threshold, without sorting.

Functions take m vectors [n], of any float dtype and on any device: the rows of a tensor, or separate tensors. A float32's bit pattern
without its sign is monotone in magnitude, so selection works on integers. Ties at the k-th magnitude go to the lower position, zeros
are never selected, and a result holds fewer than k where fewer are left.

With `onto`, m float32 vectors of the same shape and device, `onto[i] += rows[i]` in place, and the selection is from the sums. On a CPU,
with contiguous vectors of at least `backend.LARGE` elements, all it takes beside its result is less than a quarter of a vector's memory.
NaN and infinity raise NonFiniteError; vectors of `onto` whose sum is not finite are not touched.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import NonFiniteError
from .parallel import map_ranges
from .rows import Rows, are_large, stacked
from .sparse import all_finite

INFINITE = 0x7F800000  # bit pattern of infinity; those of NaN are above
MAGNITUDE = 0x7FFFFFFF  # bits without the sign
SIGN = -0x80000000  # the sign bit of an int32
PIECE = 1 << 20  # elements searched for NaN or infinity at a time

Array = np.ndarray | Tensor  # numpy on the CPU, torch elsewhere


class Chosen(NamedTuple):
    """Positions in m vectors, one vector after the other, ascending in each, and how many there are in each."""

    positions: Tensor  # int64, on the vectors' device
    counts: np.ndarray  # int64 [m]


class Side(NamedTuple):
    """What is large: a key is (bits ^ flip) & mask."""

    flip: int
    mask: int


MAGNITUDES, POSITIVES, NEGATIVES = Side(0, MAGNITUDE), Side(0, -1), Side(SIGN, -1)


def top_k(rows: Rows, k: int, onto: Sequence[Tensor] | None = None) -> Chosen:
    """Select the k largest magnitudes of each vector."""
    return _select(rows, onto, [MAGNITUDES], k=k)[0]


def top_side(rows: Rows, k: int, onto: Sequence[Tensor] | None = None) -> Chosen:
    """Select the k largest of x or the k largest of -x, of each vector x: the side with the larger mean.

    Only members above zero count; means are those of `means`; equal means go to the positive side.
    """
    sides = _select(rows, onto, [POSITIVES, NEGATIVES], k=k)
    rows = rows if onto is None else onto
    means_of = [means(values_at(rows, side).abs(), side.counts) for side in sides]
    split = [side.positions.split(side.counts.tolist()) for side in sides]
    kept = [
        up if high >= low else down for up, down, high, low in zip(*split, *means_of, strict=True)
    ]
    return _joined(kept) if kept else sides[0]


def at_least(rows: Rows, threshold: float, onto: Sequence[Tensor] | None = None) -> Chosen:
    """Select the coordinates whose magnitude reaches the threshold, which is above 0 and rounded to float32."""
    return _select(rows, onto, [MAGNITUDES], floor=int(np.float32(threshold).view(np.int32)))[0]


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
    if len(rows) and rows[0].is_cuda and rows[0].numel():
        return torch.stack(stacked(rows).aminmax(dim=1)).isfinite().all(0).tolist()
    if isinstance(rows, Tensor) and not are_large(rows):
        return np.isfinite(_floats(rows)).all(1).tolist()
    return [_is_finite(row) for row in rows]


def first_nonfinite(x: Tensor, onto: Tensor | None = None) -> int | None:
    """Return the first position where x [n], or onto + x, is NaN or infinity."""
    for start in range(0, x.numel(), PIECE):
        total = x[start : start + PIECE].to(torch.float32)
        if onto is not None:
            total = onto[start : start + PIECE] + total
        bad = (~total.isfinite()).nonzero()
        if len(bad):
            return start + int(bad[0])
    return None


def add_finite(onto: Sequence[Tensor], rows: Rows) -> tuple[Tensor, list[bool]]:
    """`onto[i] += rows[i]`, in place, where the sum is finite; return the sums of m ≥ 1 vectors, [m, n], and where they are finite."""
    sums = stacked(onto) + stacked(rows)
    finite = are_finite(sums)
    good = [i for i, fine in enumerate(finite) if fine]
    if good:
        torch._foreach_copy_([onto[i] for i in good], [sums[i] for i in good])
    return sums, finite


def nonfinite(
    x: Tensor,
    onto: Tensor | None = None,
    what: str = "the update",
    place: Callable[[int], str] = "at position {}".format,
) -> NonFiniteError:
    """Return the error for an x, or a sum onto + x, that is not finite; its `position` is that of the first such element."""
    position = first_nonfinite(x, onto)
    value = x[position].to(torch.float32)
    if value.isfinite():
        value, what = onto[position] + value, "the residual with the update added"
    error = NonFiniteError(f"{what} is {value.item()} {place(position)}; lower --lr or set --clip")
    error.position = position
    return error


def _select(
    rows: Rows,
    onto: Sequence[Tensor] | None,
    sides: Sequence[Side],
    k: int | None = None,
    floor: int = 0,
) -> list[Chosen]:
    """Select the k largest keys of each vector, or those from `floor` on where k is None; once for each of the sides."""
    if are_large(rows, onto):
        from . import select_large

        found: list[list[Tensor]] = [[] for _ in sides]
        for row, total in zip(rows, onto or [None] * len(rows), strict=True):
            summed = select_large.Sum(total, row.contiguous())
            for chosen, side in zip(found, sides, strict=True):
                chosen.append(
                    select_large.at_least(summed, floor, side)
                    if k is None
                    else select_large.select(summed, k, side)
                )
            if total is not None:
                select_large.add(summed)
        return [_joined(chosen) for chosen in found]
    if onto is not None:
        sums, finite = add_finite(onto, rows)
        if not all(finite):
            bad = finite.index(False)
            raise nonfinite(rows[bad], onto[bad])
        rows = sums
    selected = []
    for side in sides:
        keys = _keys(rows, side)
        if 0 not in keys.shape and keys.max() >= INFINITE:
            raise nonfinite(next(row for row, good in zip(rows, are_finite(rows)) if not good))
        selected.append(_split(keys >= floor if k is None else keep_largest(keys, k)))
    return selected


def _keys(rows: Rows, side: Side) -> Array:
    """The keys [m, n] of vectors: a numpy array if they are on the CPU, where numpy partitions several times faster."""
    if not len(rows):
        return np.empty((0, 0), np.int32)
    if not _on_cpu(rows[0]):
        bits = stacked(rows).to(torch.float32).contiguous().view(torch.int32)
        return (bits ^ side.flip) & side.mask
    bits = _floats(stacked(rows)).view(np.int32)
    return (bits ^ side.flip if side.flip else bits) & side.mask


def _on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


def keep_largest(keys: Array, k: int) -> Array:
    """Where the k largest keys above 0 are in each row of [m, n], ties to the lower position."""
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


def _split(keep: Array) -> Chosen:
    """What is kept in [m, n]."""
    if isinstance(keep, Tensor):
        return Chosen(keep.nonzero(as_tuple=True)[1], _count(keep).cpu().numpy())
    rows, positions = np.divmod(np.flatnonzero(keep), max(keep.shape[1], 1))
    return Chosen(torch.from_numpy(positions), np.bincount(rows, minlength=len(keep)))


def _count(keep: Array) -> Array:
    if isinstance(keep, Tensor):
        return keep.count_nonzero(1)
    return np.bincount(
        np.flatnonzero(keep) // max(keep.shape[1], 1), minlength=len(keep)
    )  # thrice as fast as count_nonzero


def _joined(chosen: Sequence[Tensor]) -> Chosen:
    counts = np.array([len(positions) for positions in chosen], np.int64)
    return Chosen(torch.cat(list(chosen)) if len(chosen) > 1 else chosen[0], counts)


def _floats(x: Tensor) -> np.ndarray:
    return x.numpy() if x.dtype == torch.float32 else x.to(torch.float32).numpy()


def _is_finite(x: Tensor) -> bool:
    values = _floats(x)
    if values.size < PIECE:
        return all_finite(values)
    return all(map_ranges(values.size, lambda start, stop: all_finite(values[start:stop])))
