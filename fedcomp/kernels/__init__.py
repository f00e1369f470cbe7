"""Array loops: numba for large CPU vectors, numpy for small ones, torch operations on other devices; all give the same results."""

from . import bits, rice
from .bits import Signs, pack_signs, pack_signs_runs, read_signs, unpack_signs
from .select import (
    at_least,
    at_least_added,
    at_least_rows,
    first_nonfinite,
    first_nonfinite_rows,
    mean,
    means,
    top_k,
    top_k_added,
    top_k_rows,
    top_side,
    top_side_added,
    top_side_rows,
)
from .sparse import add_all_at, add_at, add_at_each, all_finite
from .sums import norm1, norm1_rows, norm2, norm2_rows

__all__ = [
    "Signs",
    "add_all_at",
    "add_at",
    "add_at_each",
    "all_finite",
    "at_least",
    "at_least_added",
    "at_least_rows",
    "bits",
    "first_nonfinite",
    "first_nonfinite_rows",
    "mean",
    "means",
    "norm1",
    "norm1_rows",
    "norm2",
    "norm2_rows",
    "pack_signs",
    "pack_signs_runs",
    "read_signs",
    "rice",
    "top_k",
    "top_k_added",
    "top_k_rows",
    "top_side",
    "top_side_added",
    "top_side_rows",
    "unpack_signs",
]
