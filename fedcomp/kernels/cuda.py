"""Stacks on CUDA, by Triton: few launches for a whole cohort, and nothing but results leaves the device.

Selection is that of kernels/large.py: a sample of each row says above which key somewhat more than k elements are to be expected, one
pass over the stack collects those, and the exact cut is made among them. Rows where the sample was wrong are left to the caller.
"""

import functools
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import philox

SAMPLED = 32  # elements of a row that are sampled together
STEP = 64  # one of so many stretches is sampled
LONG = 1 << 16  # elements of a row from which sampling pays
CROWDED = 1 / 16  # share of a row above which candidates are too many


class Chosen(NamedTuple):
    """What was selected of a stack [m, n]."""

    positions: Tensor  # int64 [m, k], ascending in each row; n past the end of a row's count
    counts: Tensor  # int64 [m]
    missed: Tensor  # bool [m]: the sample was wrong, the row has to be selected otherwise
    finite: Tensor  # bool [m]


def suits(x: Tensor, k: int) -> bool:
    """Whether `select` can be called for k of the elements of each row of x [m, n]."""
    return serves(x) and LONG <= x.shape[1] < 1 << 31 and k / x.shape[1] <= CROWDED / 4


def select(e: Tensor | None, x: Tensor, k: int, flip: int, mask: int) -> Chosen:
    """The k largest keys above 0 of each row of e + x, or of x where e is None; both contiguous [m, n], e float32. Nothing is written."""
    from . import triton_loops as loops

    m, n = x.shape
    sample = _keys(e, x, flip, mask)
    share = sample.shape[1] / n
    rank = min(
        int(k * share + 4 * (k * share) ** 0.5 + 16), sample.shape[1]
    )  # four deviations, so that too few are rare
    floor = sample.topk(rank, dim=1).values[:, -1].clip(1).contiguous()
    room = min(n, int(2 * rank / share))
    found = torch.zeros(m, room, dtype=torch.int64, device=x.device)
    seen, strange = torch.zeros(2, m, dtype=torch.int32, device=x.device)
    loops.collect[_grid(x)](
        x if e is None else e,
        x,
        floor,
        found,
        seen,
        strange,
        n,
        room,
        flip,
        mask,
        e is not None,
        loops.BLOCK,
    )
    best = found.topk(min(k, room), dim=1, sorted=False).values
    positions = torch.where(best > 0, 0xFFFFFFFF - (best & 0xFFFFFFFF), n).sort(dim=1).values
    missed = (seen > room) | ((seen < k) & (floor > 1))
    return Chosen(positions, (best > 0).sum(1), missed, strange == 0)


