"""A cache of decoded arrays, as .npy files in FEDCOMP_CACHE or ~/.cache/fedcomp.

The name of a file contains a hash of the paths, sizes and modification times of its source files, so that changed sources are decoded
again. If the folder cannot be written, the arrays are decoded in every run.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

Arrays = tuple[np.ndarray, ...]


def cache_folder() -> Path | None:
    """Return the folder of the cache; None without FEDCOMP_CACHE and without a home directory."""
    try:
        return Path(
            os.environ.get("FEDCOMP_CACHE") or Path.home() / ".cache" / "fedcomp"
        ).expanduser()
    except RuntimeError:
        return None


def cached_arrays(
    sources: Sequence[Path],
    key: str,
    names: Sequence[str],
    decode: Callable[[], Arrays],
    is_valid: Callable[[Arrays], bool],
) -> Arrays:
    """Return the arrays of `decode()`, one per name. Cached arrays are mapped read-only from disk if `is_valid` returns True for them.

    `key`: the options of the decoding, which are part of the names of the files.
    """
    folder = cache_folder()
    if folder is None:
        return decode()
    digest = _digest(sources, key)
    paths = [folder / f"{digest}-{name}.npy" for name in names]
    cached = _read(paths)
    if cached is not None and is_valid(cached):
        return cached
    arrays = decode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, array in zip(paths, arrays, strict=True):
            _write(path, array)
    except OSError:
        pass  # the disk is full or read-only: the next run decodes again
    return arrays


def _digest(sources: Sequence[Path], key: str) -> str:
    state = [(path.resolve(), path.stat()) for path in sources]
    text = "\n".join([key, *(f"{path}:{stat.st_size}:{stat.st_mtime_ns}" for path, stat in state)])
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:24]


def _read(paths: Sequence[Path]) -> Arrays | None:
    try:
        return tuple(np.lib.format.open_memmap(path, mode="r") for path in paths)
    except Exception:  # numpy raises various exceptions for a damaged header
        return None


def _write(path: Path, array: np.ndarray) -> None:
    """Write a file atomically, so that other processes read the whole file or none."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            np.save(file, array, allow_pickle=False)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
