"""The log in which a client stores, for each run, the last round in which it signed messages, and the public keys that it has pinned
(keyring.py).

Each run has its own small file in the client's state folder. Unlike the client's other state, this file is kept when the client joins
another run. Without a state folder, the log is lost when the process ends.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from ..errors import UserError
from ..state_folder import StateFolder

MAX_RUNS = 4096  # maximum number of runs in the log, because runs are never removed
PREFIX = "sealed-"  # prefix of the files' names


class SignatureLog:
    """Entries (name → bytes) for each run."""

    def __init__(self, folder: StateFolder | None = None):
        self.folder = folder
        self._files: dict[str, dict[str, bytes]] = {}  # used if there is no state folder

    def entries(self, run: str) -> dict[str, bytes]:
        """Return the entries of a run. Raises CheckpointError if the file of the run is damaged."""
        name = _file(run)
        known: dict[str, Any] = self.folder.load(name) if self.folder else self._files.get(name, {})
        return dict(known)

    def add(self, run: str, entries: Mapping[str, bytes]) -> None:
        """Add entries of a run and flush them to the disk.

        Raises UserError if the log has entries of MAX_RUNS other runs, and CheckpointError if the disk is full.
        """
        known, name = self.entries(run), _file(run)
        new = {**known, **entries}
        if new == known:
            return
        runs = list(self.folder.path.glob(f"{PREFIX}*.bin")) if self.folder else self._files
        if not known and len(runs) >= MAX_RUNS:
            raise UserError(
                f"this client has taken part in sealed elections of {MAX_RUNS} runs, the maximum for one state folder; give it a new "
                "--state-dir, and a new key with: fedcomp keys renew ID"
            )
        if self.folder:
            self.folder.save(new, name)
        else:
            self._files[name] = new


def _file(run: str) -> str:
    return f"{PREFIX}{sha256(run.encode()).hexdigest()[:32]}.bin"
