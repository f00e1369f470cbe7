"""Which coordinates are sent: exact selection by magnitude, by side or by a threshold, without sorting.

A float32's bit pattern without its sign is monotone in magnitude, so selection works on integers. Ties at the k-th
magnitude go to the lower position, zeros are never selected, and a result holds fewer than k where fewer are left.
Vectors are 1-D, of any float dtype and on any device; positions are int64, ascending, on the vector's device.
"""

import functools
import math
import operator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import NonFiniteError
from . import backend

INFINITE = 0x7F800000  # bit pattern of infinity; those of NaN are above
MAGNITUDE = 0x7FFFFFFF  # bits without the sign
SIGN = -0x80000000  # the sign bit of an int32
FEW = 256  # values that Python sums sooner than numpy
PIECE = 1 << 20  # elements searched for NaN or infinity at a time

Array = np.ndarray | Tensor  # numpy on the CPU, torch elsewhere


class Side(NamedTuple):
    """What is large: a key is (bits ^ flip) & mask."""

    flip: int
    mask: int


MAGNITUDES, POSITIVES, NEGATIVES = Side(0, MAGNITUDE), Side(0, -1), Side(SIGN, -1)


def top_k(x: Tensor, k: int) -> Tensor:
    """Positions of the k largest magnitudes of x [n]. Raises NonFiniteError on NaN or infinity."""
    return _top_k(None, x.detach(), k)


def top_k_added(e: Tensor, x: Tensor, k: int) -> Tensor:
    """e += x, and the positions of the k largest magnitudes of the sum. e is float32; x has its shape and device.

    Raises NonFiniteError if the sum holds NaN or infinity, as it does wherever x does; e is then untouched. On a CPU, with
    a contiguous e of at least `backend.LARGE` elements, all it takes beside its result is less than a quarter of e's memory.
    """
    _check_pair(e, x)
    return _top_k(e.detach(), x.detach(), k)


def top_side(x: Tensor, k: int) -> tuple[Tensor, bool]:
    """Positions of the k largest of x [n] or of -x, the side with the larger mean, and whether that is the positive one.

    Only members above zero count; the mean is `mean`; equal means go to the positive side. Raises NonFiniteError on NaN or infinity.
    """
    return _top_side(None, x.detach(), k)


def top_side_added(e: Tensor, x: Tensor, k: int) -> tuple[Tensor, bool]:
    """e += x, and `top_side` of the sum. Arguments, errors and memory are those of `top_k_added`."""
    _check_pair(e, x)
    return _top_side(e.detach(), x.detach(), k)


