"""Decoded arrays kept on disk between runs, as .npy files in FEDCOMP_CACHE or ~/.cache/fedcomp.

A file's name is a digest of the paths, sizes and modification times of what it was made from, so a changed source is
decoded again. A folder that cannot be written is no error: the arrays are then made anew in every run.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

Arrays = tuple[np.ndarray, ...]


def folder() -> Path | None:
    """Where arrays are kept; None where there is neither FEDCOMP_CACHE nor a home."""
    try:
        return Path(
            os.environ.get("FEDCOMP_CACHE") or Path.home() / ".cache" / "fedcomp"
        ).expanduser()
    except RuntimeError:
        return None


def arrays(
    sources: Sequence[Path],
    form: str,
    names: Sequence[str],
    make: Callable[[], Arrays],
    fits: Callable[[Arrays], bool],
) -> Arrays:
    """The arrays of `make()`, one per name: mapped read-only from disk if what is kept there `fits`, else made and kept.

    `form` says how they are made from the source files: another form, another entry.
    """
    place = folder()
    if place is None:
        return make()
    digest = _digest(sources, form)
    paths = [place / f"{digest}-{name}.npy" for name in names]
    kept = _read(paths)
    if kept is not None and fits(kept):
        return kept
    made = make()
    try:
        place.mkdir(parents=True, exist_ok=True)
        for path, array in zip(paths, made, strict=True):
            _write(path, array)
    except OSError:
        pass  # a cache on a full or read-only disk is only slower
    return made


def _digest(sources: Sequence[Path], form: str) -> str:
    state = [(path.resolve(), path.stat()) for path in sources]
    text = "\n".join([form, *(f"{path}:{stat.st_size}:{stat.st_mtime_ns}" for path, stat in state)])
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:24]


def _read(paths: Sequence[Path]) -> Arrays | None:
    try:
        return tuple(np.lib.format.open_memmap(path, mode="r") for path in paths)
    except (
        Exception
    ):  # what a damaged header raises is numpy's secret, and arrays can always be made anew
        return None


def _write(path: Path, array: np.ndarray) -> None:
    """Atomically: another process sees the whole file or none."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            np.save(file, array, allow_pickle=False)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
