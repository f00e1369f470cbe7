"""A pool of worker processes that execute the runs of a comparison, and the program of a worker process.

The parent process sends requests to check or execute a run. A worker replies to a request with several messages, the last of which has the
key `end`. Requests and messages are pickled dicts. A worker exits when the parent closes the connection. SIGINT interrupts the run of a
worker, as Ctrl-C interrupts `fedcomp sim`. If a worker crashes, the other workers continue.
"""

import contextlib
import dataclasses
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Self

from ...callbacks import Callback, Header, RoundRecord
from ...config import RunConfig
from ...errors import FedcompError

# Python program of a worker process. Its arguments are the file descriptor of the connection, and the entries of the parent's sys.path.
PROGRAM = (
    "import sys; channel, *path = sys.argv[1:]; sys.path[:], sys.argv[1:] = path, []; "
    "from fedcomp.cli.comparison.worker_pool import main; main(int(channel))"
)
STOP_S = 30.0  # time after an interruption, in seconds, in which a worker may finish its round
# Number of bytes at the end of the output of a worker that are read to find its last line.
LOG_TAIL = 1 << 16
Message = dict[str, Any]


class WorkerProcess:
    """A worker process that executes one request at a time."""

    def __init__(self) -> None:
        self.connection, other = Pipe()
        # Output of the worker process. If the process crashes, the error message quotes the last line of the output.
        self.log = tempfile.TemporaryFile()
        path = [place for place in sys.path if isinstance(place, str)]
        with other:  # this process closes its copy of the worker's end of the connection
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(other.fileno()), *path],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                pass_fds=[other.fileno()],
                process_group=0,  # a new process group, so that Ctrl-C reaches only the parent
            )
        self.request = -1  # index of the current request

    def send(self, request: Mapping[str, Any]) -> None:
        # If the process has ended, `receive` reports why.
        with contextlib.suppress(OSError):
            self.connection.send(request)

    def receive(self) -> Message:
        """Wait for the next message of the worker. If its process has ended, return a message that says why the process ended."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return {"end": {"failed": self._exit_reason(), "status": 1}}

    def _exit_reason(self) -> str:
        status = self.process.wait()
        reason = f"ended with exit status {status}"
        if status < 0:
            reason = f"was killed by {signal.Signals(-status).name}"
        self.log.seek(0)
        last_line = self.log.read()[-LOG_TAIL:].decode(errors="replace").strip().split("\n")[-1]
        return f"its process {reason}" + (f": {last_line}" if last_line else "")

    def stop(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for the process to end, then kill it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        self.connection.close()
        self.process.kill()
        self.process.wait()
        self.log.close()


class WorkerPool:
    """A pool of `count` worker processes. On exit, the processes are killed.

    After Ctrl-C, processes are killed only if they have not ended by themselves after STOP_S seconds.
    """

    def __init__(self, count: int):
        self.count = count
        self.free = [WorkerProcess() for _ in range(count)]
        self.busy: list[WorkerProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        interrupted = isinstance(error, KeyboardInterrupt)
        for process in self.busy if interrupted else ():
            process.process.send_signal(signal.SIGINT)
        for process in self.busy:
            process.stop(STOP_S if interrupted else 0)
        for process in self.free:
            process.stop(0)

    def shrink(self, count: int) -> None:
        """Reduce the pool to at most `count` worker processes."""
        self.count = min(self.count, count)
        while len(self.free) > count:
            self.free.pop().stop(0)

    def run(self, requests: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Message]]:
        """Send the requests to workers, and yield (index of the request, message) for each message."""
        waiting = deque(enumerate(requests))
        while waiting or self.busy:
            while waiting and len(self.busy) < self.count:
                # After a crash, fewer than `count` workers exist.
                process = self.free.pop() if self.free else WorkerProcess()
                process.request, request = waiting.popleft()
                self.busy.append(process)
                yield process.request, {"started": True}
                process.send(request)
            workers: dict[Any, WorkerProcess] = {p.connection: p for p in self.busy}
            for connection in wait(workers):
                process = workers[connection]
                message = process.receive()
                if "end" in message:
                    self.busy.remove(process)
                    if process.process.returncode is None:
                        self.free.append(process)
                    else:
                        process.stop(0)
                yield process.request, message


Send = Callable[..., None]


def main(channel: int) -> None:
    """Execute the requests that the parent process sends through the connection with file descriptor `channel`."""
    connection = Connection(channel)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, requests), daemon=True).start()

    def send(**message: Any) -> None:
        connection.send(message)

    try:
        from ...sim import run  # noqa: F401 — load torch before the first request

        while True:
            _execute(requests.get(), send)
    except KeyboardInterrupt:
        os._exit(130)


def _listen(connection: Connection, requests: queue.SimpleQueue[Any]) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            requests.put(connection.recv())
    os._exit(0)


def _execute(request: dict[str, Any], send: Send) -> None:
    """Execute a request, and send messages to the parent process."""
    try:
        if request["action"] == "check":
            send(end=check(request["values"]))
        else:
            send(end=run(request["values"], request["threads"], send))
    except FedcompError as error:
        send(end={"failed": str(error), "status": error.exit_status})
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        first_line = str(error).strip().partition("\n")[0]
        send(end={"failed": f"{type(error).__name__}: {first_line}", "status": 1})


def check(values: dict[str, Any]) -> dict[str, Any]:
    """Check the options of a run. Return its engine, device, model size, and options with the values that fedcomp chose (`config`).

    `config` has no run folder, so that it shows whether two runs have the same options.
    """
    from ...sim.run import PreparedRun

    prepared = PreparedRun(RunConfig(**values), Callback())
    return {
        "config": dataclasses.replace(prepared.config, out=None, resume=False),
        "engine": prepared.engine_choice.engine,
        "device": prepared.device.type,
        "on": prepared.engine_choice.device,
        "parameters": prepared.layout.numel,
    }


def run(values: dict[str, Any], threads: int, send: Send) -> dict[str, Any]:
    """Execute a run with `threads` torch threads. 0 means torch's default number."""
    import torch

    from ...sim import simulate
    from ..report import page

    if threads:
        torch.set_num_threads(threads)
    sender = ProgressSender(send)
    simulate(RunConfig(**values), sender)
    page.after_run(Path(sender.out), sender.on_warning)
    return {"done": sender.out}


class ProgressSender(Callback):
    """A callback that sends the progress of a run to the parent process."""

    def __init__(self, send: Send):
        self.send, self.out = send, ""

    def on_run_start(self, header: Header) -> None:
        from ...server.run_folder import METRICS, read_records

        self.out = header.out
        self.send(earlier=read_records(Path(self.out) / METRICS))

    def on_round_end(self, record: RoundRecord) -> None:
        self.send(round=record)

    def on_warning(self, sentence: str) -> None:
        self.send(warning=sentence)
