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
