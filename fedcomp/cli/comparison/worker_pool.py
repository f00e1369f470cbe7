"""A pool of processes that check and run alternatives. The crash of one process does not affect the others."""

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
    """A process that executes one order at a time."""

    def __init__(self) -> None:
        self.link, other = Pipe()
        self.log = tempfile.TemporaryFile()  # its output, quoted in the error message if it crashes
        path = [place for place in sys.path if isinstance(place, str)]
        with other:  # in a new process group, so that Ctrl-C reaches the parent only
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(other.fileno()), *path],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                pass_fds=[other.fileno()],
                process_group=0,
            )
        self.order = -1  # index of its order

    def send(self, order: Mapping[str, Any]) -> None:
        """Send an order."""
        with contextlib.suppress(OSError):  # `answer` reports the end of the process
            self.link.send_bytes(json.dumps(order).encode())

    def answer(self) -> Answer:
        """Wait for the next answer. A process that has ended answers with the reason."""
        try:
            return json.loads(self.link.recv_bytes())
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
        """Wait at most `timeout_s` for the process to end, then kill it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if timeout_s:
                self.process.wait(timeout_s)
        self.link.close()
        self.process.kill()
        self.process.wait()
        self.log.close()


class WorkerPool:
    """A pool of `count` processes. They are killed on exit; after an interruption, each may finish its round first."""

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
        """Reduce the pool to at most `count` processes."""
        self.count = min(self.count, count)
        while len(self.free) > count:
            self.free.pop().stop(0)

    def run(self, orders: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Answer]]:
        """Execute the orders. Yield (index of the order, answer) in order of arrival; the last answer to each order has the key `end`."""
        waiting = deque(enumerate(orders))
        while waiting or self.busy:
            while waiting and len(self.busy) < self.count:
                process = self.free.pop() if self.free else WorkerProcess()  # one may have crashed
                process.order, order = waiting.popleft()
                self.busy.append(process)
                yield process.order, {"started": True}
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
                        process.stop(0)
                yield process.order, answer
