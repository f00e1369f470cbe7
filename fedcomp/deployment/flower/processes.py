"""Flower's commands, run as child processes. On Linux, the child processes are killed when this process ends."""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ...errors import FedcompError
from ...keys.connection import join_address
from ..ports import LOOPBACK, listen

STOP_S = 5.0  # time for a process to end before it is killed
HELP_S = 60.0  # time limit of a command with --help
PR_SET_PDEATHSIG = 1  # prctl option of Linux: kill a process when its parent ends
# Option with which the SuperLink installs no packages for Apps.
NO_INSTALLATION = "--disable-runtime-dependency-installation"


def script(name: str, env: dict[str, str]) -> str:
    """Return the path of an installed command. Raises FedcompError if the command is not installed."""
    command = shutil.which(name, path=env["PATH"])
    if command is None:
        raise FedcompError(
            f"the command {name} is not installed; install it with: {sys.executable} -m pip install flwr"
        )
    return command


def environment(home: Path) -> dict[str, str]:
    """Return the environment variables for a Flower command that keeps its files in `home` and sends no telemetry.

    PATH begins with the folder of commands that are installed for this Python.
    """
    settings = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "NO_COLOR": "1",
        "NO_PROXY": LOOPBACK,
        "PYTHONUNBUFFERED": "1",
    }
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    return os.environ | settings | {"FLWR_HOME": str(home), "PATH": path}


def run(
    command: Sequence[str], home: Path, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a Flower command until it ends."""
    env = environment(home)
    return subprocess.run(
        [script(command[0], env), *command[1:]],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def help_of(name: str, home: Path) -> str:
    """Return the help text of a Flower command, from which the options of the installed version are read."""
    return run([name, "--help"], home, HELP_S).stdout


def superlink_options(host: str, port: int, home: Path) -> tuple[list[str], tuple[str, int]]:
    """Return the command-line options for a SuperLink (Flower's server program) at `host:port`, and the address of its Control API.

    The command `flwr` submits runs through the Control API. Older versions of Flower use one port for each API of the SuperLink, and newer
    versions use one port for all APIs.
    """
    help_text, control = help_of("flower-superlink", home), (host, port)
    if "--serverappio-api-address" in help_text:
        control = LOOPBACK, free_port()
        options = ["--fleet-api-address", join_address(host, port)]
        options += ["--control-api-address", join_address(*control)]
        options += ["--serverappio-api-address", f"{LOOPBACK}:{free_port()}"]
    else:
        options = ["--host", host, "--port", str(port)]
    if NO_INSTALLATION in help_text:
        options.append(NO_INSTALLATION)
    if host in ("0.0.0.0", "::"):
        control = LOOPBACK, control[1]
    return options, control


def supernode_options(home: Path) -> list[str]:
    """Return the command-line options with which a SuperNode (Flower's client program) uses a free loopback port for its ClientApp."""
    address = f"{LOOPBACK}:{free_port()}"
    if "--clientappio-api-address" in help_of("flower-supernode", home):
        return ["--clientappio-api-address", address]
    return ["--host", LOOPBACK, "--port", address.rpartition(":")[2]]


def start(command: Sequence[str], home: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start a Flower command that appends its output to the file `log`. Ctrl-C in the terminal does not reach the command."""
    libc, parent = ctypes.CDLL(None), os.getpid()

    def die_with_parent() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the call of prctl
            os._exit(1)

    env = environment(home)
    with log.open("ab") as output:
        return subprocess.Popen(
            [script(command[0], env), *command[1:]],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process, or kill it if it still runs after 5 s. Then kill all processes of its process group.

    Flower's SuperLink also starts processes in other process groups. On Linux, these have another 5 s to end before they are killed.
    """
    descendants = _descendants(process.pid)
    try:
        process.terminate()
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + STOP_S
    for descendant in descendants:
        # The descriptor is readable once the descendant has ended.
        select.select([descendant], [], [], max(0.0, deadline - time.monotonic()))
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(descendant, signal.SIGKILL)
        os.close(descendant)


def _descendants(pid: int) -> list[int]:
    """Return a file descriptor of each descendant of a process on Linux, and an empty list on other systems."""
    children: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has just ended
            children += map(int, file.read_text().split())
    found = []
    for child in children:
        with suppress(OSError):  # the child has just ended
            found.append(os.pidfd_open(child))
        found += _descendants(child)
    return found


def free_port() -> int:
    with listen(LOOPBACK, 0) as listener:
        return listener.getsockname()[1]
