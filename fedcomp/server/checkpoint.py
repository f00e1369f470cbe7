"""Checkpoints, from which an interrupted run continues.

A checkpoint is a set of named entries: vectors (float32 tensors) and values (bytes). It consists of two kinds of files:

    state.sqlite:           the entries by name; for an entry of 256 KiB or more, only the number of its file;
    files/7.safetensors:    file number 7, which contains one large entry and is never overwritten.

`save` writes all changed entries in one SQLite transaction, after it has flushed their files to disk. If the process is killed or the power
fails, the folder therefore contains either the previous checkpoint or the new one. Between two checkpoints, `stage` writes entries to disk
in a thread, so that their memory can be freed; they can be read back immediately. Nothing is pickled.
"""

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file as save_array
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..durable_files import flush
from ..errors import CheckpointError
from .broadcasts import Broadcast

FILE_BYTES = 1 << 18  # an entry of at least this many bytes is stored in its own file
CACHE_KIB = 32_000  # maximum size of SQLite's page cache, in KiB
STATE, FILES, SUFFIX = "state.sqlite", "files", ".safetensors"
DATA = "data"  # name of the single tensor in each safetensors file

SCHEMA = """
CREATE TABLE IF NOT EXISTS entry (name TEXT PRIMARY KEY, file INTEGER, data BLOB);
CREATE INDEX IF NOT EXISTS entry_file ON entry (file) WHERE file IS NOT NULL;
"""
# The entry of a cached broadcast has the name broadcast/ROUND/BASE/VERSION, with the model versions before and after the broadcast.
BROADCAST = "broadcast/{:012}"

Row = tuple[str, int | None, bytes | memoryview | None]  # name, and file number or content


