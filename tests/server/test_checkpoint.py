"""Checkpoints: each save is complete or has no effect, and staged entries become part of the next checkpoint."""

import gc
import os
import shutil
import sqlite3
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import for_each

from fedcomp.errors import CheckpointError
from fedcomp.server import checkpoint as module
from fedcomp.server.broadcasts import Broadcast
from fedcomp.server.checkpoint import FILE_BYTES, FILES, STATE, Checkpoint

SIZES = 1000, FILE_BYTES // 4  # elements of a vector in the database, and of one in a file


def row(value: float, numel: int = SIZES[0]) -> torch.Tensor:
    return torch.full((numel,), float(value))


@pytest.fixture
def store(tmp_path):
    opened = Checkpoint(tmp_path / "checkpoint")
    yield opened
    opened.close()


def reopened(store: Checkpoint) -> Checkpoint:
    store.close()
    store.__init__(store.folder)
    return store


def files(store: Checkpoint) -> list[str]:
    return sorted(os.listdir(store.folder / FILES))


def full(*arguments, **keywords):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("numel", [0, *SIZES])
def test_vectors_values_and_broadcasts_can_be_read_after_a_restart(store, numel):
    vector = torch.randn(numel)
    cache = [
        Broadcast(round, f"v{round - 1}", f"v{round}", bytes([round]) * (4 * numel + round))
        for round in (3, 4, 5)
    ]
    large = os.urandom(4 * numel)
    store.save({"weights": vector}, {"run": b"{}", "a/1": b"a", "a/12": b"b", "b": large}, cache)
    store = reopened(store)
    assert torch.equal(store.vector("weights"), vector)
    assert store.value("run") == b"{}" and store.value("b") == large
    assert store.value("absent") is None and store.vector("absent") is None
    assert store.values("a/") == {"1": b"a", "12": b"b"}
    assert store.broadcasts(until=5) == cache and store.broadcasts(until=4) == cache[:2]


@pytest.mark.parametrize("numel", SIZES)
def test_replaced_and_removed_entries_leave_no_files(store, numel):
    for round in range(20):
        broadcast = Broadcast(round, f"{round}", f"{round + 1}", bytes(4 * numel))
        store.save({"a": row(round, numel)}, {"b": bytes(4 * numel)}, [broadcast], oldest=round)
    store.save({}, {"b": None}, oldest=20)
    assert torch.equal(store.vector("a"), row(19.0, numel)) and store.value("b") is None
    assert store.broadcasts(until=99) == []
    assert len(files(store)) == (numel == SIZES[1])


def test_unchanged_vectors_are_not_written_again(store):
    store.save({"a": row(1.0, SIZES[1]), "b": row(2.0, SIZES[1])}, {})
    before = files(store)
    store.save({"b": row(3.0, SIZES[1])}, {})
    assert len({*before} & {*files(store)}) == 1
    assert store.vector("a")[0] == 1.0 and store.vector("b")[0] == 3.0


@for_each("moment", ["save_file", "flush"])
def test_a_save_that_fails_leaves_the_previous_checkpoint(tmp_path, monkeypatch, moment):
    store = Checkpoint(tmp_path / moment)
    store.save({name: row(1.0, SIZES[1]) for name in "abc"}, {"round": b"1"})
    with monkeypatch.context() as patched:
        patched.setattr(module, moment, full)
        with pytest.raises(CheckpointError, match=r"No space left.*continue with --resume"):
            store.save({name: row(2.0, SIZES[1]) for name in "abc"}, {"round": b"2"})
    store = reopened(store)
    assert store.value("round") == b"1" and len(files(store)) == 3
    assert all(torch.equal(store.vector(name), row(1.0, SIZES[1])) for name in "abc")
    store.close()


def test_a_copy_made_at_any_moment_of_a_save_holds_the_old_state_or_the_new(tmp_path, monkeypatch):
    """A copy of the folder at a step of the save is its state after a kill or a power failure at this step."""
    store, copies = Checkpoint(tmp_path / "store"), []
    store.save({"a": row(1.0, SIZES[1])}, {"round": b"1"}, [Broadcast(1, "x", "y", b"1")])

    def copying(step):
        def stepped(*given, **named):
            for moment in ("before", "after"):
                copies.append(tmp_path / f"{len(copies)} {moment}")
                shutil.copytree(store.folder, copies[-1])
                if moment == "before":
                    step(*given, **named)

        return stepped

    for name in ("save_file", "flush"):
        monkeypatch.setattr(module, name, copying(getattr(module, name)))
    store.save({"a": row(2.0, SIZES[1])}, {"round": b"2"}, [Broadcast(2, "y", "z", b"2")])
    monkeypatch.undo()
    store.close()
    assert len(copies) > 5
    for copy in copies:
        found = Checkpoint(copy)
        assert found.value("round") == b"1" and found.vector("a")[0] == 1.0
        assert [b.round for b in found.broadcasts(9)] == [1] and len(files(found)) == 1
        found.close()


@pytest.mark.parametrize("numel", SIZES)
def test_staged_entries_are_read_at_once_and_lost_after_a_kill(store, numel):
    store.save({"a": row(1.0, numel)}, {"client/a": b"1"})
    store.stage({"a": row(2.0, numel), "b": row(3.0, numel)}, {"client/a": b"2", "client/b": b"3"})
    assert [store.vector(name)[0] for name in "ab"] == [2.0, 3.0]
    assert store.value("client/b") == b"3"
    store = reopened(store)
    assert store.vector("a")[0] == 1.0 and store.vector("b") is None
    assert store.value("client/a") == b"1" and store.value("client/b") is None


