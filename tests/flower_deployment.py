"""Flower's own SuperLink and SuperNodes as processes that end with the test."""

import json
import os
import re
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deployment import children, free_port

from fedcomp.deployment.flower import processes

HERE = Path(__file__).resolve().parent
SCRIPTS = Path(sysconfig.get_path("scripts"))
CONNECTION = (
    '[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{}"\ninsecure = true\n'
)


class FlowerStage:
    """A SuperLink and its SuperNodes."""

    def __init__(self, folder: Path):
        self.folder, self.started = folder, []
        self.port = free_port()
        self.node_options: list[str] = []
        self.environment = os.environ | {
            "PYTHONPATH": str(HERE.parent),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
            "FLWR_HOME": str(folder / "home"),
            "XDG_STATE_HOME": str(folder / "user-state"),
            "PATH": os.pathsep.join([str(SCRIPTS), os.environ.get("PATH", "")]),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }
        (folder / "home").mkdir()

    def start(self, name: str, *words: str) -> subprocess.Popen:
        with (self.folder / f"{name}.txt").open("ab") as output:
            process = subprocess.Popen(
                [SCRIPTS / words[0], *words[1:]],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.started.append(process)
        return process

    def output(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text()

    def link(self, *options: str, installs: bool = False) -> subprocess.Popen:
        """Start the SuperLink with these options. `installs`: have it install an App's dependencies, as newer versions do by default."""
        home = self.folder / "home"
        address, control = processes.superlink_options("127.0.0.1", self.port, home)
        if installs and processes.NO_INSTALLATION in address:
            address.remove(processes.NO_INSTALLATION)
        elif installs:
            address.append("--allow-runtime-dependency-installation")
        (home / "config.toml").write_text(CONNECTION.format(control[1]))
        link = self.start("superlink", "flower-superlink", "--insecure", *address, *options)
        until(lambda: listens(control), link, lambda: self.output("superlink"))
        return link

    def node(self, partition: int, name: str = "") -> subprocess.Popen:
        """Start a SuperNode. All SuperNodes of a stage have the same port, so only one of them may run at a time."""
        self.node_options = self.node_options or processes.supernode_options(self.folder / "home")
        config = f"partition-id={partition} num-partitions=2"
        where = ["--superlink", f"127.0.0.1:{self.port}"]
        where += self.node_options
        return self.start(
            name or f"node{partition}",
            "flower-supernode",
            "--insecure",
            *where,
            "--node-config",
            config,
        )

    def submit(self, app: Path, *options: str, **config: object) -> str:
        """Start a run of an App with these options and configuration values. Return the run's id."""
        values = " ".join(
            f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in config.items()
        )
        return str(self.flwr("run", str(app), "here", "--run-config", values, *options)["run-id"])

    def id_of(self, node: str) -> str:
        """Return the id that the SuperLink gave a SuperNode; "" if it has none yet."""
        found = re.search(r"SuperNode ID: (\d+)", self.output(node))
        return found[1] if found else ""

    def flwr(self, *words: str) -> dict:
        """Return the JSON answer of a `flwr …` command."""
        answer = json.loads(self.answer("flwr", *words, "--format", "json"))
        assert answer["success"], answer
        return answer

    def answer(self, name: str, *words: str) -> str:
        done = subprocess.run(
            [SCRIPTS / name, *words],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def end(self, process: subprocess.Popen) -> None:
        """Kill a process and its descendants."""
        below = children(process.pid) if process.poll() is None else {process.pid}
        process.kill()
        for each in below - {process.pid}:
            with suppress(ProcessLookupError):
                os.kill(each, 9)
        process.wait()


def listens(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=1).close()
    except OSError:
        return False
    return True


def until(condition, process: subprocess.Popen, output, seconds: float = 200.0) -> None:
    """Wait for a condition. Fails if the process ends before that, or after a timeout."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, output()
        time.sleep(0.05)


@contextmanager
def flower_stage(folder: Path) -> Iterator[FlowerStage]:
    stage = FlowerStage(folder)
    try:
        yield stage
    finally:
        for process in stage.started[::-1]:
            stage.end(process)
