"""The state folder of a client: vectors and bytes are loaded as they were saved, or the file is reported as damaged."""

import pytest
import torch

from fedcomp.errors import CheckpointError, UserError
from fedcomp.state_folder import FILE, StateFolder

KEPT = {"weights": torch.arange(5.0), "none": torch.empty(0), "head": b"\x00{}", "nothing": b""}


@pytest.fixture
def folder(tmp_path):
    folder = StateFolder(tmp_path / "state")
    yield folder
    folder.close()


def test_vectors_and_bytes_are_loaded_as_saved(folder):
    assert folder.load() == {}
    folder.save(KEPT)
    found = folder.load()
    assert found.keys() == KEPT.keys() and found["head"] == KEPT["head"]
    assert found["nothing"] == b"" and torch.equal(found["weights"], KEPT["weights"])
    assert found["none"].shape == (0,)


def test_a_damaged_vector_or_value_is_noticed(folder):
    folder.save(KEPT)
    path = folder.path / FILE
    whole = path.read_bytes()
    for i in range(len(whole) - 4 * 5 - 3, len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        with pytest.raises(CheckpointError, match="is damaged"):
            folder.load()
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="is damaged"):
        folder.load()


def test_a_folder_belongs_to_one_client(folder):
    with pytest.raises(UserError, match="another client uses"):
        StateFolder(folder.path)
