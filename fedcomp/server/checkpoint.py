"""Checkpoints: what a run needs to go on as if nothing had happened, written so that a kill at any moment leaves the last whole one.

    rows.bin       float32 vectors [numel] in numbered slots: the weights, the server's memory, the residuals
    state.sqlite   which vector lies in which slot, with its CRC-32; small values by name; the cache of broadcasts; and what the last
                   checkpoints changed of these (server/recent.py)

A checkpoint writes the vectors that changed into free slots and then names them in one transaction: a kill leaves the
last one whole. Once a second, or sooner where much was written, it is flushed to the disk as well, and the slots that
were replaced since are free only then: a power failure leaves the last flushed one whole. It costs what changed,
whatever the number of clients. What has to leave memory between two checkpoints is staged: it can be read back at once,
and the next checkpoint names it without writing its vectors again. No pickle.

Written behind, a checkpoint is a copy in memory that a thread writes while the run goes on, until the next one is due: a
kill then leaves the one before. That is for runs whose rounds nobody else has heard of, and for large checkpoints.
"""

import math
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError
from .broadcasts import Broadcast
from .recent import SMALL, Recent

FLUSH_BYTES = 64 << 20  # a flush of more would keep a round waiting
LOG_BYTES = 4 << 20  # of SQLite's log, from which a flush works it in
LEAST_BEHIND, MOST_BEHIND = (
    8 << 20,
    1 << 29,
)  # bytes of vectors that are written behind: a thread for less is in the round's way
RUN_BYTES = 1 << 18  # of small vectors that are written at once
CACHE_KIB = 32_000  # of SQLite's pages in memory, at most: those of 20,000 clients take 10 MB
ROWS, STATE = "rows.bin", "state.sqlite"

SCHEMA = """
CREATE TABLE IF NOT EXISTS vector (name TEXT PRIMARY KEY, slot INTEGER NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS value (name TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS staged (name TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
DELETE FROM staged;
CREATE TABLE IF NOT EXISTS broadcast (round INTEGER PRIMARY KEY, base TEXT NOT NULL, version TEXT NOT NULL UNIQUE, frame BLOB NOT NULL);
"""