def top_k_rows(X: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """`top_k` of every row of X [m, n], which is finite: rows and positions of the selected, in this order, and counts [m]; int64."""
    if _is_large(X[:1]):
        return _join([top_k(x, k) for x in X], X.device)
    return _split(keep_largest(_bits(X) & MAGNITUDE, k))


def top_side_rows(X: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`top_side` of every row of X [m, n], which is finite: as `top_k_rows`, and positive, bool [m]."""
    if _is_large(X[:1]):
        sides = [top_side(x, k) for x in X]
        positive = torch.tensor([up for _, up in sides], dtype=torch.bool, device=X.device)
        return *_join([positions for positions, _ in sides], X.device), positive
    bits = _bits(X)
    keeps = _keep_sides(bits, k)
    up, down = (_mean_magnitudes(bits, keep) for keep in keeps)
    positive = torch.from_numpy(up >= down).to(X.device)
    if isinstance(keeps[0], np.ndarray):
        return *_split(np.where(positive.numpy()[:, None], *keeps)), positive
    return *_split(torch.where(positive[:, None], *keeps)), positive


def at_least(x: Tensor, threshold: float) -> Tensor:
    """Positions where |x| reaches the threshold, which is above 0 and rounded to float32. Raises NonFiniteError on NaN or infinity."""
    return _at_least(None, x.detach(), threshold)


def at_least_added(e: Tensor, x: Tensor, threshold: float) -> Tensor:
    """e += x, and `at_least` of the sum. Arguments, errors and memory are those of `top_k_added`."""
    _check_pair(e, x)
    return _at_least(e.detach(), x.detach(), threshold)


def at_least_rows(X: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """`at_least` for every row of X [m, n], which is finite: as `top_k_rows`."""
    if _is_large(X[:1]):
        return _join([at_least(x, threshold) for x in X], X.device)
    return _split((_bits(X) & MAGNITUDE) >= _key(threshold))


def mean(values: Array) -> float:
    """The mean of `values`, summed in float64 on the host, one after the other; 0 of none. The same on every device."""
    if len(values) <= FEW:
        total = functools.reduce(
            operator.add, map(float, values.tolist()), 0.0
        )  # sum() compensates from Python 3.12 on
        return total / max(len(values), 1)
    return float(means(values, np.array([len(values)]))[0])


def means(values: Array, counts: Array) -> np.ndarray:
    """`mean` of each of m runs of values, `counts` [m] long: float64 [m]."""
    values, counts = (v.cpu().numpy() if isinstance(v, Tensor) else v for v in (values, counts))
    runs = np.arange(len(counts)).repeat(counts)
    return np.bincount(runs, values, len(counts)) / np.maximum(counts, 1)


def first_nonfinite(x: Tensor) -> int | None:
    """The first position of x [n] that holds NaN or infinity."""
    if x.numel() == 0 or all(math.isfinite(edge) for edge in x.detach().aminmax()):
        return None
    return _first_nonfinite(None, x.detach())


def first_nonfinite_rows(X: Tensor) -> Tensor:
    """`first_nonfinite` of every row of X [m, n], int64 [m], on the CPU; -1 where all is finite."""
    if X.is_cuda and X.numel():
        bad = (
            (~torch.stack(X.detach().aminmax(dim=1)).isfinite()).any(0).tolist()
        )  # NaN is both the least and the largest
    else:
        bad = ((_bits(X) & MAGNITUDE) >= INFINITE).any(1).tolist()
    return torch.tensor(
        [_first_nonfinite(None, x) if held else -1 for x, held in zip(X.detach(), bad)],
        dtype=torch.int64,
    )


def _top_k(e: Tensor | None, x: Tensor, k: int) -> Tensor:
    if _is_large(x, e):
        from . import select_large

        total = select_large.Sum(e, x.contiguous())
        positions = select_large.select(total, k, MAGNITUDES)
        if e is not None:
            select_large.add(total)
        return positions
    return _split(keep_largest(_add(e, x) & MAGNITUDE, k))[1]


def _top_side(e: Tensor | None, x: Tensor, k: int) -> tuple[Tensor, bool]:
    if _is_large(x, e):
        from . import select_large

        total = select_large.Sum(e, x.contiguous())
        up, down = (select_large.select(total, k, side) for side in (POSITIVES, NEGATIVES))
        if e is not None:
            select_large.add(total)
    else:
        up, down = (_split(keep)[1] for keep in _keep_sides(_add(e, x), k))
    values = x if e is None else e
    positive = mean(values[up].to(torch.float32)) >= mean(-values[down].to(torch.float32))
    return (up if positive else down), positive


def _at_least(e: Tensor | None, x: Tensor, threshold: float) -> Tensor:
    if _is_large(x, e):
        from . import select_large

        total = select_large.Sum(e, x.contiguous())
        positions = select_large.at_least(total, _key(threshold), MAGNITUDES)
        if e is not None:
            select_large.add(total)
        return positions
    return _split((_add(e, x) & MAGNITUDE) >= _key(threshold))[1]


def _key(magnitude: float) -> int:
    return int(np.float32(magnitude).view(np.int32))


def _check_pair(e: Tensor, x: Tensor) -> None:
    if e.dtype != torch.float32 or e.shape != x.shape or e.device != x.device:
        raise ValueError(
            f"e is {e.dtype} {list(e.shape)} on {e.device}, x has {list(x.shape)} on {x.device}; "
            "give a float32 e with the shape and device of x"
        )


def _is_large(x: Tensor, e: Tensor | None = None) -> bool:
    return (
        x.device.type == "cpu"
        and (e is None or e.is_contiguous())
        and backend.compile_vector(x.numel())
    )


def _bits(x: Tensor) -> Array:
    """x as float32, its bit patterns as int32: a numpy array if it is on the CPU, where numpy partitions several times faster."""
    bits = x.detach().to(torch.float32).contiguous().view(torch.int32)
    return bits.numpy() if bits.device.type == "cpu" else bits


def _add(e: Tensor | None, x: Tensor) -> Array:
    """`_bits` [1, n] of x, or of e + x, which is then written to e if it is finite. Raises NonFiniteError."""
    total = x if e is None else e + x.to(torch.float32)
    bits = _bits(total[None])
    if x.numel() and (bits & MAGNITUDE).max() >= INFINITE:
        raise non_finite(e, x)
    if e is not None:
        e.copy_(total)
    return bits


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


def _keep_sides(bits: Array, k: int) -> tuple[Array, Array]:
    return keep_largest(bits.clip(0), k), keep_largest((bits ^ SIGN).clip(0), k)


def _mean_magnitudes(bits: Array, keep: Array) -> np.ndarray:
    """`mean` of what is kept in each row of [m, n]: float64 [m]."""
    kept = bits[keep] & MAGNITUDE
    kept = kept.cpu().numpy() if isinstance(kept, Tensor) else kept
    return means(kept.view(np.float32), _count(keep))


def _split(keep: Array) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, positions and counts of what is kept in [m, n]."""
    if isinstance(keep, Tensor):
        return *keep.nonzero(as_tuple=True), _count(keep)
    rows, positions = np.divmod(np.flatnonzero(keep), max(keep.shape[1], 1))
    return tuple(map(torch.from_numpy, (rows, positions, np.bincount(rows, minlength=len(keep)))))


def _count(keep: Array) -> Array:
    if isinstance(keep, Tensor):
        return keep.count_nonzero(1)
    return np.bincount(
        np.flatnonzero(keep) // max(keep.shape[1], 1), minlength=len(keep)
    )  # thrice as fast as count_nonzero


def _join(chosen: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    counts = torch.tensor([len(positions) for positions in chosen], device=device)
    return (
        torch.arange(len(chosen), device=device).repeat_interleave(counts),
        torch.cat(chosen),
        counts,
    )


def _first_nonfinite(e: Tensor | None, x: Tensor) -> int | None:
    for start in range(0, x.numel(), PIECE):
        total = x[start : start + PIECE].to(torch.float32)
        if e is not None:
            total = e[start : start + PIECE] + total
        bad = (~total.isfinite()).nonzero()
        if len(bad):
            return start + int(bad[0])
    return None


def non_finite(e: Tensor | None, x: Tensor) -> NonFiniteError:
    """The error for an x, or a sum e + x, that is not finite; its `position` is that of the first such element."""
    position = _first_nonfinite(e, x)
    value, what = x[position].to(torch.float32), "the update"
    if value.isfinite():
        value, what = e[position] + value, "the residual with the update added"
    error = NonFiniteError(
        f"{what} is {value.item()} at position {position}; lower --lr or set --clip"
    )
    error.position = position
    return error
