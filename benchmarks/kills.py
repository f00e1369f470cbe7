"""Test that a deployment whose processes are killed at random times trains the same model, byte for byte, as an undisturbed run.

    python benchmarks/kills.py [--kills 100] [--seed 1]

The deployment runs on loopback with TLS and keys. The processes are a server, a relay with three clients, and a fourth client that is
connected directly to the server. Every round needs every client. Each kill sends SIGKILL to one of the six processes and starts it again;
the server is started with --resume. Half of the kills come after the end of a round, the others at any time, even while a process is
starting. After the last kill, an undisturbed run trains the same number of rounds.

The exit status is 0 for equal models, 1 for different models, and 2 if a process failed without being killed.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

FEDCOMP = [sys.executable, "-m", "fedcomp"]
ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "PYTHONUNBUFFERED": "1",
}
CLIENTS, RELAYED = 4, 3  # the first three clients connect to the relay
NO_END = 1_000_000  # requested rounds of the disturbed run; it is stopped soon after the last kill
LAST_ROUNDS = 5  # rounds without kills at the end of the disturbed run
MAX_WAIT_S = 6.0  # longest time to wait for a completed round before a kill
MAX_PAUSE_S = 2.0  # longest random pause before a kill
STUCK_S = 180.0  # the test fails if no round is completed for this time
# A training step takes two milliseconds, so that many kills hit a client that is training.
TASK = """\
import time

import torch
from torch import nn

from fedcomp import Data, Task


def data(examples, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(examples, 50, generator=generator)
    return Data(inputs, inputs[:, :10].argmax(1))


def loss(outputs, targets):
    time.sleep(0.002)
    return nn.functional.cross_entropy(outputs, targets)


task = Task(
    "slow", lambda: nn.Linear(50, 10), train=lambda: data(2000, 1), test=lambda: data(100, 2), loss=loss
)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "slow_task.py").write_text(TASK)
        for words in (["init", "--clients", str(CLIENTS)], ["add", "--relay"]):
            keys = [*FEDCOMP, "keys", *words, "--host", "localhost"]
            subprocess.run(keys, cwd=folder, env=ENVIRONMENT, check=True, capture_output=True)
        disturbed = Deployment(folder, "disturbed")
        kills = disturbed.survive(args.kills, random.Random(args.seed))
        undisturbed = Deployment(folder, "undisturbed")
        undisturbed.finish(disturbed.rounds)
    print("kills        " + ", ".join(f"{count} of {kind}" for kind, count in kills.items()))
    for run in (undisturbed, disturbed):
        print(
            f"{run.name:12} {run.model}, {run.rounds} rounds, {run.rejected} updates rejected, {run.seconds:.0f} s"
        )
    if disturbed.model != undisturbed.model:
        raise SystemExit("the models differ")
    print("the models have the same bytes")


class Deployment:
    """A run with its own folder and the processes "server", "relay" and "client 0" to "client 3"."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name
        self.run = folder / name / "run"
        (folder / name).mkdir()
        self.port, self.relay_port = free_port(), free_port()
        self.rounds_wanted = NO_END
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.rounds, self.rejected, self.seconds, self.model = 0, 0, 0.0, ""

    def survive(self, kills: int, draws: random.Random) -> Counter[str]:
        """Run while killing `kills` processes, then LAST_ROUNDS rounds without kills. Return the number of kills by kind of process."""
        began, killed = time.monotonic(), Counter()
        names = ["server", "relay", *(f"client {i}" for i in range(CLIENTS))]
        for name in names:
            self.start(name)
        self.wait_for_rounds(1, STUCK_S)
        for _ in range(kills):
            if draws.random() < 0.5:
                self.wait_for_rounds(1, MAX_WAIT_S)
            time.sleep(draws.uniform(0, MAX_PAUSE_S))
            name = draws.choice(names)
            self.kill(name)
            killed[name.split()[0]] += 1
            self.start(name)
        self.wait_for_rounds(1, STUCK_S)
        # Restart the server with the number of its last round; this restart is not counted as a kill.
        self.kill("server")
        self.finish(self.done + LAST_ROUNDS)
        self.seconds = time.monotonic() - began
        return killed

    def finish(self, rounds: int) -> None:
        """Run without kills until `rounds` rounds are completed."""
        began, self.rounds_wanted = time.monotonic(), rounds
        for name in ["server", "relay", *(f"client {i}" for i in range(CLIENTS))]:
            if name not in self.processes:
                self.start(name)
        while self.processes["server"].poll() is None:
            self.wait_for_rounds(1, STUCK_S)
        self.check("server")
        for process in self.processes.values():
            process.terminate()
            process.wait()
        self.rounds, self.seconds = self.done, time.monotonic() - began
        records = map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines())
        self.rejected = sum(record["rejected"] for record in records)
        model = (self.run / "model.safetensors").read_bytes()
        self.model = hashlib.sha256(model).hexdigest()

    @property
    def done(self) -> int:
        path = self.run / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_for_rounds(self, rounds: int, timeout_s: float) -> None:
        """Wait until `rounds` more rounds are completed, the server has exited, or `timeout_s` seconds have passed."""
        wanted, deadline = self.done + rounds, time.monotonic() + timeout_s
        while self.done < wanted and self.processes["server"].poll() is None:
            for name in self.processes:
                self.check(name)
            if time.monotonic() > deadline:
                if timeout_s >= STUCK_S:
                    self.fail("server", f"completed no round in {timeout_s:g} s")
                return
            time.sleep(0.02)

    def check(self, name: str) -> None:
        """Exit with status 2 if the process `name` failed without being killed."""
        if self.processes[name].poll():
            self.fail(name, f"ended with status {self.processes[name].returncode}")

    def fail(self, name: str, problem: str) -> None:
        for process in self.processes.values():
            process.kill()
        text = self.output(name).read_text()[-3000:]
        print(f"{name} {problem}:\n{text}", file=sys.stderr)
        raise SystemExit(2)

    def kill(self, name: str) -> None:
        self.check(name)
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def start(self, name: str) -> None:
        with self.output(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*FEDCOMP, *self.command(name)],
                cwd=self.folder,
                env=ENVIRONMENT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def output(self, name: str) -> Path:
        return self.folder / self.name / f"{name}.txt"

    def command(self, name: str) -> list[str]:
        kind, _, number = name.partition(" ")
        port, task = str(self.port), "slow_task.py:task"
        if kind == "server":
            shape = f"--clients {CLIENTS} --participation 1 --rounds {self.rounds_wanted} --local-steps 20"
            rest = f"--uplink stc:density=1/20 --eval-every {NO_END} --plain --port {port} --task {task}"
            resume = ["--resume"] if (self.run / "config.toml").exists() else []
            return [*f"server start {shape} {rest}".split(), "--out", str(self.run), *resume]
        if kind == "relay":
            ports = ["--server", f"localhost:{port}", "--port", str(self.relay_port)]
            return ["relay", *ports, "--enrolment", "keys/relays/0.toml"]
        where = self.relay_port if int(number) < RELAYED else port
        own = ["--enrolment", f"keys/clients/{number}.toml", "--partition-id", number]
        state = ["--state-dir", f"{self.name}/state-{number}"]
        return ["client", "--server", f"localhost:{where}", "--task", task, *own, *state]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
