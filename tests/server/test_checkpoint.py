"""A checkpoint is whole or is not there; it costs what changed."""

import os
import shutil
import threading

import numpy as np
import pytest
import torch

from fedcomp.errors import CheckpointError
from fedcomp.server import checkpoint as module
from fedcomp.server.broadcasts import Broadcast
from fedcomp.server.checkpoint import ROWS, STATE, Checkpoint

NUMEL = 1000


def row(value: float) -> torch.Tensor:
    return torch.full((NUMEL,), value)


@pytest.fixture
def store(tmp_path):
    opened = Checkpoint(tmp_path, NUMEL, flush_every_s=0.0)
    yield opened
    opened.close()


def reopened(store: Checkpoint) -> Checkpoint:
    store.close()
    store.__init__(store.folder, NUMEL, store.flush_every_s)
    return store


def test_vectors_values_and_broadcasts_come_back(store):
    vector = torch.randn(NUMEL)
    cache = [
        Broadcast(round, f"v{round - 1}", f"v{round}", bytes([round]) * round)
        for round in (3, 4, 5)
    ]
    store.save({"weights": vector}, {"run": b"{}", "client/1": b"a", "client/12": b"b"}, cache)
    store = reopened(store)
    assert torch.equal(store.vector("weights"), vector)
    assert (
        store.value("run") == b"{}"
        and store.value("absent") is None
        and store.vector("absent") is None
    )
    assert store.values("client/") == {"1": b"a", "12": b"b"}
    assert store.broadcasts(until=5) == cache and store.broadcasts(until=4) == cache[:2]


def test_a_value_of_none_is_forgotten_and_old_broadcasts_too(store):
    store.save({}, {"a": b"1", "b": b"2"}, [Broadcast(1, "x", "y", b"1")])
    store.save({}, {"a": None}, [Broadcast(2, "y", "z", b"2")], oldest=2)
    assert (store.value("a"), store.value("b")) == (None, b"2")
    assert [b.round for b in store.broadcasts(until=9)] == [2]


def test_a_broadcast_made_again_after_a_kill_replaces_the_first(store):
    store.add_broadcast(Broadcast(1, "x", "y", b"frame"))
    store.add_broadcast(Broadcast(1, "x", "y", b"frame"))
    assert len(store.broadcasts(until=1)) == 1


@pytest.mark.parametrize("moment", ["pwrite", "fdatasync"])
def test_a_failure_before_the_end_leaves_the_last_checkpoint_whole(store, monkeypatch, moment):
    store.save({name: row(1.0) for name in "abc"}, {"round": b"1"})

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, moment, full)
    with pytest.raises(CheckpointError, match="No space left"):
        store.save({name: row(2.0) for name in "abc"}, {"round": b"2"})
    monkeypatch.undo()
    store = reopened(store)
    assert store.value("round") == b"1"
    assert all(torch.equal(store.vector(name), row(1.0)) for name in "abc")


def test_disk_space_is_what_is_alive_and_one_checkpoint(store):
    for round in range(50):
        store.save({f"client/{(round + i) % 10}": row(float(round)) for i in range(3)}, {})
    assert os.path.getsize(store.folder / ROWS) <= (10 + 3) * 4 * NUMEL


@pytest.mark.parametrize("wrong", [torch.zeros(NUMEL, dtype=torch.int64), torch.zeros(NUMEL + 1)])
def test_a_vector_that_would_run_into_the_next_slot_is_refused(store, wrong):
    with pytest.raises(ValueError, match="float32 vectors of 1000"):
        store.save({"a": wrong}, {})


def test_slots_replaced_since_the_last_flush_are_not_written_over(store):
    store.save({"a": row(1.0)}, {"round": b"1"})
    flushed = store.slots["a"]
    store.flush_every_s = 1e9
    for round in range(2, 9):
        store.save({"a": row(float(round))}, {"round": str(round).encode()})
        assert flushed not in store.free and store.slots["a"] != flushed
    store.flush_every_s = 0.0
    store.save({"a": row(9.0)}, {"round": b"9"})
    assert flushed in store.free and torch.equal(store.vector("a"), row(9.0))


def test_vectors_that_did_not_change_are_not_written_again(store):
    store.save({"a": row(1.0), "b": row(2.0)}, {})
    slot = store.slots["a"]
    store.save({"b": row(3.0)}, {})
    assert store.slots["a"] == slot and torch.equal(store.vector("a"), row(1.0))


def test_damage_is_noticed(store):
    store.save({"a": row(1.0)}, {})
    with open(store.folder / ROWS, "r+b") as file:
        file.seek(17)
        file.write(b"\xff")
    with pytest.raises(CheckpointError, match="damaged"):
        store.vector("a")


