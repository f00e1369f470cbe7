"""Compiled loops are cached on disk, and are compiled again if a file that they use has changed."""

import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

import fedcomp

ADD = """
import numpy as np
from fedcomp.kernels import sketch_loops
cells = np.zeros(64, np.float32)
sketch_loops.add(np.ones(100, np.float32), 0, 1, 2, 3, cells)
print(sum(sketch_loops.add.stats.cache_hits.values()), cells.tobytes().hex())
"""


def cells(folder: Path) -> tuple[str, str]:
    """Compute a sketch in a new process. Return the number of loops that were loaded from the cache, and the cells."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", ADD]
    done = subprocess.run(
        command, env=environment, cwd=folder, check=True, capture_output=True, text=True
    )
    hits, found = done.stdout.split()
    return hits, found


@pytest.mark.slow
def test_loops_are_compiled_again_if_an_imported_file_has_changed(tmp_path):
    copied = tmp_path / "fedcomp"
    copytree(Path(fedcomp.__file__).parent, copied, ignore=ignore_patterns("__pycache__"))
    first = cells(tmp_path)
    assert first[0] == "0" and cells(tmp_path) == ("1", first[1])
    # Defines random words that kernels/sketch_loops.py imports.
    loops = copied / "kernels" / "loops.py"
    text = loops.read_text()
    assert "0xD2511F53" in text
    loops.write_text(text.replace("0xD2511F53", "0xD2511F55"))
    hits, found = cells(tmp_path)
    assert hits == "0" and found != first[1]
    assert len(list((copied / "kernels" / "__pycache__").glob("numba-*"))) == 1
