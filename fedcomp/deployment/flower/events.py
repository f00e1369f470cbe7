"""A file of JSON lines that passes callback calls from the process that runs the rounds to the process that displays them."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from ...callbacks import Callback, ForwardingCallback, Header, PortFigures, Summary
from ...errors import FedcompError, UserError
from ...server.run_folder import parse_record, parse_summary

ENDED, FAILED = "ended", "failed"  # the last event: the run is complete, or has failed


class EventWriter(ForwardingCallback):
    """A callback that writes each call of its methods to a file. Call `forward(ENDED)` to write that the run is complete."""

    def __init__(self, file: TextIO):
        self.file = file

    def forward(self, hook: str, *values: Any) -> None:
        self.file.write(json.dumps([hook, *values], default=asdict) + "\n")
        self.file.flush()

    def failed(self, error: FedcompError) -> None:
        self.forward(FAILED, str(error), error.exit_status)

    def on_port_open(self, port: Callable[[], PortFigures]) -> None:
        """Do nothing, because the function `port` cannot be written to a file."""


class EventReader:
    """A reader of the file that an EventWriter writes. It repeats the writer's method calls on `callback`.

    `ended` is True after ENDED was read. `summary` is the run's summary, or None before the end of the run.
    """

    def __init__(self, path: Path, callback: Callback):
        self.path, self.callback = path, callback
        self.ended = False
        self.summary: Summary | None = None
        self._lines = new_lines(path)

    def read(self) -> None:
        """Repeat the calls that were written since the last `read`. Raises the error that ended the run, if any."""
        for line in self._lines():
            name, *values = json.loads(line)
            if name == FAILED:
                sentence, status = values
                error = (UserError if status == UserError.exit_status else FedcompError)(sentence)
                error.exit_status = status
                raise error
            if name == ENDED:
                self.ended = True
                continue
            if name in READERS:
                values[0] = READERS[name](values[0])
            if name == "on_run_end":
                self.summary = values[0]
            getattr(self.callback, name)(*values)


def new_lines(path: Path) -> Callable[[], Iterator[str]]:
    """Return a function that yields the complete lines added to a file since its last call."""
    read = 0

    def lines() -> Iterator[str]:
        nonlocal read
        if not path.exists() or os.path.getsize(path) <= read:
            return
        with path.open("rb") as file:
            file.seek(read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        read += len(whole)
        yield from whole.decode().splitlines()

    return lines


READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "on_run_start": lambda values: Header(**values | {"measures": tuple(values["measures"])}),
    "on_round_end": parse_record,
    "on_run_end": parse_summary,
}
