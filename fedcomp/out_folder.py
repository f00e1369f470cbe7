"""The folder that the option --out names, to which a run or a comparison writes its files."""

import fcntl
import os
import time
from contextlib import AbstractContextManager

from . import durable_files
from .config import expand_home
from .errors import RunFolderError, os_errors


class OutFolder:
    """The folder `out`, or a new folder runs/LABEL-YYYYMMDD-HHMMSS if `out` is None. `open` appends a number to this name if it is taken.

    `content` is what the folder contains, "run" or "comparison", for error messages. Raises RunFolderError, before anything is written, if
    `out` is not an empty folder and `resumed` is False, or if `resumed` is True and `out` is None.
    """

    def __init__(self, out: str | None, label: str, content: str, resumed: bool):
        default = f"runs/{label}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.path, self.resumed = expand_home(out or default, "--out"), resumed
        self._is_unnamed, self._lock = not out, -1
        if self._is_unnamed and resumed:
            raise RunFolderError(
                f"--resume needs --out with the folder of the {content} to continue"
            )
        with self._writing():
            in_use = self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir()))
        if in_use and out and not resumed:
            raise RunFolderError(
                f"--out {self.path} exists and is not empty; give another name, or --resume to continue the {content} in it"
            )

    def open(self) -> None:
        """Create the folder if it does not exist, and lock it.

        Raises RunFolderError if the folder cannot be written, or if another process has locked it.
        """
        with self._writing():
            if self._is_unnamed:
                self._create_unique()
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path, os.O_RDONLY)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunFolderError(
                    f"another process uses --out {self.path}; wait until it ends, or give another name"
                ) from None

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _create_unique(self) -> None:
        """Create the folder under its default name, or with the suffix -2, -3, … if another run has created that folder."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        default, number = self.path, 1
        while self._is_unnamed:
            try:
                self.path.mkdir()
                self._is_unnamed = False
            except FileExistsError:
                number += 1
                self.path = default.with_name(f"{default.name}-{number}")

    def _writing(self) -> AbstractContextManager[None]:
        advice = "give a folder that can be written"
        return os_errors(RunFolderError, f"--out {self.path} cannot be written", advice)

    def _replace(self, name: str, text: str) -> None:
        with self._writing():
            mode = 0o666  # restricted by the umask
            durable_files.replace(self.path / name, [text.encode()], mode)
