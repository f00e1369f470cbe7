"""The run folder contains the files of a run:

config.toml        every option with its resolved value, and the choices for this machine, such as the engine;
metrics.jsonl      one line per round (callbacks.RoundRecord);
summary.json       totals (callbacks.Summary);
model.safetensors  the trained parameters under the names of the user's module, or its whole state_dict() if it has buffers;
checkpoint/        the state from which --resume continues (server/checkpoint.py).
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import tomli_w
from safetensors.torch import save_file
from torch import Tensor

from .. import durable_files
from ..callbacks import (
    ClientMetric,
    ClientRecord,
    Rejection,
    RejectionSummary,
    RoundRecord,
    Summary,
    values_of,
)
from ..config import RUN_FILE, RunConfig, first_difference, flag, read_run, settings
from ..errors import RunFolderError
from ..out_folder import OutFolder
from ..tasks import OBJECT

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
MODEL = "model.safetensors"
CHECKPOINT = "checkpoint"


class RunFolder(OutFolder):
    """The folder of one run. Without --out, `open` creates a folder with a new name and sets `path`.

    The constructor raises RunFolderError, before anything is written, if the run is new and the folder --out is not empty, or if the run is
    resumed and the folder --out contains no run with these options.
    """

    def __init__(self, config: RunConfig):
        super().__init__(config.out, _folder_label(config.task), "run", config.resume)
        self.stored = self._stored(config) if config.resume else {}

    def write_config(self, config: RunConfig, resolved: dict[str, Any]) -> None:
        """Write config.toml: every option, and the choices for this machine in the table [resolved]."""
        values = settings(config) | {"out": str(self.path), "resolved": resolved}
        self._replace(RUN_FILE, tomli_w.dumps(values))

    def _stored(self, config: RunConfig) -> dict[str, Any]:
        stored = read_run(self.path)
        name = first_difference(config, stored)
        if name:
            before, now = (values.get(name, "not given") for values in (stored, settings(config)))
            raise RunFolderError(
                f"{flag(name)} differs from the run in {self.path} (there {before}, now {now}); give the value of that run, or start a "
                "new run with another --out"
            )
        return stored

    def append(self, record: RoundRecord) -> int:
        """Append a record to metrics.jsonl. Return the new size of the file in bytes."""
        with self._writing(), open(self.path / METRICS, "ab") as file:
            file.write((json.dumps(values_of(record)) + "\n").encode())
            return file.tell()

    def records(self) -> list[RoundRecord]:
        return read_records(self.path / METRICS)

    def truncate_metrics(self, length: int) -> None:
        """Truncate metrics.jsonl to `length` bytes, its size at the checkpoint. Raises RunFolderError if it is shorter or damaged."""
        path = self.path / METRICS
        size = path.stat().st_size if path.exists() else 0
        if size < length:
            raise _damaged(
                path, f"the file has {size} bytes, but had {length} when the checkpoint was written"
            )
        if size > length:
            with self._writing():
                os.truncate(path, length)
        self.records()

    def write_model(self, tensors: dict[str, Tensor]) -> None:
        """Write model.safetensors. The tensors must be contiguous, on the CPU, and must not share memory."""
        with self._writing(), durable_files.replacing(self.path / MODEL) as temporary:
            save_file(tensors, temporary)
            durable_files.flush(temporary)

    def write_summary(self, summary: Summary) -> None:
        self._replace(SUMMARY, json.dumps(values_of(summary), indent=2) + "\n")


def read_records(path: Path) -> list[RoundRecord]:
    """Return the records in a metrics.jsonl file, or [] if there is none. Raises RunFolderError for a damaged file.

    A last line without a newline is ignored, because the process may have been killed while it wrote the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        return [parse_record(json.loads(line)) for line in lines]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(path, error) from error


def read_summary(path: Path) -> Summary | None:
    """Return the content of a summary.json file, or None if there is none. Raises RunFolderError for a damaged file."""
    try:
        return parse_summary(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, why: object) -> RunFolderError:
    return RunFolderError(f"{path} is damaged ({why}); start a new run with another --out")


def parse_summary(values: dict[str, Any]) -> Summary:
    """Return the Summary for the parsed content of summary.json."""
    lists = {
        "warnings": tuple(values["warnings"]),
        "rejections": tuple(RejectionSummary(**r) for r in values["rejections"]),
        "client_metrics": client_metrics_of(values),
    }
    return Summary(**values | lists)


def parse_record(values: dict[str, Any]) -> RoundRecord:
    """Return the RoundRecord for a parsed line of metrics.jsonl."""
    lists: dict[str, Any] = {
        "rejections": tuple(Rejection(**r) for r in values["rejections"]),
        "warnings": tuple(values["warnings"]),
        "by_client": tuple(ClientRecord(**c) for c in values.get("by_client", ())),
        "suspicion": {int(c): fraction for c, fraction in values.get("suspicion", {}).items()},
        "metrics": dict(values.get("metrics", {})),
        "client_metrics": client_metrics_of(values),
    }
    numbers = {name: value for name, value in values.items() if name not in lists}
    for name, value in (numbers | lists["metrics"]).items():
        if not isinstance(value, int | float | None):
            raise ValueError(f"the field '{name}' of a line is not a number")
    return RoundRecord(**values | lists)


def client_metrics_of(values: dict[str, Any]) -> dict[str, ClientMetric]:
    """Return the metrics that clients reported, from a parsed line of metrics.jsonl or from summary.json."""
    reported = values.get("client_metrics", {})
    return {name: ClientMetric(**spread) for name, spread in reported.items()}


def _folder_label(task: str) -> str:
    """Return a task's name for the name of a run folder."""
    if task.startswith(OBJECT):
        return re.sub(r"\W+", "-", task.removeprefix(OBJECT)).strip("-") or "task"
    return Path(task.partition(":")[0]).stem.strip("-") or "task"
