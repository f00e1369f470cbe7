"""Real servers and clients on loopback, as processes that end with the test.

They are forked from a process that has already imported fedcomp. tests/cli/test_interruption.py and tests/test_package.py test that
`python -m fedcomp` also starts without this.
"""

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forks import FORKS

HERE = Path(__file__).resolve().parent
TASK = f"{HERE / 'tiny_task.py'}:task"
WIDE = ["--task", f"{HERE / 'tiny_task.py'}:wide"]  # another model
DEADLY_TASK = f"{HERE / 'deadly_task.py'}:task"
ENVIRONMENT = os.environ | {
    "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


def fedcomp(folder: Path, output: Path, variables: dict[str, str], words: tuple[str, ...]) -> None:
    """Run `python -m fedcomp` in this process, with its output in a file."""
    import torch

    from fedcomp.__main__ import main

    with output.open("ab") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(write_through=True), sys.stderr.reconfigure(write_through=True)
    os.chdir(folder)
    os.environ.clear(), os.environ.update(variables)
    torch.set_num_threads(1)
    sys.argv = ["fedcomp", *words]
    main()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Command:
    """A `fedcomp …` process with its output so far."""

    def __init__(self, folder: Path, name: str, *words: str, **variables: str):
        self.path = folder / f"{name}.txt"
        self.path.touch()
        self.process = FORKS.Process(
            target=fedcomp, args=(folder, self.path, ENVIRONMENT | variables, words)
        )
        self.process.start()

    @property
    def output(self) -> str:
        return self.path.read_text()

    @property
    def status(self) -> int | None:
        """The exit status; None while the process runs."""
        return self.process.exitcode

    def wait_for(self, pattern: str, seconds: float = 100.0) -> re.Match:
        """Wait until the output matches `pattern`. Fails if the process ends before that, or after a timeout."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.output, re.MULTILINE)):
            assert self.status is None and time.monotonic() < deadline, (
                f"no {pattern!r} in:\n{self.output}"
            )
            time.sleep(0.02)
        return match

    def end(self, seconds: float = 100.0) -> int:
        self.process.join(seconds)
        assert self.status is not None, f"the process did not end:\n{self.output}"
        return self.status

    def kill(self) -> None:
        if self.status is None:
            self.process.kill()
        self.process.join()

    def send(self, number: signal.Signals) -> None:
        if self.status is None:
            os.kill(self.process.pid, number)

    def interrupt(self, number: signal.Signals) -> int:
        self.send(number)
        return self.end()


class Stage:
    """A server and its clients, started in a folder."""

    def __init__(self, folder: Path):
        self.folder, self.port, self.commands = folder, free_port(), []

    def start(self, name: str, *words: str, **variables: str) -> Command:
        self.commands.append(Command(self.folder, name, *words, **variables))
        return self.commands[-1]

    def server(self, *words: str) -> Command:
        return self.start(
            "server",
            "server",
            "start",
            "--port",
            str(self.port),
            "--task",
            TASK,
            "--plain",
            "--out",
            "run",
            *words,
        )

    def client(self, partition: int, *words: str, name: str = "", kill_at: int = 0) -> Command:
        """Start a client. `kill_at`: the training step, counted from the start of its process, in which it is killed; 0: never."""
        task, variables = (DEADLY_TASK, {"KILL_AT": str(kill_at)}) if kill_at else (TASK, {})
        there = [
            "--server",
            f"127.0.0.1:{self.port}",
            "--partition-id",
            str(partition),
            "--task",
            task,
        ]
        return self.start(name or f"client{partition}", "client", *there, *words, **variables)


@contextmanager
def stage(folder: Path) -> Iterator[Stage]:
    made = Stage(folder)
    try:
        yield made
    finally:
        for command in made.commands:
            command.kill()


def children(process: int) -> set[int]:
    """Return the descendants of a process."""
    found, rows = set(), {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            rows[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    grown = {process}
    while grown:
        grown = {child for child, parent in rows.items() if parent in grown}
        found |= grown
    return found


def running(processes: set[int]) -> set[int]:
    """Return the processes that still run. Zombies do not count."""

    def alive(process: int) -> bool:
        try:
            return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return {process for process in processes if alive(process)}


def gone(processes: set[int], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while running(processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not running(processes)


def commands(processes: set[int]) -> list[str]:
    """Return the command lines of those processes that still run."""
    found = []
    for process in sorted(processes):
        try:
            found.append(Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")[:200])
        except OSError:
            continue
    return found
