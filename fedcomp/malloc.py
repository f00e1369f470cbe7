"""Settings of glibc's memory allocator. The functions have no effect with another C library."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # parameters of mallopt
LARGE_BYTES = 256 << 10  # model vectors of at least this size get their own memory mappings
MAX_KEPT_BYTES = (
    32 << 20
)  # freed allocations of at least this size are always returned to the system


def keep_freed_memory(threads: bool = False, vector_bytes: int = 0) -> None:
    """Let the allocator keep freed memory, so that the next training step does not request it from the system again.

    `threads`: let all threads share one arena (heap), so that a thread can reuse memory that another thread freed. `vector_bytes`: size of
    a vector with all parameters of the model, or 0 if unknown. Vectors of LARGE_BYTES or more would fragment the heap. Therefore, each such
    vector has its own memory mapping, which is returned to the system when the vector is freed.
    """
    mapped_from = vector_bytes if vector_bytes >= LARGE_BYTES else MAX_KEPT_BYTES
    _set(M_MMAP_THRESHOLD, min(MAX_KEPT_BYTES, mapped_from))
    _set(M_TRIM_THRESHOLD, 512 << 20)
    if threads:
        _set(M_ARENA_MAX, 1)


def share_freed_memory() -> None:
    """Let all threads that start later share one arena (heap).

    By default, each thread of gRPC has its own arena. An arena can keep up to 64 MB of freed memory, for example after a client has sent a
    flood of HTTP/2 headers.
    """
    _set(M_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Return unused pages of the heap to the system."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _set(parameter: int, value: int) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(parameter, value)
