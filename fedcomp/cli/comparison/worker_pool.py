"""The processes that check and run alternatives, each order in a free one, so that a run that dies takes no other with it."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Pipe, wait
from typing import Any, Self

PROGRAM = (
    "import sys; channel, *path = sys.argv[1:]; sys.path[:], sys.argv[1:] = path, []; "
    "from fedcomp.cli.comparison.worker import main; main(int(channel))"
)
STOP_S = 30.0  # time for an interrupted process to finish its round
LOG_TAIL = 1 << 16  # bytes
Answer = dict[str, Any]


class WorkerProcess:
    def __init__(self) -> None:
        self.link, other = Pipe()
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
        self.job = -1  # index of its order

    def send(self, order: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # `answer` tells that the process has ended
            self.link.send_bytes(json.dumps(order).encode())

    def answer(self) -> Answer:
        """Return the next answer; for a process that has ended, the reason."""
        try:
            return json.loads(self.link.recv_bytes())
        except (EOFError, OSError):
            return {"end": {"failed": self._why_ended(), "status": 1}}

    def _why_ended(self) -> str:
        status = self.process.wait()
        how = f"ended with exit status {status}"
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        self.log.seek(0)
        last_line = self.log.read()[-LOG_TAIL:].decode(errors="replace").strip().split("\n")[-1]
        return f"its process {how}" + (f": {last_line}" if last_line else "")

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
        self.free = [WorkerProcess() for _ in range(count)]
        self.busy: list[WorkerProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
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
        while waiting or self.busy:
            while waiting and len(self.busy) < self.count:
                process = self.free.pop() if self.free else WorkerProcess()  # one may have died
                process.job, order = waiting.popleft()
                self.busy.append(process)
                yield process.job, {"begun": True}
                process.send(order)
            links: dict[Any, WorkerProcess] = {process.link: process for process in self.busy}
            for link in wait(links):
                process = links[link]
                answer = process.answer()
                if "end" in answer:
                    self.busy.remove(process)
                    if process.process.returncode is None:
                        self.free.append(process)
                    else:
                        process.end(0)
                yield process.job, answer
