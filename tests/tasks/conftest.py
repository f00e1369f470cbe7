import os
import tempfile
from pathlib import Path

import pytest
import torch


@pytest.fixture
def one_thread():
    """Run torch in one thread. On a busy machine, several threads would often wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def write_task(tmp_path):
    """Return a function that writes a user's task file and returns the value of --task for it."""

    def write(text: str, name: str = "task", file: str = "mine.py") -> str:
        path = tmp_path / file
        path.write_text(text)
        return f"{path}:{name}"

    return write


@pytest.fixture
def unprivileged():
    """Run the test as a user without root permissions, and return a folder of this user."""
    me = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        if me == 0:
            os.chown(folder, 65534, -1)
            os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            os.seteuid(me)
