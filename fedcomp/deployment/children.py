"""Programs of Flower as children of this process, gone when it goes, however it goes."""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from ..errors import FedcompError

LOOPBACK = "127.0.0.1"
STOP_S = 5.0
PR_SET_PDEATHSIG = 1


def script(name: str) -> str:
    """The path of a command that is installed beside this Python. Raises FedcompError."""
    path = Path(sysconfig.get_path("scripts")) / name
    found = str(path) if path.exists() else shutil.which(name)
    if found is None:
        raise FedcompError(
            f"the command {name} is not installed beside {sys.executable}; install flwr there"
        )
    return found


def environment(home: Path) -> dict[str, str]:
    """Variables for a program of Flower that keeps what it needs in `home`, and tells nobody."""
    quiet = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "NO_COLOR": "1",
        "NO_PROXY": LOOPBACK,
    }
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    return os.environ | quiet | {"FLWR_HOME": str(home), "PATH": path}


def start(
    command: Sequence[str],
    variables: dict[str, str],
    output: object,
    errors: int = subprocess.STDOUT,
) -> subprocess.Popen:
    """A process in a group of its own, that the terminal's Ctrl-C does not reach, and that is killed when this process is gone."""
    libc, parent = ctypes.CDLL(None), os.getpid()

    def follow() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    linux = sys.platform == "linux"
    return subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        start_new_session=True,
        preexec_fn=follow if linux else None,
    )


def end(process: subprocess.Popen) -> None:
    """Ask it to end, and after a while see to it; its own children that are still in its group too."""
    try:
        process.terminate()
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]
