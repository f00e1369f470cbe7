"""Array operations. They use numpy on the CPU. On other devices, they use torch, or copy the vector to the CPU. Loops that would be too
slow in numpy are compiled by numba. Numba is only imported when such a loop is called.

Results have the same bits on every machine and device and with any number of threads. Exceptions are the kernels for local training
(pooled.py, regression.py), whose results can differ between machines.
"""

from . import bits, rice
from .bits import pack_signs, sign_values, unpack_signs
from .parallel import Rows, are_large, split_runs, stacked
from .select import Chosen, add_finite, are_finite, at_least, means, top_k, top_side, values_at
from .sparse import add_all_at, all_finite
from .sums import norm1, norm1_rows, norm2

__all__ = [
    "Chosen",
    "Rows",
    "add_all_at",
    "add_finite",
    "all_finite",
    "are_finite",
    "are_large",
    "at_least",
    "bits",
    "means",
    "norm1",
    "norm1_rows",
    "norm2",
    "pack_signs",
    "rice",
    "sign_values",
    "split_runs",
    "stacked",
    "top_k",
    "top_side",
    "unpack_signs",
    "values_at",
]
