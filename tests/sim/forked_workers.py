"""Forked workers for --engine processes, which start faster than new interpreters, since torch is already imported."""

import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
from forks import FORKS

from fedcomp.sim import processes


def run_worker(
    program: str, channel: Connection, path: list[str], environment: dict[str, str]
) -> None:
    """Run the program of a worker in a forked process."""
    os.environ.clear(), os.environ.update(environment)
    os.dup2(2, 1)
    sys.argv = ["-c", str(channel.fileno()), str(os.getppid()), *path]
    exec(program, {})


class ForkedProcess:
    """A forked process with the methods of subprocess.Popen that WorkerEngine calls."""

    def __init__(
        self, command: Sequence[str], *, pass_fds: Sequence[int], env: dict[str, str], **_
    ):
        _, _, program, descriptor, _, *path = command
        assert [int(descriptor)] == list(pass_fds)
        with Connection(os.dup(int(descriptor))) as channel:
            self.process = FORKS.Process(
                target=run_worker, args=(program, channel, path, dict(env)), daemon=True
            )
            self.process.start()
        self.pid, self.kill = self.process.pid, self.process.kill

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("worker", timeout)
        return self.process.exitcode


def fork_workers(patch: pytest.MonkeyPatch) -> None:
    """Fork workers from a process that has imported fedcomp, instead of starting new interpreters."""
    forked = SimpleNamespace(**vars(subprocess) | {"Popen": ForkedProcess})
    patch.setattr(processes, "subprocess", forked)
