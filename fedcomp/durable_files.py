"""Atomic file writes: a file is written under a temporary name with its final permissions, flushed to disk, and then renamed."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


def write_new(path: Path, data: Sequence[bytes | memoryview], mode: int) -> None:
    """Write the parts in `data`, one after the other, to a new file, and flush the file to disk.

    The file has the permissions `mode`, which the umask may restrict. Raises FileExistsError if the path exists.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(path, flags, mode), "wb") as file:
        file.writelines(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: Sequence[bytes | memoryview], mode: int) -> None:
    """Replace a file atomically. If the process is killed at any moment, `path` contains either the previous or the new content."""
    with replacing(path) as temporary:
        write_new(temporary, data, mode)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path. The `with` block must write a file there and flush it to disk; the file then atomically replaces `path`."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)  # a process that was killed may have left this file
    yield temporary
    os.replace(temporary, path)
    flush(path.parent)


def flush(path: Path, keep_cached: bool = True) -> None:
    """Flush a file to disk. For a folder, flush its list of files.

    With `keep_cached=False`, ask the operating system to drop the file from its page cache, so that the next file that is written can use
    the same memory. In a virtual machine, this makes writing up to three times as fast.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if not keep_cached and hasattr(os, "posix_fadvise"):  # not on macOS
            with suppress(OSError):  # some file systems do not support this call
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
