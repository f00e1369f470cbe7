"""Time, bytes and memory of a deployment on this machine: a server, and all its clients in other processes, over real sockets.

    python benchmarks/deployed.py [--clients 10 50 200] [--rounds 20]                    seconds and bytes per exchange
    python benchmarks/deployed.py --parameters 11M --uplink identity --downlink identity   the same with a large model
    python benchmarks/deployed.py --idle 300                                             bytes per second that waiting clients cause
    python benchmarks/deployed.py --memory [--clients 50] [--rounds 300]                 memory of the server over the rounds
    python benchmarks/deployed.py --relay [--clients 200]                                seconds and bytes with a relay
    python benchmarks/deployed.py --connected 10000                                      memory of a server for each connected client
    python benchmarks/deployed.py --client-memory [--parameters 11M]                     memory of a client in addition to its training step

The training step is very small, so that the benchmark measures everything but training. --secure uses TLS and enrolled keys. Each table
ends with the load average of the machine; results are not reliable if other processes cause load.
"""

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FEDCOMP = [sys.executable, "-m", "fedcomp"]
ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "PYTHONUNBUFFERED": "1",
}
# largest number of clients in a process, because each client needs two open files: a connection and a state file
MAX_HOSTED = 5000
PORT_BYTES = ("fedcomp_wire_received_bytes_total", "fedcomp_wire_sent_bytes_total")
SUFFIXES = {"k": 1_000, "M": 1_000_000}
WIDE_TASK = """\
import torch
from torch import nn

from fedcomp import Data, Task


def data(examples, seed):
    generator = torch.Generator().manual_seed(seed)
    return Data(torch.randn(examples, 1000, generator=generator), torch.arange(examples) % {classes})


task = Task("wide", lambda: nn.Linear(1000, {classes}), train=lambda: data({examples}, 1), test=lambda: data(20, 2))
"""
# Program that runs only the training step of a client, without a server.
STEP = """\
import statistics, sys, time, torch
from fedcomp import RunConfig, malloc
from fedcomp.training.local_sgd import plan_batches
from fedcomp.training.local_sgd import LocalSGD
from fedcomp.training.engine import SerialEngine
from fedcomp.layout import Layout
from fedcomp.tasks import initial_model, load
from fedcomp.tasks.check import data_of
import fedcomp.deployment.client_process, numpy
malloc.keep_freed_memory()
task = load(sys.argv[1], None)
data, model = data_of(task, "train"), initial_model(task, 0)
layout = Layout.of(model)
engine, sgd = SerialEngine(task, model, layout, "cpu"), LocalSGD.from_config(RunConfig(local_steps=1))
start = layout.gather(model)
times = []
for round in range(20):
    began = time.perf_counter()
    trained = engine.train(start, data, plan_batches(sgd, numpy.arange(len(data)), 0, round, 0), sgd)
    del trained
    times.append(time.perf_counter() - began)
print("done", statistics.median(times), flush=True)
sys.stdin.read()
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--task", default="digits")
    parser.add_argument(
        "--parameters",
        default="",
        help="use a linear model with about this number of parameters instead of --task",
    )
    parser.add_argument("--uplink", default="stc:density=1/100")
    parser.add_argument("--downlink", default="stc:density=1/100")
    parser.add_argument("--secure", action="store_true")
    parser.add_argument("--idle", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--client-memory", action="store_true")
    parser.add_argument("--relay", action="store_true", help="connect the clients through a relay")
    parser.add_argument(
        "--connected",
        type=int,
        metavar="N",
        help="measure a server with N connected clients, 200 of which take part in each round",
    )
    args = parser.parse_args()
    if args.connected:
        connected(args)
    elif args.client_memory:
        client_memory(args)
    elif args.idle:
        idle(args)
    elif args.memory:
        server_memory(args)
    else:
        exchanges(args)
    print(
        f"load averages of the machine: {', '.join(f'{load:.1f}' for load in os.getloadavg())}, {os.cpu_count()} cores"
    )


class Federation:
    """A server process and the processes of its clients, which share a folder. The method `end` stops all processes."""

    def __init__(
        self,
        folder: Path,
        args: argparse.Namespace,
        clients: int,
        rounds: int,
        started_clients: int | None = None,
        cohort: int | None = None,
    ):
        self.folder, self.processes = folder, []
        self.port, self.metrics_port, self.relay_port = free_port(), free_port(), free_port()
        self.task = (
            args.task
            if not args.parameters
            else wide_task(folder, args.parameters, max(2000, clients))
        )
        shape = [
            "--clients",
            str(clients),
            "--rounds",
            str(rounds),
            "--participation",
            f"{cohort or clients}/{clients}",
            "--task",
            self.task,
            "--local-steps",
            "1",
            "--batch-size",
            "10",
            "--uplink",
            args.uplink,
            "--downlink",
            args.downlink,
            "--eval-every",
            str(rounds),
        ]
        output = [
            "--port",
            str(self.port),
            "--out",
            "run",
            "--plain",
            "--metrics-port",
            str(self.metrics_port),
        ]
        if args.secure:
            keys = [
                *FEDCOMP,
                "keys",
                "init",
                "--out",
                "keys",
                "--clients",
                str(clients),
                "--host",
                "127.0.0.1",
            ]
            subprocess.run(keys, cwd=folder, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
        security = ["--keys", "keys", "--host", "127.0.0.1"] if args.secure else ["--insecure"]
        self.server = self.start(
            "server", [*FEDCOMP, "server", "start", *shape, *output, *security]
        )
        while "0 of " not in (folder / "server.txt").read_text() and self.check_server():
            time.sleep(0.1)  # clients that connect too early would retry and send additional bytes
        self.initial_mb = resident_mb(self.server.pid)
        if args.relay:
            self.start_relay(args.secure)
        self.start_clients(args, started_clients or clients)

    def start(self, name: str, command: list[str]) -> subprocess.Popen:
        with (self.folder / f"{name}.txt").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, env=ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT
            )
        self.processes.append(process)
        return process

    def start_clients(self, args: argparse.Namespace, clients: int) -> None:
        port = self.relay_port if args.relay else self.port
        connection = ["--server", f"127.0.0.1:{port}", "--task", self.task]
        (self.folder / "enrolments").mkdir()
        self.hosts: dict[str, subprocess.Popen] = {}
        for first in range(0, clients, MAX_HOSTED):
            hosted_clients = range(first, min(first + MAX_HOSTED, clients))
            hosted = ["--count", str(len(hosted_clients)), "--partition-id", str(first)]
            key = ["--insecure"]
            if args.secure:
                own = self.folder / "enrolments" / str(first)
                own.mkdir()
                for client in hosted_clients:
                    file = f"{client}.toml"
                    (self.folder / "keys" / "clients" / file).rename(own / file)
                key = ["--enrolment", str(own)]
            command = [*FEDCOMP, "client", *connection, *hosted, *key]
            name = f"clients-{first}"
            self.hosts[name] = self.start(name, command)

    def start_relay(self, secure: bool) -> None:
        if secure:
            add = [*FEDCOMP, "keys", "add", "--relay", "--host", "127.0.0.1"]
            subprocess.run(add, cwd=self.folder, env=ENVIRONMENT, check=True, capture_output=True)
        key = ["--enrolment", "keys/relays/0.toml"] if secure else ["--insecure"]
        connection = ["--server", f"127.0.0.1:{self.port}", "--port", str(self.relay_port)]
        self.start("relay", [*FEDCOMP, "relay", *connection, *key])
        while (
            "connects clients at" not in (self.folder / "relay.txt").read_text()
            and self.check_server()
        ):
            time.sleep(0.1)

    def check_server(self) -> bool:
        """Return whether the server still runs. If it failed, exit and print its output."""
        if self.server.poll():
            raise SystemExit((self.folder / "server.txt").read_text())
        return self.server.poll() is None

    def check(self) -> bool:
        """Return whether the server still runs. If the server or a client failed, exit and print its output."""
        for name, process in self.hosts.items():
            if process.poll():
                raise SystemExit((self.folder / f"{name}.txt").read_text())
        return self.check_server()

    def records(self) -> list[dict]:
        path = self.folder / "run" / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30
        ) as answer:
            return float(re.search(rf"^{name} (\S+)$", answer.read().decode(), re.MULTILINE)[1])

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            process.wait()


@contextmanager
def federation(
    args: argparse.Namespace,
    clients: int,
    rounds: int,
    started_clients: int | None = None,
    cohort: int | None = None,
) -> Iterator[Federation]:
    with tempfile.TemporaryDirectory() as folder:
        run = Federation(Path(folder), args, clients, rounds, started_clients, cohort)
        try:
            yield run
        finally:
            run.end()


def exchanges(args: argparse.Namespace) -> None:
    rounds = args.rounds or 20
    print(
        f"{'clients':>8} {'rounds':>7} {'median s':>9} {'slowest s':>10} {'training s':>11} {'other s':>9} {'frames B':>12} "
        f"{'other B':>9} {'joining B':>10} {'rejected':>9}   per round; bytes per exchange, and per client that joins",
        flush=True,
    )
    for clients in args.clients or [10, 50, 200]:
        with federation(args, clients, rounds) as on:
            step_s = step_seconds(on.task)
            while on.check():
                time.sleep(0.2)
            records = on.records()[1:]  # the first round waits for clients to join
        seconds = sorted(record["seconds"] for record in records)
        median_s, training_s = statistics.median(seconds), clients * step_s
        count = clients * len(records)
        frames = sum(map(frame_bytes, records)) / count
        other = sum(map(wire_bytes, records)) / count - frames
        joining = joining_bytes(args, clients)
        print(
            f"{clients:8} {len(records):7} {median_s:9.3f} {seconds[-1]:10.3f} {training_s:11.3f} {median_s - training_s:9.3f} "
            f"{frames:12,.0f} {other:9,.0f} {joining:10,.0f} {sum(record['rejected'] for record in records):9}",
            flush=True,
        )


def joining_bytes(args: argparse.Namespace, clients: int) -> float:
    """Return the bytes at the server's port for each client that joins, before the first assignment."""
    # The server waits for one client more than there are, so it sends no assignment.
    with federation(args, clients + 1, 1, started_clients=clients) as on:
        await_clients(on, clients)
        return sum(map(on.metric, PORT_BYTES)) / clients