def test_a_file_that_is_no_database_is_one_sentence(tmp_path):
    (tmp_path / STATE).write_bytes(b"garbage" * 1000)
    with pytest.raises(CheckpointError, match="damaged"):
        Checkpoint(tmp_path, NUMEL)


def test_what_is_staged_is_read_back_at_once_and_is_gone_after_a_kill(store):
    store.save({"a": row(1.0)}, {"client/a": b"1"})
    store.stage({"a": row(2.0), "b": row(3.0)}, {"client/a": b"2", "client/b": b"3"})
    assert [store.vector(name)[0] for name in "ab"] == [2.0, 3.0] and store.value(
        "client/b"
    ) == b"3"
    store = reopened(store)
    assert store.vector("a")[0] == 1.0 and store.vector("b") is None
    assert store.value("client/a") == b"1" and store.value("client/b") is None


def test_the_next_checkpoint_names_what_is_staged_without_writing_it_again(store, monkeypatch):
    store.save({"a": row(1.0)}, {})
    store.stage({"a": row(2.0), "b": row(3.0)}, {"client/a": b"2"})
    store.stage({"a": row(4.0)}, {"client/a": b"4"})
    written, pwrite = [], os.pwrite
    monkeypatch.setattr(
        module.os,
        "pwrite",
        lambda file, data, offset: written.append(offset) or pwrite(file, data, offset),
    )
    store.save({"weights": row(5.0)}, {"run": b"{}"})
    monkeypatch.undo()
    assert len(written) == 1 and not store.staged
    store = reopened(store)
    assert [store.vector(name)[0] for name in ("a", "b", "weights")] == [
        4.0,
        3.0,
        5.0,
    ] and store.value("client/a") == b"4"


def test_what_is_saved_is_newer_than_what_was_staged(store):
    store.stage({"a": row(1.0), "b": row(1.0)}, {"client/a": b"1", "client/b": b"1"})
    store.save({"a": row(2.0)}, {"client/a": b"2"})
    store = reopened(store)
    assert store.vector("a")[0] == 2.0 and store.vector("b")[0] == 1.0
    assert store.value("client/a") == b"2" and store.value("client/b") == b"1"


def test_a_full_disk_while_staging_leaves_everything_as_it_was(store, monkeypatch):
    store.save({"a": row(1.0)}, {"client/a": b"1"})
    store.stage({"a": row(2.0)}, {"client/a": b"2"})
    free = sorted(store.free)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "pwrite", full)
    with pytest.raises(CheckpointError, match=r"No space left.*go on with --resume"):
        store.stage({"a": row(3.0)}, {"client/a": b"3"})
    monkeypatch.undo()
    assert store.vector("a")[0] == 2.0 and set(free) <= set(store.free)
    store.save({}, {"run": b"{}"})
    assert reopened(store).vector("a")[0] == 2.0


def test_staging_again_and_again_takes_no_more_room(store):
    for round in range(20):
        for _ in range(5):
            store.stage({name: row(float(round)) for name in "abc"}, {})
        store.save({"weights": row(0.0)}, {})
    assert os.path.getsize(store.folder / ROWS) <= 2 * (3 + 1) * 4 * NUMEL + 3 * 4 * NUMEL
    assert (
        len({slot for slot in [*store.slots.values(), *store.free]})
        == store.end
        == len(store.slots) + len(store.free)
    )


# Written behind.


@pytest.fixture
def any_size(monkeypatch):
    monkeypatch.setattr(module, "LEAST_BEHIND", 0)


@pytest.fixture
def behind(tmp_path, any_size):
    opened = Checkpoint(tmp_path, NUMEL, flush_every_s=0.0, behind=True)
    yield opened
    opened.close()


@pytest.fixture
def slow(monkeypatch):
    """Writing waits until the event is set."""
    may, pwrite = threading.Event(), os.pwrite
    monkeypatch.setattr(module.os, "pwrite", lambda *given: may.wait(30) and pwrite(*given))
    yield may
    may.set()


def test_written_behind_a_checkpoint_is_what_vectors_were_when_it_was_saved(behind, slow):
    vector = row(1.0)
    behind.save({"a": vector}, {"round": b"1"})
    vector.fill_(2.0)
    slow.set()
    assert torch.equal(behind.vector("a"), row(1.0)) and behind.value("round") == b"1"
    behind.save({"a": vector}, {"round": b"2"})
    assert torch.equal(behind.vector("a"), row(2.0)) and behind.value("round") == b"2"


