"""Compiled loops are cached on disk, and are compiled again if a file that they use has changed."""

import sys
from collections.abc import Iterator
from importlib import import_module, invalidate_caches
from pathlib import Path
from shutil import copytree, ignore_patterns

import numpy as np
import pytest

import fedcomp

COPY = "copy_of_fedcomp"


def forget_copy() -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == COPY]:
        del sys.modules[module]
    invalidate_caches()


def cells() -> tuple[int, bytes]:
    """Import the copy of fedcomp again and compute a sketch. Return the number of loops that were loaded from the cache, and the cells."""
    forget_copy()
    add = import_module(f"{COPY}.kernels.sketch_loops").add
    found = np.zeros(64, np.float32)
    add(np.ones(100, np.float32), 0, 1, 2, 3, found)
    return sum(add.stats.cache_hits.values()), found.tobytes()


@pytest.fixture
def copied(tmp_path, monkeypatch) -> Iterator[Path]:
    folder = tmp_path / COPY
    copytree(Path(fedcomp.__file__).parent, folder, ignore=ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    forget_copy()


def test_loops_are_compiled_again_if_an_imported_file_has_changed(copied):
    first = cells()
    assert first[0] == 0 and cells() == (1, first[1])
    # Defines random words that kernels/sketch_loops.py imports.
    loops = copied / "kernels" / "loops.py"
    text = loops.read_text()
    assert "0xD2511F53" in text
    loops.write_text(text.replace("0xD2511F53", "0xD2511F55"))
    hits, found = cells()
    assert hits == 0 and found != first[1]
    assert len(list((copied / "kernels" / "__pycache__").glob("numba-*"))) == 1