def frame_bytes(record: dict) -> int:
    return record["uplink_bytes"] + record["downlink_bytes"]


def wire_bytes(record: dict) -> int:
    return record["wire_bytes_in"] + record["wire_bytes_out"]


def step_seconds(task: str) -> float:
    """Return the training time of a client in a round, measured in a separate process."""
    command = [sys.executable, "-c", STEP, task]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as step:
        return float(step.communicate("")[0].split()[-1])


def idle(args: argparse.Namespace) -> None:
    """Print the bytes per second of connected clients while the server waits for another client."""
    clients = (args.clients or [10])[0]
    with federation(args, clients + 1, 1, started_clients=clients) as on:
        await_clients(on, clients)
        before, began = [on.metric(name) for name in PORT_BYTES], time.monotonic()
        time.sleep(args.idle)
        after, passed = [on.metric(name) for name in PORT_BYTES], time.monotonic() - began
    received, sent = ((b - a) / passed / clients for a, b in zip(before, after, strict=True))
    print(
        f"{clients} waiting clients, over {passed:.0f} s: {received:,.0f} B/s up, {sent:,.0f} B/s down, {received + sent:,.0f} B/s "
        "per client"
    )


def connected(args: argparse.Namespace) -> None:
    clients, rounds = args.connected, args.rounds or 5
    args.parameters = args.parameters or "10k"
    with federation(args, clients, rounds, cohort=min(200, clients)) as on:
        began = time.monotonic()
        await_clients(on, clients)
        joined_s = time.monotonic() - began
        joined_mb = max_mb = resident_mb(on.server.pid)
        while on.check():
            max_mb = max(max_mb, resident_mb(on.server.pid))
            time.sleep(0.1)
        seconds = [record["seconds"] for record in on.records()[1:]]
    print(
        f"{clients:,} clients joined in {joined_s:.0f} s; the server's memory was {on.initial_mb:.0f} MB before, {joined_mb:.0f} MB "
        f"afterwards and {max_mb:.0f} MB at most: {(max_mb - on.initial_mb) / clients * 1e3:.0f} kB per client; "
        f"a round of {min(200, clients)} took {statistics.median(seconds):.2f} s"
    )


