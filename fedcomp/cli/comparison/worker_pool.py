"""The processes that check and run alternatives, each order in a free one, so that a run that dies takes no other with it."""

import contextlib
import json
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
STOP_S = 30.0  # time for an interrupted process to finish its round
CHUNK = 1 << 16
Answer = dict[str, Any]


class Process:
    def __init__(self) -> None:
        self.link, other = socket.socketpair()
        self.log = tempfile.TemporaryFile()  # its output, for the error if it dies
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
        """Return new answers, None if the process has ended. Blocks until there is something."""
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

    def end(self, patience_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if patience_s:
                self.process.wait(patience_s)
        self.link.close()
        self.process.kill()
        self.process.wait()
        self.log.close()


class WorkerPool:
    """`count` processes. They are killed on exit; after an interruption, each may finish its round first."""

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
            process.process.send_signal(signal.SIGINT)
        for process in self.busy:
            process.end(STOP_S if interrupted else 0)
        for process in self.free:
            process.end(0)

    def shrink(self, count: int) -> None:
        """Use at most `count` processes from now on, and end superfluous ones."""
        self.count = min(self.count, count)
        while len(self.free) > count:
            self.free.pop().end(0)

    def do(self, orders: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Answer]]:
        """Carry out the orders. Yield (index of the order, answer) as they come; the last answer to each order has `end`."""
        waiting = deque(enumerate(orders))
        with selectors.DefaultSelector() as links:
            while waiting or self.busy:
                while waiting and len(self.busy) < self.count:
                    process = self.free.pop() if self.free else Process()  # one may have died
                    links.register(process.link, selectors.EVENT_READ, process)
                    self.busy.append(process)
                    job, order = waiting.popleft()
                    yield job, {"begun": True}
                    process.send(order, job)
                for key, _ in links.select():
                    yield from self._heard(key.data, links)

    def _heard(
        self, process: Process, links: selectors.BaseSelector
    ) -> Iterator[tuple[int, Answer]]:
        job, answers = process.job, process.answers()
        if answers is None or any("end" in answer for answer in answers):
            links.unregister(process.link)
            self.busy.remove(process)
        if answers is None:
            answers = [{"end": {"failed": process.why_ended(), "status": 1}}]
            process.end(0)
        elif process not in self.busy:
            self.free.append(process)
        for answer in answers:
            yield job, answer
