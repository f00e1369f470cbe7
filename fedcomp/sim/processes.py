"""A worker process, as its parent sees it: an interpreter of its own at the other end of a socket.

It is started by its name, not forked: a fork of a process with threads of OpenMP or numba may stand still for good.
"""

import builtins
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from .. import errors

LARGEST = 1 << 18  # bytes of an answer: more than a socket takes at once
PROGRAM = (
    "import sys; channel, parent, *path = sys.argv[1:]; sys.path[:], sys.argv[1:] = path, []; "
    "from fedcomp.sim.worker import main; main(int(channel), int(parent))"
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
TUNABLES, HUGE_PAGES = (
    "GLIBC_TUNABLES",
    "glibc.malloc.hugetlb=1",
)  # where the system grants them, a tenth of the time of a step


def possible() -> str:
    """Why worker processes cannot be used on this system; "" where they can."""
    return (
        ""
        if hasattr(os, "memfd_create") and hasattr(socket, "SOCK_SEQPACKET")
        else "anonymous shared memory, which Linux has"
    )


class Worker:
    """A worker process, as its parent sees it."""

    def __init__(self, hello: dict[str, Any], folder: str):
        self.link, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = [place for place in sys.path if isinstance(place, str)]
        with other:  # a process group of its own: Ctrl-C is for the parent
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(other.fileno()), str(os.getpid()), *path],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[other.fileno()],
                env=_environment(),
                process_group=0,
                cwd=folder,
            )
            self.send(hello)
        self.ready, self.job, self.known = False, -1, set[int]()

    def send(self, order: dict[str, Any], file: int | None = None) -> None:
        """Raises OSError when the process has ended."""
        socket.send_fds(self.link, [json.dumps(order).encode()], [] if file is None else [file])

    def answer(self) -> dict[str, Any] | None:
        """What it has said; None when it has ended."""
        try:
            said = self.link.recv(LARGEST)
        except ConnectionError:
            said = b""
        return json.loads(said) if said else None

    def end(self) -> str:
        """Kill the process if it is there. Returns how it ended."""
        self.link.close()
        try:
            status = self.process.wait(0.2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return f"was ended ({self.process.wait()})"
        return (
            f"was killed by {signal.Signals(-status).name}"
            if status < 0
            else f"ended with exit status {status}"
        )

    def kill(self) -> None:
        self.link.close()
        self.process.kill()
        self.process.wait()


def _environment() -> dict[str, str]:
    tunables = ":".join(filter(None, [os.environ.get(TUNABLES), HUGE_PAGES]))
    return os.environ | ONE_THREAD | {TUNABLES: tunables}


def error_of(whose: str, name: str, text: str) -> Exception:
    """An exception that reads as the one that a worker met."""
    kind = getattr(errors if whose else builtins, name, None)
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        kind = type(name, (Exception,), {})
    try:
        return kind(text)
    except TypeError:
        return type(name, (Exception,), {})(text)


def end_all(workers: list[Worker], owner: int) -> None:
    if os.getpid() == owner:  # not in a fork of it
        while workers:
            workers.pop().kill()
