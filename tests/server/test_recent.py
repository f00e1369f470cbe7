"""What the last checkpoints changed is found wherever it lies, and costs what changed."""

import contextlib
import random
import shutil
import sqlite3
import zlib
from pathlib import Path

import pytest
import torch

from fedcomp.errors import CheckpointError
from fedcomp.server import checkpoint as module
from fedcomp.server import recent
from fedcomp.server.checkpoint import STATE, Checkpoint

NUMEL = 3
NAMES = [f"client/{i}" for i in range(12)]


def killed(store: Checkpoint, beside: Path) -> Checkpoint:
    """What a process finds after another was killed."""
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(store.folder, beside)
    return Checkpoint(beside, NUMEL)


def check(
    store: Checkpoint, vectors: dict[str, torch.Tensor], values: dict[str, bytes | None]
) -> None:
    assert all(torch.equal(store.vector(name), vector) for name, vector in vectors.items())
    assert all(store.value(name) == data for name, data in values.items())
    assert store.values("client/") == {
        name.removeprefix("client/"): data for name, data in values.items() if data is not None
    }


@pytest.mark.parametrize("room", [0, 400, 1 << 20])
def test_what_was_saved_last_is_read_back_whatever_came_before(tmp_path, monkeypatch, room):
    """Small values, large ones, forgotten ones, staged ones, in any order; after a close and after a kill."""
    monkeypatch.setattr(recent, "RECENT_BYTES", room)
    rng, store, vectors, values = random.Random(room), Checkpoint(tmp_path / "store", NUMEL), {}, {}

    def some(forget: bool) -> tuple[dict[str, torch.Tensor], dict[str, bytes | None]]:
        data = {
            name: rng.randbytes(rng.choice([0, 5, module.SMALL, module.SMALL + 1]))
            for name in rng.sample(NAMES, 4)
        }
        if forget:
            data |= dict.fromkeys(rng.sample(NAMES, 2))
        return {name: torch.rand(NUMEL) for name in rng.sample(NAMES, 3)}, data

    for step in range(60):
        if step % 3 == 1:
            staged = some(forget=False)
            store.stage(*staged)
            vectors |= staged[0]
            assert all(store.value(name) == data for name, data in staged[1].items())
            values |= staged[1]
        saved = some(forget=True)
        store.save(*saved)
        vectors |= saved[0]
        values |= saved[1]
        check(store, vectors, values)
        if step % 7 == 3:
            found = killed(store, tmp_path / "killed")
            check(found, vectors, values)
            found.close()
        if step % 20 == 19:
            store.close()
            store = Checkpoint(store.folder, NUMEL)
            check(store, vectors, values)
    store.close()


def test_what_is_all_over_the_tables_is_written_side_by_side(tmp_path):
    """The bytes of a checkpoint of 200 clients of 20,000, and of 200."""

    def written(clients: int) -> int:
        store = Checkpoint(tmp_path / str(clients), NUMEL)
        store.save(
            {f"client/{i}": torch.zeros(NUMEL) for i in range(clients)},
            {f"client/{i}": bytes(200) for i in range(clients)},
        )
        store.close()
        store, log = (
            Checkpoint(tmp_path / str(clients), NUMEL),
            tmp_path / str(clients) / f"{STATE}-wal",
        )
        before = log.stat().st_size
        chosen = random.Random(0).sample(range(clients), 200)
        store.save(
            {f"client/{i}": torch.ones(NUMEL) for i in chosen},
            {f"client/{i}": bytes(200) for i in chosen},
        )
        after = log.stat().st_size
        store.close()
        return after - before

    assert written(20_000) <= 1.2 * written(200)


def test_rows_are_put_away_when_they_are_many(tmp_path, monkeypatch):
    monkeypatch.setattr(recent, "RECENT_BYTES", 1000)
    store = Checkpoint(tmp_path / "store", NUMEL)
    for _ in range(30):
        store.save({}, {"client/1": bytes(200)})
        assert store.recent.bytes <= 1000
    assert store.state.execute("SELECT sum(length(data)) FROM recent").fetchone() == (
        store.recent.bytes,
    )
    store.close()


def test_rows_that_name_the_same_are_put_away_sooner(tmp_path, monkeypatch):
    monkeypatch.setattr(recent, "REPEATED_BYTES", 1000)
    same, others = Checkpoint(tmp_path / "same", NUMEL), Checkpoint(tmp_path / "others", NUMEL)
    for i in range(100):
        same.save({}, {"client/1": bytes(200)})
        others.save({}, {f"client/{i}": bytes(200)})
    assert same.recent.bytes < 20 * 250 and others.recent.bytes > 100 * 200
    for store in (same, others):
        store.close()


def test_a_full_disk_while_rows_are_put_away_leaves_the_last_checkpoint_whole(
    tmp_path, monkeypatch
):
    store = Checkpoint(tmp_path / "store", NUMEL)
    store.save({"a": torch.ones(NUMEL)}, {"client/1": b"1"})

    def full(self):
        self.state.execute("DELETE FROM recent")
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(recent, "RECENT_BYTES", 0)
        patch.setattr(module.Recent, "put_away", full)
        with pytest.raises(CheckpointError, match="disk is full"):
            store.save({"a": torch.zeros(NUMEL)}, {"client/1": b"2"})
        check(store, {"a": torch.ones(NUMEL)}, {"client/1": b"1"})
        store.close()  # what could not be put away stays where it is
    found = Checkpoint(store.folder, NUMEL)
    check(found, {"a": torch.ones(NUMEL)}, {"client/1": b"1"})
    found.close()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]\n",
        b"[1,2,3,4,5,6]\n",
        b'[["a"],[],[],[],[],[]]\n',
        b"\xff\n",
        b"null\n",
        7,
        "text",
    ],
)
def test_a_row_that_nobody_wrote_is_one_sentence(tmp_path, data):
    Checkpoint(tmp_path / "store", NUMEL).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "store" / STATE)) as state, state:
        state.execute(
            "INSERT INTO recent (crc, data) VALUES (?, ?)",
            (zlib.crc32(data) if isinstance(data, bytes) else 0, data),
        )
    with pytest.raises(CheckpointError, match="damaged"):
        Checkpoint(tmp_path / "store", NUMEL)


def test_a_flipped_bit_of_a_row_is_noticed(tmp_path):
    store = Checkpoint(tmp_path / "store", NUMEL)
    store.save({"a": torch.ones(NUMEL)}, {"client/1": b"1"})
    (row,) = store.state.execute("SELECT data FROM recent").fetchone()
    with store.state:
        store.state.execute("UPDATE recent SET data = ?", (row[:-1] + b"2",))
    with pytest.raises(CheckpointError, match="damaged"):
        Checkpoint(tmp_path / "store", NUMEL)
    store.close()
