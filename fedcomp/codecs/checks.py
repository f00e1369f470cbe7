"""Checks of the vectors that callers pass to codecs and memories."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import kernels
from ..errors import ConfigError, NonFiniteError
from ..kernels import Rows
from ..layout import Layout

PRECISIONS = (torch.float32, torch.float16, torch.bfloat16)


def check_vector(x: Tensor, layout: Layout | None = None) -> None:
    """Raise ConfigError unless x is a dense vector of one dimension in one of PRECISIONS, with the size of the layout."""
    _check_dense(x)
    if x.dim() != 1:
        raise ConfigError(
            f"a codec encodes a vector of one dimension; x has the shape {list(x.shape)}"
        )
    if x.dtype not in PRECISIONS:
        raise ConfigError(
            f"a codec encodes float32, float16 or bfloat16; x is {x.dtype}, give x.float()"
        )
    if layout is not None and layout.numel != x.numel():
        raise ConfigError(
            f"the layout has {layout.numel} elements and the vector {x.numel()}; give the layout of this model"
        )


def checked_batch(
    x: Rows, seeds: Sequence[int], onto: Sequence[Tensor] | None, layout: Layout | None
) -> Rows:
    """Return the vectors of `Codec.encode_batch`, detached. Raises ConfigError for invalid arguments."""
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


def nonfinite_errors(rows: Rows, layout: Layout | None, what: str) -> list[NonFiniteError | None]:
    """Return an error for each vector that holds NaN or infinity, None for the others. `what`: name of the vectors in the messages."""
    return [
        None if ok else nonfinite_error(row, layout, what=what)
        for row, ok in zip(rows, kernels.are_finite(rows), strict=True)
    ]


def nonfinite_error(
    x: Tensor, layout: Layout | None, onto: Tensor | None = None, what: str = "the update"
) -> NonFiniteError:
    """Return the error for a vector x, or a sum onto + x, that is not finite. Its message has the tensor and the first such element."""
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
    """Raise ConfigError unless x is a dense tensor with storage."""
    if isinstance(x, Tensor) and x.layout == torch.strided and not x.is_meta:
        return
    if not isinstance(x, Tensor):
        given = f"a {type(x).__name__}"
    else:
        given = "a tensor on the meta device" if x.is_meta else f"one of layout {x.layout}"
    raise ConfigError(f"a codec encodes a dense torch tensor; x is {given}, give a dense tensor")