class Checkpoint:
    """A folder of checkpoints of vectors [numel], open for writing. Raises CheckpointError when it cannot be read.

    `flush_every_s`: seconds between checkpoints that survive a power failure. `beside`: files that are flushed before them. With
    `behind`, `save` may return before it has written, and what cannot be written is told by the next call. Any thread may read.
    """

    def __init__(
        self,
        folder: Path,
        numel: int,
        flush_every_s: float = 1.0,
        beside: Sequence[Path] = (),
        behind: bool = False,
    ):
        self.folder = folder
        self.numel = numel
        self.row_bytes = 4 * numel
        self.flush_every_s = flush_every_s
        self.beside = beside
        self.flushed_s, self.unflushed_bytes = (
            -math.inf,
            0,
        )  # when the last flush was, and what was written since
        self.replaced: list[int] = []  # slots whose vectors were replaced since the last flush
        self.staged: dict[
            str, tuple[int, int]
        ] = {}  # slot and CRC of vectors that no checkpoint names yet
        self._staged_values: list[str] = []  # likewise
        self._turn = threading.RLock()  # to use `state`
        self._writer = ThreadPoolExecutor(1, "checkpoint") if behind else None
        self._coming: Future[None] | None = (
            None  # the checkpoint that is being written, or was last
        )
        self._named: set[str] = set()  # what is in it
        self._copies: list[Tensor] = []
        with self._reading():
            folder.mkdir(parents=True, exist_ok=True)
            self.state = sqlite3.connect(folder / STATE, check_same_thread=False)
            self.state.executescript(
                f"PRAGMA journal_mode=WAL; PRAGMA wal_autocheckpoint=0; PRAGMA cache_size=-{CACHE_KIB};"
                + SCHEMA
            )
            self.recent = Recent(self.state)
            self.slots: dict[str, int] = dict(self.state.execute("SELECT name, slot FROM vector"))
            self.slots |= {name: slot for name, (slot, _) in self.recent.places.items()}
            self.given = {
                name for (name,) in self.state.execute("SELECT name FROM value")
            }  # values; others need not be looked for
            self.given.update(self.recent.values)
            self.rows = os.open(folder / ROWS, os.O_RDWR | os.O_CREAT, 0o644)
        used = set(self.slots.values())
        self.end = max(used, default=-1) + 1
        self.free = [slot for slot in range(self.end) if slot not in used]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.OperationalError) as error:
            where = f"the checkpoint in {self.folder}"
            raise CheckpointError(
                f"{where} cannot be opened ({error}); make room for it and make it writable"
            ) from error
        except (sqlite3.Error, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint in {self.folder} is damaged ({error}); start a new run with another --out"
            ) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise CheckpointError(
                f"the checkpoint in {self.folder} could not be written ({error}); the one before it is whole: make room, "
                "then go on with --resume"
            ) from error

    def close(self) -> None:
        """Flush, and let go of the files."""
        try:
            self.settle()
            with self._writing():
                os.fdatasync(self.rows)
                with (
                    suppress(sqlite3.Error),
                    self.state,
                ):  # where there is no room, what is recent stays so
                    self.recent.put_away()
                self.state.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            if self._writer is not None:
                self._writer.shutdown()
            self.state.close()
            os.close(self.rows)

    def settle(self) -> None:
        """Wait until the last checkpoint is written. Raises CheckpointError, with the one before it whole, where it could not be."""
        if self._coming is not None:
            self._coming.result()

    def save(
        self,
        vectors: Mapping[str, Tensor],
        values: Mapping[str, bytes | None],
        broadcasts: Sequence[Broadcast] = (),
        oldest: int = 0,
    ) -> None:
        """Write vectors [numel] and values (None = forget it), add broadcasts, forget those before round `oldest`. All of it, or nothing.

        What is staged under other names becomes part of it. Raises CheckpointError, with the last checkpoint whole, when the disk is full.
        """
        self.settle()
        self.given.update(values)
        if self._writer is None or not LEAST_BEHIND <= len(vectors) * self.row_bytes <= MOST_BEHIND:
            return self._save_whole(vectors, values, broadcasts, oldest)
        self._named = {*vectors, *values, *self.staged}
        self._coming = self._writer.submit(
            self._save_whole, self._copied(vectors), values, broadcasts, oldest
        )

    def _save_whole(
        self,
        vectors: Mapping[str, Tensor],
        values: Mapping[str, bytes | None],
        broadcasts: Sequence[Broadcast],
        oldest: int,
    ) -> None:
        slots = self._take_slots(len(vectors))
        flush = (
            time.monotonic() - self.flushed_s >= self.flush_every_s
            or self.unflushed_bytes > FLUSH_BYTES
        )
        try:
            with self._writing():
                written = self._save(slots, vectors, values, broadcasts, oldest, flush)
        except CheckpointError:
            self.free += slots
            raise
        self.replaced += [self.slots[name] for name, _, _ in written if name in self.slots]
        self.slots |= {name: slot for name, slot, _ in written}
        self.free += [self.staged[name][0] for name in vectors if name in self.staged]
        self.staged, self._staged_values = {}, []
        if flush:
            self.free += self.replaced
            self.flushed_s, self.replaced, self.unflushed_bytes = time.monotonic(), [], 0

    def _save(
        self,
        slots: Sequence[int],
        vectors: Mapping[str, Tensor],
        values: Mapping[str, bytes | None],
        broadcasts: Sequence[Broadcast],
        oldest: int,
        flush: bool,
    ) -> list[tuple[str, int, int]]:
        """Write and name; returns name, slot and CRC of each vector, those that were staged included."""
        written = list(zip(vectors, slots, self._write(slots, vectors.values()), strict=True))
        written += [(name, *place) for name, place in self.staged.items() if name not in vectors]
        if flush:
            os.fdatasync(self.rows)
            for path in self.beside:
                _flush(path)
        with self._turn:
            self.state.execute(f"PRAGMA synchronous={'FULL' if flush else 'NORMAL'}")
            small = {
                name: data
                for name, data in values.items()
                if data is not None and len(data) <= SMALL
            }
            row = self.recent.row(
                written, small, [*self._staged_values, *(values.keys() - small.keys())]
            )
            full = self.recent.is_full(row)
            with self.state:
                if full:
                    self.recent.put_away()
                if self._staged_values:
                    self.state.execute("INSERT OR REPLACE INTO value SELECT name, data FROM staged")
                    self.state.execute("DELETE FROM staged")
                for name in values.keys() - small.keys():
                    self._put_value(name, values[name])
                self.recent.write(row)
                self._add(broadcasts)
                self.state.execute("DELETE FROM broadcast WHERE round < ?", (oldest,))
            if full:
                self.recent.clear()
            self.recent.learn(row)
            if flush and (self.folder / f"{STATE}-wal").stat().st_size > LOG_BYTES:
                with suppress(
                    sqlite3.Error
                ):  # what was written is written; the log is worked in another time
                    self.state.execute("PRAGMA wal_checkpoint(PASSIVE)")
        return written

    def stage(self, vectors: Mapping[str, Tensor], values: Mapping[str, bytes]) -> None:
        """Write vectors [numel] and values for the next `save`; until then they are read back, and after a kill they are gone.

        Raises CheckpointError, with the last checkpoint whole, when the disk is full.
        """
        self.settle()
        slots = self._take_slots(len(vectors))
        self.given.update(values)
        try:
            with self._writing():
                staged = dict(
                    zip(
                        vectors,
                        zip(slots, self._write(slots, vectors.values()), strict=True),
                        strict=True,
                    )
                )
                with self._turn:
                    self.state.execute("PRAGMA synchronous=NORMAL")
                    with self.state:
                        self.state.executemany(
                            "INSERT OR REPLACE INTO staged VALUES (?, ?)", values.items()
                        )
        except CheckpointError:
            self.free += slots
            raise
        self.free += [self.staged[name][0] for name in vectors if name in self.staged]
        self.staged |= staged
        self._staged_values += values

    def add_broadcast(self, broadcast: Broadcast) -> None:
        """Write one broadcast down, before it is sent."""
        self.settle()
        with self._writing(), self._turn, self.state:
            self._add([broadcast])

    def vector(self, name: str) -> Tensor | None:
        """A vector [numel] by name. Raises CheckpointError when its bytes are not those that were written."""
        self._settle_for(name)
        if name not in self.slots and name not in self.staged:
            return None
        vector = torch.empty(self.numel, dtype=torch.float32)
        with self._reading():
            with self._turn:
                slot, crc = (
                    self.staged.get(name)
                    or self.recent.places.get(name)
                    or self.state.execute(
                        "SELECT slot, crc FROM vector WHERE name = ?", (name,)
                    ).fetchone()
                )
            read = os.preadv(
                self.rows,
                [memoryview(vector.numpy()).cast("B")] if self.numel else [],
                slot * self.row_bytes,
            )
        if read != self.row_bytes or zlib.crc32(vector.numpy()) != crc:
            raise CheckpointError(
                f"'{name}' in {self.folder / ROWS} is damaged; start a new run with another --out"
            )
        return vector

    def value(self, name: str) -> bytes | None:
        """A small value by name."""
        if name not in self.given:
            return None
        self._settle_for(name)
        with self._reading(), self._turn:
            row = self.state.execute("SELECT data FROM staged WHERE name = ?", (name,)).fetchone()
            if row is None and name in self.recent.values:
                return self.recent.values[name]
            row = (
                row
                or self.state.execute("SELECT data FROM value WHERE name = ?", (name,)).fetchone()
            )
        return row and row[0]

    def values(self, prefix: str) -> dict[str, bytes]:
        """The values whose names begin with `prefix`, by what follows it."""
        self.settle()
        with self._reading(), self._turn:
            rows = self.state.execute(
                "SELECT name, data FROM value WHERE name >= ? AND name < ?",
                (prefix, prefix + "\U0010ffff"),
            )
            found = {name[len(prefix) :]: data for name, data in rows}
            return found | {
                name[len(prefix) :]: data
                for name, data in self.recent.values.items()
                if name.startswith(prefix)
            }

    def broadcasts(self, until: int) -> list[Broadcast]:
        """The cache of broadcasts up to a round, oldest first."""
        self.settle()
        with self._reading(), self._turn:
            rows = self.state.execute(
                "SELECT round, base, version, frame FROM broadcast WHERE round <= ? ORDER BY round",
                (until,),
            )
            return [Broadcast(*row) for row in rows]

    def _add(self, broadcasts: Sequence[Broadcast]) -> None:
        rows = [(b.round, b.base, b.version, b.frame) for b in broadcasts]
        self.state.executemany("INSERT OR REPLACE INTO broadcast VALUES (?, ?, ?, ?)", rows)

    def _put_value(self, name: str, data: bytes | None) -> None:
        if data is None:
            self.state.execute("DELETE FROM value WHERE name = ?", (name,))
        else:
            self.state.execute("INSERT OR REPLACE INTO value VALUES (?, ?)", (name, data))

    def _settle_for(self, name: str) -> None:
        """Wait if this is being written."""
        if name in self._named:
            self.settle()

    def _copied(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Vectors as they are now, in memory that is used again."""
        for vector in vectors.values():
            self._check(vector)
        while len(self._copies) < len(vectors):
            self._copies.append(torch.empty(self.numel, dtype=torch.float32))
        return {
            name: copy.copy_(vector.detach())
            for (name, vector), copy in zip(vectors.items(), self._copies, strict=False)
        }

    def _check(self, vector: Tensor) -> None:
        if vector.dtype != torch.float32 or vector.shape != (self.numel,):
            raise ValueError(
                f"a checkpoint holds float32 vectors of {self.numel} elements, not {vector.dtype} of {list(vector.shape)}"
            )

    def _take_slots(self, count: int) -> list[int]:
        """Free ones, ascending; they count as written."""
        missing = max(0, count - len(self.free))
        self.free += range(self.end, self.end + missing)
        self.end += missing
        self.unflushed_bytes += count * self.row_bytes
        return sorted(self.free.pop() for _ in range(count))

    def _write(self, slots: Sequence[int], vectors: Iterable[Tensor]) -> list[int]:
        """Vectors into slots, ascending; small ones at once where their slots follow one another. Returns their CRCs."""
        crcs: list[int] = []
        run: list[np.ndarray] = []  # for the slots from `first` on
        first = 0
        for slot, vector in zip(slots, vectors, strict=True):
            self._check(vector)
            if slot != first + len(run) or len(run) * self.row_bytes >= RUN_BYTES:
                self._put(run, first)
                run, first = [], slot
            run.append(vector.detach().cpu().contiguous().numpy())
            crcs.append(zlib.crc32(run[-1]))
        self._put(run, first)
        return crcs

    def _put(self, run: Sequence[np.ndarray], first: int) -> None:
        data = (
            memoryview(run[0] if len(run) == 1 else b"".join(run)).cast("B")
            if run and self.numel
            else memoryview(b"")
        )
        offset = first * self.row_bytes
        while data:
            done = os.pwrite(self.rows, data, offset)
            data, offset = data[done:], offset + done


def _flush(path: Path) -> None:
    """See that what was appended to a file, if there is one, is on the disk."""
    if path.exists():
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
