"""The folder of a comparison.

alternatives.toml   the options, where an option with several values has a list, as in a --config file; the table [resolved] contains
                    values that fedcomp chose, such as the number of threads
NAME/               the run folder of the alternative NAME
comparison.json     the table of results as JSON
report.html         the report on all runs
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from ... import durable_files
from ...config import (
    ALTERNATIVES_FILE,
    RUN_FILE,
    RunConfig,
    StrategyDefault,
    flag,
    inherited_options,
    read_toml,
)
from ...errors import RunFolderError, os_errors
from ...out_folder import OutFolder
from ..results import parse_accuracy
from .alternatives import Alternative
from .displays import DONE, AlternativeProgress

COMPARISON, SUMMARY = "comparison.json", "summary.json"
TARGET, BASELINE = "target_accuracy", "baseline"
FIELDS = RunConfig.__dataclass_fields__
# Names of the options whose defaults depend on the strategy.
STRATEGY_DEFAULTS = {n for n, f in FIELDS.items() if isinstance(f.default, StrategyDefault)}
NOT_STORED = {"out", "resume", "plain"}  # options that are not written to alternatives.toml


class ComparisonFolder(OutFolder):
    """The folder of one comparison.

    Raises RunFolderError, before anything is written, if a comparison is resumed with other values of options that must not change.
    """

    def __init__(self, values: Mapping[str, Any]):
        task = Path(values.get("task", RunConfig.task).partition(":")[0]).stem
        super().__init__(values.get("out"), task, "comparison", bool(values.get("resume")))
        given = {name: value for name, value in values.items() if value is not None}
        self.values = {name: value for name, value in given.items() if name not in NOT_STORED}
        self.stored: Mapping[str, Any] = {}  # the table [resolved] of a resumed comparison
        file = self.path / ALTERNATIVES_FILE
        if self.resumed:
            if not file.is_file():
                raise RunFolderError(
                    f"--out {self.path} contains no {ALTERNATIVES_FILE} to continue; leave --resume out to start a new comparison"
                )
            self._check_same_options(read_toml(file, FIELDS))
            self.stored = tomllib.loads(file.read_text(encoding="utf-8")).get("resolved", {})

    def _check_same_options(self, stored: Mapping[str, Any]) -> None:
        """Raise RunFolderError if this command changes a stored option that a resumed run may not change."""
        for name, f in FIELDS.items():
            own, other = (values.get(name, f.default) for values in (self.values, stored))
            if own != other and not f.metadata["changeable"]:
                found = f"the runs in {self.path} have {flag(name)} {_shown(other)}"
                advice = "give the same value, or another --out"
                raise RunFolderError(f"{found}, but this command has {_shown(own)}; {advice}")

    def write_options(self, resolved: Mapping[str, Any]) -> None:
        """Write alternatives.toml. Raises RunFolderError if the file cannot be written."""
        self._replace(ALTERNATIVES_FILE, tomli_w.dumps({**self.values, "resolved": dict(resolved)}))

    def run_options(self, alternative: Alternative) -> dict[str, Any]:
        """Return the options of an alternative's run, including "out" and "resume". Without --out, "out" is None until `open()` is called.

        The options of a resumed run include the defaults that the strategy set when the run was first started.
        """
        folder = self.path / alternative.name
        values = {name: value for name, value in alternative.options.items() if value is not None}
        started = not self._is_unnamed and (folder / RUN_FILE).is_file()
        stored = inherited_options(folder) if started else {}
        defaults = {name: value for name, value in stored.items() if name in STRATEGY_DEFAULTS}
        out = None if self._is_unnamed else str(folder)
        return defaults | values | {"out": out, "resume": started}

    def stored_target_accuracy(self) -> float | None:
        """Return the target accuracy of the resumed comparison, if any. Raises UserError for an invalid value."""
        target = self.stored.get(TARGET)
        return None if target is None else parse_accuracy(str(target))

    def is_finished(self, alternative: Alternative) -> bool:
        """Return whether an alternative has finished --rounds rounds. Raises RunFolderError if it has finished more rounds."""
        folder, rounds = self.path / alternative.name, alternative.config.rounds
        try:
            done = int(json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["rounds"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        if done > rounds:
            raise RunFolderError(
                f"the run in {folder} has finished {done} rounds, but --rounds is {rounds}; give --rounds {done} or more"
            )
        return done == rounds

    def read_progress(self, alternative: Alternative, progress: AlternativeProgress) -> None:
        """Add the rounds of a finished alternative to `progress`. Raises RunFolderError if the file of its rounds is damaged or absent."""
        from ...server.run_folder import METRICS, read_records

        folder, progress.state = self.path / alternative.name, DONE
        try:
            records = read_records(folder / METRICS)
        except RunFolderError:
            records = []
        if not records:
            raise RunFolderError(
                f"{folder / METRICS} is damaged or absent; remove {folder}, and repeat the command to execute this run again"
            )
        for record in records:
            progress.add(record)

    def write_comparison(self, values: Mapping[str, Any]) -> None:
        """Write comparison.json. Raises RunFolderError if the file cannot be written."""
        file, text = self.path / COMPARISON, json.dumps(values, indent=2) + "\n"
        advice = (
            "make the folder writable or free disk space, then repeat the command with --resume"
        )
        with os_errors(RunFolderError, f"{file} cannot be written", advice):
            durable_files.replace(file, [text.encode()], 0o666)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "not given" if value is None else str(value)
