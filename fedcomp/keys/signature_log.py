"""A client's log of its signatures and of the keys that it has pinned, by run. It outlives the state of a run.

With a state folder, each run has a small file, which is replaced as a whole. Without one, the log lives as long as the process.
"""

from collections.abc import Mapping
from hashlib import sha256

from ..errors import UserError
from ..state_folder import StateFolder

MOST_RUNS = 4096  # in the log; none of them is ever removed
NAMED = "sealed-"  # how the files begin


class Past:
    """Named bytes by run; no name is forgotten."""

    def __init__(self, folder: StateFolder | None = None):
        self.folder = folder
        self._kept: dict[str, dict[str, bytes]] = {}  # without a folder

    def of(self, run: str) -> dict[str, bytes]:
        """Raises CheckpointError where the file is damaged."""
        return dict(
            self._kept.get(run, {}) if self.folder is None else self.folder.load(_file(run))
        )

    def add(self, run: str, more: Mapping[str, bytes]) -> None:
        """On the disk when this returns. Raises UserError for more runs than a client remembers, CheckpointError for a full disk."""
        known = self.of(run)
        if known | more == known:
            return
        if not known and self._runs() >= MOST_RUNS:
            raise UserError(
                f"this client has signed ballots in {MOST_RUNS} runs, and remembers no more; give it a new --state-dir, "
                "and a new key with it"
            )
        if self.folder is None:
            self._kept[run] = known | more
        else:
            self.folder.save(known | more, _file(run))

    def _runs(self) -> int:
        return (
            len(self._kept)
            if self.folder is None
            else sum(1 for _ in self.folder.path.glob(f"{NAMED}*.bin"))
        )


def _file(run: str) -> str:
    return f"{NAMED}{sha256(run.encode()).hexdigest()[:32]}.bin"