def test_while_a_checkpoint_is_written_what_is_not_in_it_can_be_read(behind, monkeypatch):
    behind.save({"a": row(1.0)}, {"x": b"1"})
    behind.settle()
    may, pwrite = threading.Event(), os.pwrite
    monkeypatch.setattr(module.os, "pwrite", lambda *given: may.wait(30) and pwrite(*given))
    behind.save({"b": row(2.0)}, {})
    assert torch.equal(behind.vector("a"), row(1.0)) and behind.value("x") == b"1"
    may.set()
    assert torch.equal(behind.vector("b"), row(2.0))


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(behind, slow, tmp_path):
    slow.set()
    behind.save({"a": row(1.0)}, {"round": b"1"})
    behind.settle()
    slow.clear()
    behind.save({"a": row(2.0)}, {"round": b"2"})
    copied = tmp_path / "as it was"
    shutil.copytree(tmp_path, copied, ignore=shutil.ignore_patterns("as it was"))
    slow.set()
    found = Checkpoint(copied, NUMEL)
    assert torch.equal(found.vector("a"), row(1.0)) and found.value("round") == b"1"
    found.close()


def test_what_could_not_be_written_behind_is_told_by_the_next_call(tmp_path, any_size, monkeypatch):
    store = Checkpoint(tmp_path, NUMEL, flush_every_s=0.0, behind=True)
    store.save({"a": row(1.0)}, {"round": b"1"})
    store.settle()

    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "pwrite", full)
    store.save({"a": row(2.0)}, {"round": b"2"})
    with pytest.raises(CheckpointError, match="No space left"):
        store.save({"a": row(3.0)}, {"round": b"3"})
    with pytest.raises(CheckpointError, match="No space left"):
        store.close()
    monkeypatch.undo()
    found = Checkpoint(tmp_path, NUMEL)
    assert torch.equal(found.vector("a"), row(1.0)) and found.value("round") == b"1"
    found.close()


@pytest.mark.parametrize(
    ("least", "most"), [(0, 4 * NUMEL), (9 * NUMEL, 99 * NUMEL)], ids=["much", "little"]
)
def test_what_is_too_much_to_be_copied_or_too_little_for_a_thread_is_written_at_once(
    behind, monkeypatch, least, most
):
    monkeypatch.setattr(module, "LEAST_BEHIND", least)
    monkeypatch.setattr(module, "MOST_BEHIND", most)
    threads, pwrite = set(), os.pwrite
    monkeypatch.setattr(
        module.os,
        "pwrite",
        lambda *given: threads.add(threading.current_thread()) or pwrite(*given),
    )
    behind.save({name: row(1.0) for name in "ab"}, {})
    assert threads == {threading.main_thread()}
    assert torch.equal(behind.vector("b"), row(1.0))


def test_a_value_that_never_was_is_not_looked_for(store):
    store.save({}, {"client/1": b"a", "client/2": b"b"})
    store.save({}, {"client/2": None})
    asked = []
    store.state.set_trace_callback(asked.append)
    assert store.value("client/3") is None and not asked
    assert store.value("client/1") == b"a" and store.value("client/2") is None and asked
    store.state.set_trace_callback(None)
    store = reopened(store)
    assert store.value("client/1") == b"a" and store.value("client/2") is None


@pytest.mark.parametrize("numel", [3, 20_000, 0])
def test_vectors_in_slots_that_follow_one_another_or_do_not_are_read_back(tmp_path, numel):
    """Slots are given back in any order, and small vectors are written many at a time: those of 3 elements by the thousand."""
    checkpoint, rng = (
        Checkpoint(tmp_path / "checkpoint", numel, flush_every_s=0),
        np.random.default_rng(0),
    )
    kept = {}
    for _ in range(4):
        for number in rng.choice(
            400 if numel < 10_000 else 12, 300 if numel < 10_000 else 8, replace=False
        ):
            kept[f"v{number}"] = torch.from_numpy(rng.normal(size=numel).astype(np.float32))
        some = {name: kept[name] for name in sorted(kept)[:: int(rng.integers(1, 4))]}
        checkpoint.save(some, {})
        checkpoint.stage({name: kept[name] for name in sorted(kept.keys() - some.keys())[::2]}, {})
        checkpoint.save(kept, {})
        assert all(torch.equal(checkpoint.vector(name), vector) for name, vector in kept.items())
    checkpoint.close()
    again = Checkpoint(tmp_path / "checkpoint", numel)
    assert all(torch.equal(again.vector(name), vector) for name, vector in kept.items())
    again.close()
