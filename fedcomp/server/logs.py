"""A log in JSON lines: one object per event of a run or of a client, with the time in UTC.

Each event of a run corresponds to a hook of `Callback`. For example:

    {"time": "2026-11-21T16:33:08.125Z", "event": "round", "round": 3, "accuracy": 0.91, …}
"""

import dataclasses
import errno
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from datetime import UTC, datetime
from io import RawIOBase
from typing import Any, Self

from ..callbacks import Callback, Header, LogMessage, RoundRecord, Summary, for_json, values_of
from ..config import expand_home
from ..errors import ConfigError, os_errors

STDOUT = "-"
PROGRESS_S = 1.0  # minimum number of seconds between two `progress` events


class JsonLog(Callback):
    """A log with one line of JSON per event, in a file, or on standard output if `where` is "-".

    While the log uses standard output, everything else that is printed goes to standard error. The log is a context manager. On entry, it
    raises ConfigError if its file cannot be written. On exit, it records the exception that ended the run, if any.

    `now` returns the time of an event. `clock` returns seconds, which limit the number of `progress` events.
    """

    def __init__(
        self,
        where: str,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ):
        self.where, self.now, self.clock = where, now, clock
        self._add: Callable[[str], None]
        self._exit_stack = ExitStack()
        self._next_progress = -math.inf

    def __enter__(self) -> Self:
        if self.where == STDOUT:
            self._add = functools.partial(print, file=sys.stdout, flush=True)
            self._exit_stack.enter_context(redirect_stdout(sys.stderr))
            return self
        found = f"--log-json {self.where} cannot be written"
        with os_errors(ConfigError, found, "give a file in an existing folder"):
            file = expand_home(self.where, "--log-json").open("ab", buffering=0)
        self._exit_stack.enter_context(file)
        self._add = functools.partial(_append, file)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._exit_stack, suppress(OSError):
            if isinstance(error, KeyboardInterrupt):
                self.write("interrupted")
            elif error is not None:
                self.write("failed", error=type(error).__name__, reason=str(error))

    def write(self, event: str, /, **values: Any) -> None:
        """Append a line. Raises OSError if that fails."""
        moment = self.now().astimezone(UTC).isoformat(timespec="milliseconds")
        moment = moment.replace("+00:00", "Z")
        self._add(json.dumps({"time": moment, "event": event} | for_json(values), allow_nan=False))

    # The hooks of `Callback`.

    def on_run_start(self, header: Header) -> None:
        self.write("started", **dataclasses.asdict(header))

    def on_waiting(self, connected: Sequence[int], wanted: int) -> None:
        self.write("waiting", here=list(connected), wanted=wanted)

    def on_client_joined(self, client: int) -> None:
        self.write("joined", client=client)

    def on_client_left(self, client: int) -> None:
        self.write("left", client=client)

    def on_progress(self, round: int, answered: int, cohort: int) -> None:
        if (now := self.clock()) >= self._next_progress:
            self._next_progress = now + PROGRESS_S
            self.write("progress", round=round, answered=answered, cohort=cohort)

    def on_round_end(self, record: RoundRecord) -> None:
        for rejection in record.rejections:
            self.write("rejection", round=record.round, **dataclasses.asdict(rejection))
        self.write("round", **values_of(record))

    def on_checkpoint(self, round: int, seconds: float) -> None:
        self.write("checkpoint", round=round, seconds=seconds)

    def on_warning(self, sentence: str) -> None:
        self.write("warning", sentence=sentence)

    def on_run_end(self, summary: Summary, out: str) -> None:
        self.write("finished", out=out, **values_of(summary))

    def write_message(self, sentence: str) -> None:
        """Log a message that a client prints: a LogMessage as an event with its own name and values, other text as the event "said"."""
        if isinstance(sentence, LogMessage):
            self.write(sentence.event, sentence=str(sentence), **sentence.values)
        else:
            self.write("said", sentence=sentence)


def _append(file: RawIOBase, line: str) -> None:
    data = line.encode() + b"\n"
    if file.write(data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