def await_clients(on: Federation, clients: int) -> None:
    while on.check():
        time.sleep(0.5)
        if re.search(rf"^{clients} of ", (on.folder / "server.txt").read_text(), re.MULTILINE):
            return


def server_memory(args: argparse.Namespace) -> None:
    clients, rounds = (args.clients or [50])[0], args.rounds or 300
    steps, next_at = max(1, rounds // 12), 1
    print(f"{'round':>6} {'server MB':>10}   resident memory, {clients} clients", flush=True)
    seen: list[tuple[int, float]] = []
    with federation(args, clients, rounds) as on:
        while on.check():
            done = len(on.records())
            if done >= next_at:
                seen.append((done, resident_mb(on.server.pid)))
                print("{:6} {:10.1f}".format(*seen[-1]), flush=True)
                next_at = done + steps
            time.sleep(0.1)
    settled = [mb for done, mb in seen if done > rounds / 6]
    middle = statistics.mean(settled)
    print(
        f"{min(settled):.1f} to {max(settled):.1f} MB after the first rounds, {min(settled) / middle - 1:+.1%} to "
        f"{max(settled) / middle - 1:+.1%} of the mean"
    )


def client_memory(args: argparse.Namespace) -> None:
    """Print how a client's memory grows with the model, in addition to the growth of a training step.

    Comparing two model sizes cancels out the memory of libraries and data.
    """
    rounds = args.rounds or 5
    large = args.parameters or "11M"
    sizes = [f"{parameters(large) // 10}", large]
    args.task = "wide"
    step = {size: step_memory(size) for size in sizes}
    grown_mb = (parameters(sizes[1]) - parameters(sizes[0])) * 4 / 1e6
    print(
        f"models of {' and '.join(sizes)} parameters; resident memory in MB, minimum and maximum; vectors: growth in model sizes, "
        "minus that of the training step"
    )
    print(
        f"{'clients':>13} {'minimum':>17} {'maximum':>17} {'vectors minimum':>16} {'vectors maximum':>16}"
    )
    row = "{:>13} {:8.0f} {:8.0f} {:8.0f} {:8.0f}".format
    print(row("step alone", *(step[size][which] for which in (0, 1) for size in sizes)))
    for clients in args.clients or [1, 2, 4]:
        seen = {}
        for size in sizes:
            args.parameters = size
            seen[size] = host_memory(args, clients, rounds)
        above = [
            (
                seen[sizes[1]][which]
                - step[sizes[1]][which]
                - seen[sizes[0]][which]
                + step[sizes[0]][which]
            )
            / grown_mb
            for which in (0, 1)
        ]
        print(
            row(clients, *(seen[size][which] for which in (0, 1) for size in sizes))
            + f" {above[0]:16.2f} {above[1]:16.2f}",
            flush=True,
        )


def step_memory(size: str) -> tuple[float, float]:
    """Return the memory of a process that only trains, in MB: after training, and the maximum."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", STEP, wide_task(Path(folder), size)]
        step = subprocess.Popen(
            command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        step.stdout.readline()
        seen = resident_mb(step.pid), resident_mb(step.pid, "VmHWM")
        step.communicate()
    return seen


def host_memory(args: argparse.Namespace, clients: int, rounds: int) -> tuple[float, float]:
    """Return the minimum and the maximum memory of the client process during the last round, in MB."""
    with federation(args, clients, rounds) as on:
        last: list[tuple[float, float]] = []
        (host,) = on.hosts.values()
        while on.check():
            if len(on.records()) == rounds - 1:
                last.append((resident_mb(host.pid), resident_mb(host.pid, "VmHWM")))
            time.sleep(0.02)
    return min(now for now, _ in last if now), max(peak for _, peak in last)


def resident_mb(process: int, what: str = "VmRSS") -> float:
    try:
        return (
            int(
                re.search(
                    rf"^{what}:\s+(\d+) kB",
                    Path(f"/proc/{process}/status").read_text(),
                    re.MULTILINE,
                )[1]
            )
            * 1024
            / 1e6
        )
    except (OSError, TypeError):
        return 0.0  # the process has already ended


def wide_task(folder: Path, count: str, examples: int = 2000) -> str:
    path = folder / "wide_task.py"
    classes = parameters(count) // 1001
    path.write_text(WIDE_TASK.format(classes=classes, examples=examples))
    return f"{path}:task"


def parameters(count: str) -> int:
    return int(float(count.rstrip("kM")) * SUFFIXES.get(count[-1], 1))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
