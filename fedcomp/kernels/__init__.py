"""Array loops: numba for large CPU vectors, numpy for small ones, torch operations on other devices; all give the same results."""

from . import bits, rice
from .bits import Signs, pack_signs, pack_signs_runs, read_signs, unpack_signs
from .rows import Rows, are_large, stacked
from .select import (
    Chosen,
    add_finite,
    are_finite,
    at_least,
    first_nonfinite,
    means,
    nonfinite,
    top_k,
    top_side,
    values_at,
)
from .sparse import add_all_at, add_at, all_finite
from .sums import norm1, norm1_rows, norm2

__all__ = [
    "Chosen",
    "Rows",
    "Signs",
    "add_all_at",
    "add_at",
    "add_finite",
    "all_finite",
    "are_finite",
    "are_large",
    "at_least",
    "bits",
    "first_nonfinite",
    "means",
    "nonfinite",
    "norm1",
    "norm1_rows",
    "norm2",
    "pack_signs",
    "pack_signs_runs",
    "read_signs",
    "rice",
    "stacked",
    "top_k",
    "top_side",
    "unpack_signs",
    "values_at",
]
