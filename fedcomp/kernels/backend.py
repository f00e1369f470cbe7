"""Which sizes call for compiled loops. numba is imported when the first large array comes, not before."""

import functools

LARGE = 100_000  # elements of a vector from which compiled loops repay the import
MANY = 10_000  # selected positions from which they do
SOME, WORK = 300, 20_000_000  # so many at a time do, once a process has met so many
LANES = 16  # floats in a vector of compiled loops: two of AVX2's, one of AVX-512's


def compile_vector(numel: int) -> bool:
    """Whether a vector of this size goes to the compiled loops: it is large, and there is numba."""
    return numel >= max(LARGE, 1) and _numba_imports()


def compile_positions(count: int) -> bool:
    """Whether work for so many Rice-coded positions goes to the compiled loops: there is much of it, or there was in all."""
    global _met
    _met += count
    return (count >= MANY or (count >= SOME and _met >= WORK)) and _numba_imports()


def compile_values(numel: int) -> bool:
    """Whether so many values go to the compiled loops: they are many, or loops are in use for positions anyway."""
    return compile_vector(numel) or (numel >= SOME and _met >= WORK and _numba_imports())


_met = 0  # positions that were asked about


@functools.cache
def _numba_imports() -> bool:
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True
