"""Which sizes call for compiled loops. numba is imported when the first large array comes, not before."""

import functools

LARGE = 100_000  # elements of a vector from which compiled loops repay the import
MANY = 1_000  # selected positions from which they do


def compile_vector(numel: int) -> bool:
    """Whether a vector of this size goes to the compiled loops: it is large, and there is numba."""
    return numel >= max(LARGE, 1) and _numba_imports()


def compile_positions(count: int) -> bool:
    """Whether work for so many Rice-coded positions goes to the compiled loops: there is much of it, and there is numba."""
    return count >= MANY and _numba_imports()


@functools.cache
def _numba_imports() -> bool:
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True
