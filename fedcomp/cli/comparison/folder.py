"""The folder of several alternatives: what was asked for, a run folder for each, and what they came to.

alternatives.toml   the options, lists of those that span; `fedcomp sim --config` reads it; [resolved]: what the command decided
NAME/               the run folder of each alternative
comparison.json     the lines of the table
report.html         all of them on one page
"""

import fcntl
import json
import os
import tomllib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import tomli_w

from ...callbacks import RoundRecord
from ...config import (
    ALTERNATIVES_FILE,
    RUN_FILE,
    RunConfig,
    Usual,
    at_home,
    claim_folder,
    default_folder,
    flag,
    may_span,
    options_of_run,
    read_toml,
)
from ...errors import RunFolderError, UserError
from ..results import share
from .alternatives import Alternative
from .progress import DONE, FIGURES, Progress

COMPARISON, SUMMARY, METRICS = "comparison.json", "summary.json", "metrics.jsonl"
TARGET, BASELINE = "target_accuracy", "baseline"
USUAL = {
    name for name, f in RunConfig.__dataclass_fields__.items() if isinstance(f.default, Usual)
}  # what strategies may choose
OF_THIS_COMMAND = {"out", "resume", "plain"}  # stored in no alternatives.toml


class ComparisonFolder:
    """Belongs to one command. Raises RunFolderError, with nothing written, when it is in the way, absent or of other alternatives."""

    def __init__(self, values: Mapping[str, Any]):
        task = Path(values.get("task", RunConfig.task).partition(":")[0]).stem
        self.path = at_home(values.get("out") or default_folder(task), "--out")
        self._unnamed = not values.get("out")
        self.values = {
            name: value
            for name, value in values.items()
            if name not in OF_THIS_COMMAND and value is not None
        }
        self._ends = ExitStack()
        resumed, file = values.get("resume", False), self.path / ALTERNATIVES_FILE
        if resumed and "out" not in values:
            raise RunFolderError(
                "--resume needs --out with the folder of the alternatives to continue"
            )
        if resumed and not file.is_file():
            raise RunFolderError(
                f"--out {self.path} holds no {ALTERNATIVES_FILE} to continue; leave --resume out to start"
            )
        if resumed:
            self._compare(read_toml(file, RunConfig.__dataclass_fields__))
        elif not self._unnamed and (
            self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir()))
        ):
            raise RunFolderError(
                f"--out {self.path} exists; give another name, or --resume to continue the alternatives in it"
            )

    def _compare(self, stored: Mapping[str, Any]) -> None:
        for name, f in RunConfig.__dataclass_fields__.items():
            mine, theirs = (values.get(name, f.default) for values in (self.values, stored))
            if mine != theirs and (may_span(f) or not f.metadata["local"]):
                raise RunFolderError(
                    f"the alternatives in {self.path} have {flag(name)} {_shown(theirs)}, these {_shown(mine)}; give the "
                    "same, or another --out"
                )

    def open(self, resolved: Mapping[str, Any]) -> None:
        """Create the folder, or continue in it, for this process alone, and write the options and decisions.

        Without --out, the folder gets a name that no other run has.
        """
        try:
            if self._unnamed:
                self.path, self._unnamed = claim_folder(self.path), False
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path, os.O_RDONLY)
            self._ends.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write(
                ALTERNATIVES_FILE, tomli_w.dumps({**self.values, "resolved": dict(resolved)})
            )
        except BlockingIOError:
            raise RunFolderError(
                f"another process runs in --out {self.path}; wait for it, or give another name"
            ) from None
        except OSError as error:
            raise RunFolderError(
                f"--out {self.path} cannot be written ({error.strerror}); give a folder that can"
            ) from error

    def close(self) -> None:
        self._ends.close()

    def of(self, alternative: Alternative) -> Path:
        return self.path / alternative.name

    def values_of(self, alternative: Alternative) -> dict[str, Any]:
        """Return the options of an alternative's run, "out" and "resume" among them.

        For a run that was begun, they include the defaults that its strategy set at that time. "out" is None until `open()` has chosen
        the name of a default folder.
        """
        folder = self.of(alternative)
        kept = {name: value for name, value in alternative.values.items() if value is not None}
        begun = not self._unnamed and (folder / RUN_FILE).is_file()
        chosen = (
            {name: value for name, value in options_of_run(folder).items() if name in USUAL}
            if begun
            else {}
        )
        out = None if self._unnamed else str(folder)
        return chosen | kept | {"out": out, "resume": begun}

    def _resolved(self) -> Mapping[str, Any]:
        """Return the table [resolved] of alternatives.toml; empty if there is no such file or table."""
        file = self.path / ALTERNATIVES_FILE
        if self._unnamed or not file.is_file():
            return {}
        resolved = tomllib.loads(file.read_text(encoding="utf-8")).get("resolved")
        return resolved if isinstance(resolved, dict) else {}

    def stored_baseline(self) -> bool | None:
        """Return whether the comparison in this folder has a dense baseline; None if the folder holds no comparison."""
        if self._unnamed or not (self.path / ALTERNATIVES_FILE).is_file():
            return None
        return self._resolved().get(BASELINE) is True

    def stored_target(self) -> float | None:
        """The share that the alternatives here were last compared by, if they were. Raises RunFolderError for what is none."""
        file, stored = self.path / ALTERNATIVES_FILE, self._resolved().get(TARGET)
        try:
            return share(None if stored is None else str(stored))
        except UserError as error:
            raise RunFolderError(
                f"{TARGET} in {file} is '{stored}'; give a --target-accuracy, such as 90%"
            ) from error

    def is_over(self, alternative: Alternative) -> bool:
        """Whether it has been run for as many rounds as it is asked for now. Raises RunFolderError where it was for more."""
        try:
            done = int(
                json.loads((self.of(alternative) / SUMMARY).read_text(encoding="utf-8"))["rounds"]
            )
        except (OSError, ValueError, KeyError, TypeError):
            return False
        asked = alternative.values.get("rounds", RunConfig.rounds)
        if done > asked:
            raise RunFolderError(
                f"the run in {self.of(alternative)} has done {done} rounds; give --rounds {done} or more"
            )
        return done == asked

    def ended(self, alternative: Alternative, rounds: int) -> Progress:
        """One that an earlier command has run to its end. Raises RunFolderError."""
        folder, progress = self.of(alternative), Progress(alternative.name, rounds, DONE)
        try:
            for line in (folder / METRICS).read_text(encoding="utf-8").splitlines():
                progress.add(
                    RoundRecord(
                        **{
                            name: value
                            for name, value in json.loads(line).items()
                            if name in FIGURES
                        }
                    )
                )
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise RunFolderError(
                f"{folder / METRICS} is damaged ({error}); remove {folder}, and --resume runs it anew"
            ) from error
        return progress

    def write_comparison(self, values: Mapping[str, Any]) -> None:
        try:
            self._write(COMPARISON, json.dumps(values, indent=2) + "\n")
        except OSError as error:
            raise RunFolderError(
                f"{self.path / COMPARISON} cannot be written ({error.strerror}); make room, then --resume"
            ) from error

    def _write(self, name: str, text: str) -> None:
        new = self.path / f".{name}.new"
        new.write_text(text, encoding="utf-8")
        os.replace(new, self.path / name)


def _shown(value: Any) -> str:
    return (
        ", ".join(map(str, value))
        if isinstance(value, list)
        else "not given"
        if value is None
        else str(value)
    )
