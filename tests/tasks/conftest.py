import os
import tempfile
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def kept_arrays(tmp_path_factory):
    """Decoded images are kept for the session, away from the home of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDCOMP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def one_thread():
    """Steps on small batches wait for each other's threads on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def write_task(tmp_path):
    """Writes a user's task file, and gives what --task is then called with."""

    def write(text: str, name: str = "task", file: str = "mine.py") -> str:
        path = tmp_path / file
        path.write_text(text)
        return f"{path}:{name}"

    return write


@pytest.fixture
def unprivileged():
    """A folder of somebody for whom permissions count, which is who the test then runs as."""
    me = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        if me == 0:
            os.chown(folder, 65534, -1)
            os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            os.seteuid(me)
