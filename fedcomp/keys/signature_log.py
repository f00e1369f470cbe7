"""A client's log of its signatures and of the keys that it has pinned, by run. The log outlives the client's state of a run.

With a state folder, each run has a small file in it, which is replaced as a whole. Without a folder, the log lives as long as the process.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from ..errors import UserError
from ..state_folder import StateFolder

MAX_RUNS = 4096  # largest number of runs in the log, because no run is ever removed
PREFIX = "sealed-"  # prefix of the files' names


class SignatureLog:
    """Signatures and pinned keys as bytes, by run and name. Entries are never removed."""

    def __init__(self, folder: StateFolder | None = None):
        self.folder = folder
        self._files: dict[str, dict[str, bytes]] = {}  # without a folder

    def of(self, run: str) -> dict[str, bytes]:
        """Return the entries of a run. Raises CheckpointError if its file is damaged."""
        name = _file(run)
        known: dict[str, Any] = self.folder.load(name) if self.folder else self._files.get(name, {})
        return dict(known)

    def add(self, run: str, entries: Mapping[str, bytes]) -> None:
        """Add entries of a run and flush them to the disk. Raises UserError for too many runs and CheckpointError for a full disk."""
        known, name = self.of(run), _file(run)
        if {**known, **entries} == known:
            return
        runs = list(self.folder.path.glob(f"{PREFIX}*.bin")) if self.folder else self._files
        if not known and len(runs) >= MAX_RUNS:
            raise UserError(
                f"this client has signed ballots in {MAX_RUNS} runs, the maximum for its state folder; give it a new --state-dir "
                "and a new key"
            )
        if self.folder:
            self.folder.save({**known, **entries}, name)
        else:
            self._files[name] = {**known, **entries}


def _file(run: str) -> str:
    return f"{PREFIX}{sha256(run.encode()).hexdigest()[:32]}.bin"