class Checkpoint:
    """The checkpoint of a run in a folder: float32 vectors and byte strings by name. Any thread may read it, but only one may write it.

    `flushed`: files outside the checkpoint that `save` also flushes to disk. Raises CheckpointError if the folder cannot be read.
    """

    def __init__(self, folder: Path, flushed: Sequence[Path] = ()):
        self.folder, self.flushed = folder, flushed
        self._lock = threading.RLock()  # for `_state` and the removal of files
        self._thread = ThreadPoolExecutor(1, "fedcomp-checkpoint")
        self._staging: Future[None] | None = None  # the last background write of `stage`
        self._batch: Set[str] = set()  # names of the entries that the last `stage` writes
        with self._reading():
            folder.mkdir(parents=True, exist_ok=True)
            self._state = sqlite3.connect(folder / STATE, check_same_thread=False)
            self._refuse_other_versions()
            (folder / FILES).mkdir(exist_ok=True)
            self._state.executescript(
                f"PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA cache_size=-{CACHE_KIB};{SCHEMA}"
            )
            numbers = [int(path.stem) for path in (folder / FILES).glob(f"*{SUFFIX}")]
            self._next = max(numbers, default=-1) + 1
            # Files from this number on were written after the last `save`.
            self._first_new = self._next
            self._remove_unused()

    def _refuse_other_versions(self) -> None:
        """Raise CheckpointError if another version of fedcomp wrote the database."""
        if self._state.execute("SELECT 1 FROM sqlite_master WHERE name = 'broadcast'").fetchone():
            raise CheckpointError(
                f"the checkpoint in {self.folder} was written by another version of fedcomp; continue the run with that version, or "
                "start a new run with another --out"
            )

    def close(self) -> None:
        """Close the database. Entries that were staged since the last `save` are lost."""
        self._thread.shutdown()
        self._state.close()

    # Writing.

    def save(
        self,
        vectors: Mapping[str, Tensor],
        values: Mapping[str, bytes | None],
        broadcasts: Sequence[Broadcast] = (),
        oldest: int = 0,
    ) -> None:
        """Write vectors, values, broadcasts and staged entries, and remove broadcasts before round `oldest`, all in one transaction.

        An entry with the value None is removed. If the disk is full, raises CheckpointError and leaves the previous checkpoint intact.
        """
        self._wait_for_stage()
        with self._writing():
            entries: dict[str, Tensor | bytes | None] = {**vectors, **values}
            for b in broadcasts:
                entries[f"{BROADCAST.format(b.round)}/{b.base}/{b.version}"] = b.frame
            rows = [self._row(name, entry) for name, entry in entries.items() if entry is not None]
            removed = [(name,) for name, entry in entries.items() if entry is None]
            flush(self.folder / FILES)
            for path in self.flushed:
                if path.exists():
                    flush(path)
            with self._lock, self._state as state:
                state.executemany("DELETE FROM entry WHERE name = ?", removed)
                state.executemany("INSERT OR REPLACE INTO entry VALUES (?, ?, ?)", rows)
                first, end = BROADCAST.format(0), BROADCAST.format(oldest)
                state.execute("DELETE FROM entry WHERE name >= ? AND name < ?", (first, end))
            self._first_new = self._next
            self._remove_unused()

    def stage(self, vectors: Mapping[str, Tensor], values: Mapping[str, bytes]) -> None:
        """Write vectors and values in the background. They become part of the checkpoint at the next `save`.

        The caller must not modify them. If the disk is full, later calls raise CheckpointError, and the previous checkpoint stays intact.
        """
        self._wait_for_stage()
        self._batch = vectors.keys() | values.keys()
        self._staging = self._thread.submit(self._stage, {**vectors, **values})

    def _stage(self, entries: Mapping[str, Tensor | bytes]) -> None:
        query = "SELECT file FROM entry WHERE name = ? AND file >= ?"
        with self._writing():
            new, rows = self._first_new, [self._row(name, entry) for name, entry in entries.items()]
            with self._lock:
                replaced = [self._state.execute(query, (name, new)).fetchone() for name in entries]
                self._state.executemany("INSERT OR REPLACE INTO entry VALUES (?, ?, ?)", rows)
                for (number,) in filter(None, replaced):
                    self._path(number).unlink(missing_ok=True)

    def _wait_for_stage(self) -> None:
        """Wait until the last call of `stage` has written its entries. Raises CheckpointError if that failed."""
        if self._staging is not None:
            self._staging.result()

    def _row(self, name: str, entry: Tensor | bytes) -> Row:
        """Return the database row of an entry. A large entry is first written to its own file."""
        if isinstance(entry, Tensor):
            if entry.dtype != torch.float32:
                raise ValueError(
                    f"a checkpoint holds float32 vectors, but '{name}' is {entry.dtype}"
                )
            entry = entry.detach().cpu().contiguous()
            if entry.nbytes < FILE_BYTES:
                return name, None, entry.numpy().data  # not copied
        elif len(entry) < FILE_BYTES:
            return name, None, entry
        number, self._next = self._next, self._next + 1
        if isinstance(entry, Tensor):
            save_file({DATA: entry}, self._path(number))
        else:
            save_array({DATA: np.frombuffer(entry, np.uint8)}, self._path(number))
        flush(self._path(number), keep_cached=False)
        return name, number, None

    # Reading.

    def vector(self, name: str) -> Tensor | None:
        """Return a vector [numel], or None if there is none with this name. Raises CheckpointError if it cannot be read."""
        entry = self._entry(name)
        if entry is None or isinstance(entry, Tensor):
            return entry
        with self._reading():
            return torch.from_numpy(np.frombuffer(entry, np.float32).copy())

    def value(self, name: str) -> bytes | None:
        """Return a value, or None if there is none with this name. Raises CheckpointError if it cannot be read."""
        entry = self._entry(name)
        return entry.numpy().tobytes() if isinstance(entry, Tensor) else entry

    def values(self, prefix: str) -> dict[str, bytes]:
        """Return a dict of the values whose names begin with `prefix`. Its keys are the names without the prefix."""
        with self._reading(), self._lock:
            rows = self._state.execute(
                "SELECT name FROM entry WHERE name >= ? AND name < ? ORDER BY name",
                (prefix, prefix + "\U0010ffff"),
            )
            return {name[len(prefix) :]: self.value(name) or b"" for (name,) in rows.fetchall()}

    def broadcasts(self, until: int) -> list[Broadcast]:
        """Return the cached broadcasts up to and including round `until`, oldest first."""
        prefix, found = BROADCAST.partition("{")[0], []
        for name, frame in self.values(prefix).items():
            round, base, version = name.split("/")
            if int(round) <= until:
                found.append(Broadcast(int(round), base, version, frame))
        return found

    def _entry(self, name: str) -> bytes | Tensor | None:
        if name in self._batch:
            self._wait_for_stage()
        with self._reading(), self._lock:
            found = self._state.execute("SELECT file, data FROM entry WHERE name = ?", (name,))
            file, data = found.fetchone() or (None, None)
            return data if file is None else self._load(file)

    def _load(self, number: int) -> Tensor:
        # `load_file` only maps the file into memory; `clone` reads the whole file.
        return load_file(self._path(number))[DATA].clone()

    # Files.

    def _path(self, number: int) -> Path:
        return self.folder / FILES / f"{number}{SUFFIX}"

    def _remove_unused(self) -> None:
        """Remove the files of replaced entries and of interrupted saves."""
        with self._lock:
            written = {int(path.stem) for path in (self.folder / FILES).glob(f"*{SUFFIX}")}
            query = "SELECT file FROM entry WHERE file IS NOT NULL"
            in_use = {number for (number,) in self._state.execute(query)}
            for number in written - in_use:
                self._path(number).unlink(missing_ok=True)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise CheckpointError in place of errors caused by the disk or by damaged files."""
        where = f"the checkpoint in {self.folder}"
        try:
            yield
        except (PermissionError, sqlite3.OperationalError) as error:
            raise CheckpointError(
                f"{where} cannot be opened ({error}); check its permissions and the free disk space"
            ) from error
        except (OSError, SafetensorError, sqlite3.Error, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{where} is damaged ({error}); start a new run with another --out"
            ) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise CheckpointError in place of errors caused by a disk that is full or cannot be written."""
        try:
            yield
        except (OSError, SafetensorError, sqlite3.Error) as error:
            raise CheckpointError(
                f"the checkpoint in {self.folder} could not be written ({error}); the previous checkpoint is intact; free disk "
                "space or make the folder writable, then continue with --resume"
            ) from error