@pytest.mark.parametrize("numel", SIZES)
def test_staged_vectors_are_freed_from_memory(store, numel):
    vector = row(1.0, numel)
    freed = weakref.ref(vector)
    store.stage({"a": vector}, {})
    del vector
    store.close()  # ends the thread, which may still refer to the vector
    gc.collect()
    assert freed() is None


@pytest.mark.parametrize("numel", SIZES)
def test_the_next_save_makes_staged_entries_part_of_the_checkpoint(store, numel, monkeypatch):
    store.save({"a": row(1.0, numel)}, {})
    store.stage({"a": row(2.0, numel), "b": row(3.0, numel)}, {"client/a": b"2"})
    store.stage({"a": row(4.0, numel)}, {"client/a": b"4"})
    assert store.vector("a")[0] == 4.0  # waits until the staged entries are written
    with monkeypatch.context() as patched:
        patched.setattr(module, "save_file", full)  # nothing large is written again
        store.save({"weights": row(5.0)}, {"run": b"{}"})
    store = reopened(store)
    assert [store.vector(name)[0] for name in ("a", "b", "weights")] == [4.0, 3.0, 5.0]
    assert store.value("client/a") == b"4"
    assert len(files(store)) == (2 if numel == SIZES[1] else 0)


@pytest.mark.parametrize("numel", SIZES)
def test_a_saved_entry_replaces_a_staged_one(store, numel):
    store.stage({"a": row(1.0, numel), "b": row(1.0, numel)}, {"client/a": b"1", "client/b": b"1"})
    store.save({"a": row(2.0, numel)}, {"client/a": b"2"})
    store = reopened(store)
    assert store.vector("a")[0] == 2.0 and store.vector("b")[0] == 1.0
    assert store.value("client/a") == b"2" and store.value("client/b") == b"1"


def test_a_full_disk_while_staging_leaves_the_previous_checkpoint(store, monkeypatch):
    numel = SIZES[1]
    store.save({"a": row(1.0, numel)}, {"client/a": b"1"})
    with monkeypatch.context() as patched:
        patched.setattr(module, "save_file", full)
        store.stage({"a": row(3.0, numel)}, {"client/a": b"3"})
        for call in (
            lambda: store.vector("a"),
            lambda: store.stage({}, {}),
            lambda: store.save({}, {"run": b"{}"}),
        ):
            with pytest.raises(CheckpointError, match=r"No space left.*continue with --resume"):
                call()
    store = reopened(store)
    assert store.vector("a")[0] == 1.0 and store.value("client/a") == b"1"


def test_vectors_can_be_read_while_others_are_written(store):
    """A simulation prefetches clients in a thread."""
    numel, wrong, over = SIZES[1], [], threading.Event()
    store.save({f"{i}": row(i, numel) for i in range(4)}, {})

    def read():
        while not over.is_set():
            for i in range(4):
                vector = store.vector(f"{i}")
                if not bool((vector == vector[0]).all()) or vector[0] % 4 != i:
                    wrong.append(vector)

    reader = threading.Thread(target=read)
    reader.start()
    for round in range(1, 6):
        store.save({f"{i}": row(i + 4 * round, numel) for i in range(4)}, {})
        store.stage({f"{i}": row(i + 4 * round, numel) for i in range(4)}, {})
    over.set()
    reader.join()
    assert not wrong


def test_vectors_of_other_types_than_float32_are_refused(store):
    with pytest.raises(ValueError, match="float32 vectors, but 'a' is"):
        store.save({"a": torch.zeros(3, dtype=torch.int64)}, {})


def damage_database(folder: Path) -> None:
    (folder / STATE).write_bytes(b"garbage" * 1000)


def shorten_file(folder: Path) -> None:
    (path,) = (folder / FILES).iterdir()
    os.truncate(path, 100)


def remove_file(folder: Path) -> None:
    (path,) = (folder / FILES).iterdir()
    path.unlink()


@for_each("damage", [damage_database, shorten_file, remove_file])
def test_a_damaged_checkpoint_is_one_error_message(tmp_path, damage):
    folder = tmp_path / damage.__name__
    store = Checkpoint(folder)
    store.save({"a": torch.from_numpy(np.zeros(SIZES[1], np.float32))}, {})
    store.close()
    damage(folder)
    with pytest.raises(CheckpointError, match="is damaged .*start a new run with another --out"):
        Checkpoint(folder).vector("a")


def test_a_checkpoint_of_another_version_is_refused_and_left_as_it_is(tmp_path):
    with sqlite3.connect(tmp_path / STATE) as older:
        older.execute("CREATE TABLE broadcast (round INTEGER PRIMARY KEY, frame BLOB)")
        older.execute("INSERT INTO broadcast VALUES (1, 'x')")
    before = (tmp_path / STATE).read_bytes()
    with pytest.raises(CheckpointError, match="written by another version of fedcomp; continue"):
        Checkpoint(tmp_path)
    assert (tmp_path / STATE).read_bytes() == before and os.listdir(tmp_path) == [STATE]
