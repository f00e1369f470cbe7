"""The run folder: what a run leaves behind.

    config.toml        every option resolved, with the engine and its batch of clients
    metrics.jsonl      a line a round (observe.RoundRecord)
    summary.json       totals (observe.Summary)
    model.safetensors  the trained parameters under the names of the user's module
    checkpoint/        what --resume needs (server/checkpoint.py)
"""

import dataclasses
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import tomli_w
from safetensors.torch import save_file
from torch import Tensor

from ..config import RUN_FILE, RunConfig, first_difference, flag, read_run, settings
from ..errors import RunFolderError
from ..layout import Layout
from ..observe import Rejection, RoundRecord, Summary

METRICS, SUMMARY, MODEL, CHECKPOINT = "metrics.jsonl", "summary.json", "model.safetensors", "checkpoint"


class RunFolder:
    """A folder that belongs to one run. Raises RunFolderError, with nothing written, when it is in the way, absent or of another run."""

    def __init__(self, config: RunConfig):
        self.path = Path(config.out or _default_name(config.task)).expanduser()
        self.resumed = config.resume
        self.stored = self._stored(config) if config.resume else {}
        if not config.resume and self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise RunFolderError(f"--out {self.path} exists; give another name, or --resume to continue the run in it")

    def create(self, config: RunConfig, resolved: dict[str, Any]) -> None:
        """Make the folder, or go on in it, and write config.toml: every option, and under [resolved] what was decided for this machine.

        Raises RunFolderError when that is not allowed.
        """
        values = settings(config) | {"out": str(self.path), "resolved": resolved}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            _replace(self.path / RUN_FILE, tomli_w.dumps(values).encode())
        except OSError as error:
            raise RunFolderError(f"--out {self.path} cannot be written ({error.strerror}); give a folder that can") from error

    def _stored(self, config: RunConfig) -> dict[str, Any]:
        if config.out is None:
            raise RunFolderError("--resume needs --out with the folder of the run to continue")
        stored = read_run(self.path)
        if not os.access(self.path, os.W_OK):
            raise RunFolderError(f"--out {self.path} cannot be written; make it writable to continue the run")
        name = first_difference(config, stored)
        if name:
            there, here = (values.get(name, "not given") for values in (stored, settings(config)))
            raise RunFolderError(f"the run in {self.path} has {flag(name)} {there}, this one {here}; give the same, or another --out")
        return stored

    def append(self, record: RoundRecord) -> int:
        """Add a line to metrics.jsonl. Returns the file's length afterwards."""
        with open(self.path / METRICS, "ab") as file:
            file.write((json.dumps(_plain(record)) + "\n").encode())
            return file.tell()

    def records(self) -> list[RoundRecord]:
        """The lines of metrics.jsonl."""
        try:
            lines = (self.path / METRICS).read_text(encoding="utf-8").splitlines()
            return [record_of(json.loads(line)) for line in lines]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError) as error:
            raise RunFolderError(f"{self.path / METRICS} is damaged ({error}); start a new run with another --out") from error

    def truncate_metrics(self, length: int) -> None:
        """Forget what was appended after the checkpoint."""
        path = self.path / METRICS
        if path.exists() and path.stat().st_size > length:
            os.truncate(path, length)

    def write_model(self, weights: Tensor, layout: Layout) -> None:
        """The parameters as safetensors."""
        temporary = self.path / f".{MODEL}.new"
        save_file({name: view.clone() for name, view in layout.views(weights.cpu()).items()}, temporary)
        os.replace(temporary, self.path / MODEL)

    def write_summary(self, summary: Summary) -> None:
        _replace(self.path / SUMMARY, (json.dumps(_plain(summary), indent=2) + "\n").encode())


def record_of(values: dict[str, Any]) -> RoundRecord:
    """A line of metrics.jsonl as a record."""
    return RoundRecord(**values | {"rejections": tuple(Rejection(**r) for r in values["rejections"])})


def _default_name(task: str) -> str:
    stem = Path(task.partition(":")[0]).stem
    return f"runs/{stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def _plain(record: RoundRecord | Summary) -> dict[str, Any]:
    """A record for JSON, which knows neither NaN nor infinity."""
    values = dataclasses.asdict(record)
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()}


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(data)
    os.replace(temporary, path)
