"""The processes that run alternatives, as their parent sees them: whoever is free gets the next order."""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

PROGRAM = (
    "import sys; channel, *path = sys.argv[1:]; sys.path[:], sys.argv[1:] = path, []; "
    "from fedcomp.cli.comparison.worker import main; main(int(channel))"
)
STOP_S = 30.0  # in which a process that is interrupted ends the round that it may be in
CHUNK = 1 << 16
Answer = dict[str, Any]


class Process:
    """One of them."""

    def __init__(self) -> None:
        self.link, other = socket.socketpair()
        self.log = tempfile.TemporaryFile()  # what it prints, for the case that it dies
        path = [place for place in sys.path if isinstance(place, str)]
        with other:  # a process group of its own: Ctrl-C is for the parent
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(other.fileno()), *path],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                pass_fds=[other.fileno()],
                process_group=0,
            )
        self.job: int | None = None
        self._unfinished = b""

    def send(self, order: Mapping[str, Any], job: int) -> None:
        self.job = job
        with contextlib.suppress(OSError):  # its end is heard when it is listened to
            self.link.sendall(json.dumps(order).encode() + b"\n")

    def answers(self) -> list[Answer] | None:
        """What it has said since the last time; None when it has ended. Blocks until there is something."""
        try:
            said = self.link.recv(CHUNK)
        except ConnectionError:
            said = b""
        if not said:
            return None
        *lines, self._unfinished = (self._unfinished + said).split(b"\n")
        return [json.loads(line) for line in lines]

    def why_ended(self) -> str:
        status = self.process.wait()
        how = (
            f"was killed by {signal.Signals(-status).name}"
            if status < 0
            else f"ended with exit status {status}"
        )
        self.log.seek(0)
        said = self.log.read()[-CHUNK:].decode(errors="replace").strip()
        return f"its process {how}" + (f": {said.rpartition(chr(10))[2]}" if said else "")

    def interrupt(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def end(self, patience_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if patience_s:
                self.process.wait(patience_s)
        self.link.close()
        self.process.kill()
        self.process.wait()
        self.log.close()


class WorkerPool:
    """`count` processes, ended when this is left: at once, or where an interruption is why, when each has put down what it was at."""

    def __init__(self, count: int):
        self.count = count
        self.free = [Process() for _ in range(count)]
        self.busy: list[Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        interrupted = isinstance(error, KeyboardInterrupt)
        for process in self.busy if interrupted else ():
            process.interrupt()
        for process in self.busy:
            process.end(STOP_S if interrupted else 0)
        for process in self.free:
            process.end(0)

    def shrink(self, count: int) -> None:
        """Use at most `count` processes from now on. Ends those that are free beyond it."""
        self.count = min(self.count, count)
        while len(self.free) > count:
            self.free.pop().end(0)

    def do(self, orders: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Answer]]:
        """Have the orders obeyed; yields (which order, what is said of it) as it is said. The last that is said of each has `end`."""
        waiting = deque(enumerate(orders))
        with selectors.DefaultSelector() as ears:
            while waiting or self.busy:
                while waiting and len(self.busy) < self.count:
                    process = self.free.pop() if self.free else Process()  # one may have died
                    ears.register(process.link, selectors.EVENT_READ, process)
                    self.busy.append(process)
                    job, order = waiting.popleft()
                    yield job, {"begun": True}
                    process.send(order, job)
                for key, _ in ears.select():
                    yield from self._heard(key.data, ears)

    def _heard(
        self, process: Process, ears: selectors.BaseSelector
    ) -> Iterator[tuple[int, Answer]]:
        job, answers = process.job, process.answers()
        if answers is None:
            ears.unregister(process.link)
            self.busy.remove(process)
            why = process.why_ended()
            process.end(0)
            yield job, {"end": {"failed": why, "status": 1}}
        for answer in answers or ():
            if "end" in answer:
                ears.unregister(process.link)
                self.busy.remove(process)
                self.free.append(process)
            yield job, answer


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