def pack_signs(x: Tensor) -> Tensor:
    """The bits x >= 0 of each row of a contiguous x [m, n], eight a byte, as kernels.pack_signs lays them out: uint8 [m, ⌈n/8⌉]."""
    from . import triton_loops as loops

    m, n = x.shape
    width = -(-n // 8)
    packed = torch.empty(m, width, dtype=torch.uint8, device=x.device)
    if packed.numel():
        loops.pack_signs[(-(-width // (loops.BLOCK // 8)), m)](x, packed, n, width, loops.BLOCK)
    return packed


def words(seeds: Sequence[int], count: int, device: torch.device, stream: int = 0) -> Tensor:
    """The first `count` words of each seed, as kernels.philox.words draws them; their bits as int32 [m, count]."""
    from . import triton_loops as loops

    drawn = torch.empty(len(seeds), count, dtype=torch.int32, device=device)
    if drawn.numel():
        loops.fill_words[_grid(drawn)](_halves(seeds, device), drawn, count, stream, loops.BLOCK)
    return drawn


def to_multiples(
    x: Tensor,
    units: Sequence[float],
    limits: Sequence[float],
    seeds: Sequence[int],
    kind: torch.dtype,
) -> Tensor:
    """What rounding.to_multiples makes of each row of a contiguous x [m, n], as `kind`, int8 or int16, on its device."""
    from . import triton_loops as loops

    scales = torch.tensor([2.0**32 / unit for unit in units], dtype=torch.float64, device=x.device)
    ends, made = (
        torch.tensor(limits, dtype=torch.float64, device=x.device),
        torch.empty_like(x, dtype=kind),
    )
    if x.numel():
        loops.multiples[_grid(x)](
            x,
            scales,
            ends,
            _halves(seeds, x.device),
            made,
            x.shape[1],
            loops.BLOCK,
            enable_fp_fusion=False,
        )
    return made


def to_powers(x: Tensor, shifts: Sequence[int], seeds: Sequence[int]) -> Tensor:
    """What rounding.to_powers makes of each row of a contiguous x [m, n]: uint8, on its device."""
    from . import triton_loops as loops

    factors = torch.tensor([2.0**shift for shift in shifts], dtype=torch.float32, device=x.device)
    made = torch.empty_like(x, dtype=torch.uint8)
    if x.numel():
        loops.powers[_grid(x)](
            x,
            factors,
            _halves(seeds, x.device),
            made,
            x.shape[1],
            loops.BLOCK,
            enable_fp_fusion=False,
        )
    return made


def sketch(x: Tensor, rows: int, columns: int, seed: int) -> Tensor:
    """The cells of a contiguous x [n], float32 [rows, columns], on its device, cut to what float32 holds.

    They are summed in integers of a unit that a sum of all n can have: at most 2⁻⁵⁰ of the largest magnitude, 2⁻³⁸ for ten million. So they
    do not depend on the order, but differ in the last bits from those that a CPU sums in float32.
    """
    from . import triton_loops as loops
    from .count_sketch import STREAM

    total, shift = torch.zeros(rows, columns, dtype=torch.int64, device=x.device), 0
    if x.numel():
        shift = min(50, 62 - x.numel().bit_length()) - math.frexp(float(x.abs().max()))[1]
        scale = torch.tensor([2.0**shift], dtype=torch.float64, device=x.device)
        grid = (-(-x.numel() // loops.BLOCK), rows)
        loops.sketch[grid](
            x, scale, _halves([seed], x.device), total, x.numel(), columns, STREAM, loops.BLOCK
        )
    limit = torch.finfo(torch.float32).max
    return (total.to(torch.float64) * 2.0**-shift).clamp_(-limit, limit).to(torch.float32)


def estimates(cells: Tensor, seed: int, numel: int) -> Tensor:
    """What count_sketch.estimates makes of all coordinates of a vector [numel], on the device of contiguous cells: float32."""
    from . import triton_loops as loops
    from .count_sketch import STREAM

    rows, columns = cells.shape
    found = torch.empty(numel, dtype=torch.float32, device=cells.device)
    if numel:
        grid = (-(-numel // loops.BLOCK),)
        loops.estimate[grid](
            cells, _halves([seed], cells.device), found, numel, columns, rows, STREAM, loops.BLOCK
        )
    return found


def _grid(x: Tensor) -> tuple[int, int]:
    from .triton_loops import BLOCK

    return -(-x.shape[1] // BLOCK), len(x)


def _halves(seeds: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([philox.halves(seed) for seed in seeds], dtype=torch.int64, device=device)


def _keys(e: Tensor | None, x: Tensor, flip: int, mask: int) -> Tensor:
    """Keys of a sample of each row: int32 [m, s]."""
    blocks = x.shape[1] // SAMPLED

    def sampled(v: Tensor) -> Tensor:
        return v[:, : blocks * SAMPLED].view(len(v), blocks, SAMPLED)[:, ::STEP].to(torch.float32)

    total = sampled(x) if e is None else sampled(e) + sampled(x)
    return (total.reshape(len(x), -1).view(torch.int32) ^ flip) & mask


def serves(x: Tensor) -> bool:
    """Whether Triton works on this tensor."""
    fits = (
        x.shape[-1] < 1 << 31 and len(x) < 1 << 16 if x.dim() > 1 else x.numel() < 1 << 31
    )  # 32-bit indices, the grid's second side
    return (
        fits
        and x.is_contiguous()
        and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")
        and _triton_imports()
    )


@functools.cache
def _triton_imports() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
