"""The log in which a client stores, for each run, its signatures and the public keys of other clients that it has accepted (pinned).

When a client joins another run, the state of the previous run is replaced, but the log of that run is kept. If the client has a state
folder, the log has one small file there for each run, and each change replaces the whole file. Without a state folder, the log is lost when
the process ends.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from ..errors import UserError
from ..state_folder import StateFolder

MAX_RUNS = 4096  # largest number of runs in the log; no run is ever removed
PREFIX = "sealed-"  # prefix of the files' names


class SignatureLog:
    """Signatures and pinned keys as bytes, by run and entry name."""

    def __init__(self, folder: StateFolder | None = None):
        self.folder = folder
        self._files: dict[str, dict[str, bytes]] = {}  # used if there is no state folder

    def of(self, run: str) -> dict[str, bytes]:
        """Return the log entries of a run. Raises CheckpointError if the file of the run is damaged."""
        name = _file(run)
        known: dict[str, Any] = self.folder.load(name) if self.folder else self._files.get(name, {})
        return dict(known)

    def add(self, run: str, entries: Mapping[str, bytes]) -> None:
        """Add log entries of a run and flush them to the disk.

        Raises UserError if the log has entries of MAX_RUNS other runs, and CheckpointError if the disk is full.
        """
        known, name = self.of(run), _file(run)
        if {**known, **entries} == known:
            return
        runs = list(self.folder.path.glob(f"{PREFIX}*.bin")) if self.folder else self._files
        if not known and len(runs) >= MAX_RUNS:
            raise UserError(
                f"this client has signed ballots in {MAX_RUNS} runs, the maximum for one state folder; give this client a new --state-dir "
                "and a new key"
            )
        if self.folder:
            self.folder.save({**known, **entries}, name)
        else:
            self._files[name] = {**known, **entries}


def _file(run: str) -> str:
    return f"{PREFIX}{sha256(run.encode()).hexdigest()[:32]}.bin"
