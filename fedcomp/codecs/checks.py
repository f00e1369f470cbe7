"""Checks of the vectors that codecs and memories are given."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import kernels
from ..errors import ConfigError, NonFiniteError
from ..kernels import Rows
from ..layout import Layout

PRECISIONS = (torch.float32, torch.float16, torch.bfloat16)


def check_vector(x: Tensor, layout: Layout | None = None) -> None:
    """Raise ConfigError unless x is a dense vector of one dimension, of a precision that codecs take and of the size of the layout."""
    _check_dense(x)
    if x.dim() != 1:
        raise ConfigError(f"a codec takes a vector of one dimension; given shape {list(x.shape)}")
    if x.dtype not in PRECISIONS:
        raise ConfigError(
            f"a codec takes float32, float16 or bfloat16; given {x.dtype}, write x.float()"
        )
    if layout is not None and layout.numel != x.numel():
        raise ConfigError(
            f"the layout has {layout.numel} elements and the vector {x.numel()}; give the layout of this model"
        )


def checked(
    x: Rows, seeds: Sequence[int], onto: Sequence[Tensor] | None, layout: Layout | None
) -> Rows:
    """Return the arguments of `Codec.encode_batch`, detached. Raise ConfigError for vectors that a codec does not take."""
    if not isinstance(x, Sequence):
        _check_dense(x)
    if isinstance(x, Tensor) and x.dim() != 2 or len(seeds) != len(x):
        given = f"shape {list(x.shape)}" if isinstance(x, Tensor) else f"{len(x)} vectors"
        raise ConfigError(
            f"encode_batch needs m vectors of one size, such as a stack [m, n], and m seeds; given {given} and {len(seeds)} seeds"
        )
    alike = set()
    for row in x[:1] if isinstance(x, Tensor) else x:
        check_vector(row, layout)
        alike.add((row.shape, row.device, row.dtype))
    if len(alike) > 1:
        raise ConfigError("encode_batch needs vectors of one size, precision and device")
    for shape, device, _ in alike:
        for total in onto or ():
            if total.shape != shape or total.device != device or total.dtype != torch.float32:
                given = f"{total.dtype} {list(total.shape)} on {total.device}"
                raise ConfigError(
                    f"the sum is {given}, the vector {list(shape)} on {device}; give a float32 sum of its shape and device"
                )
    return x.detach() if isinstance(x, Tensor) else [row.detach() for row in x]


def nonfinite_rows(rows: Rows, layout: Layout | None, what: str) -> list[NonFiniteError | None]:
    """Return an error that names `what` for each vector that holds NaN or infinity, None for the others."""
    return [
        None if fine else nonfinite(row, layout, what=what)
        for row, fine in zip(rows, kernels.are_finite(rows), strict=True)
    ]


def nonfinite(
    x: Tensor, layout: Layout | None, onto: Tensor | None = None, what: str = "the update"
) -> NonFiniteError:
    """Return the error for a vector, or a sum onto + x, that is not finite. It names the tensor and the first such element."""
    total = x.to(torch.float32) if onto is None else onto + x
    position = int((~total.isfinite()).nonzero()[0])
    value = x[position].to(torch.float32)
    if value.isfinite():
        value, what = total[position], "the residual with the update added"
    if layout is None:
        place = f"in element {position}"
    else:
        entry = layout.entry_at(position)
        place = f"in tensor '{entry.name}', element {position - entry.offset}"
    error = NonFiniteError(f"{what} is {value.item()} {place}; lower --lr or set --clip")
    error.position = position
    return error


def _check_dense(x: Tensor) -> None:
    """Raise ConfigError unless x is a tensor that holds all of its numbers."""
    if isinstance(x, Tensor) and x.layout == torch.strided and not x.is_meta:
        return
    if not isinstance(x, Tensor):
        given = f"a {type(x).__name__}"
    else:
        given = "a tensor on the meta device" if x.is_meta else f"one of layout {x.layout}"
    raise ConfigError(
        f"a codec takes a dense torch tensor; given {given}, give a torch tensor that holds its numbers"
    )
