"""Bytes at the server's port: a compressed run of fedcomp compared with Flower's FedAvg, with the same task, rounds and clients.

    python benchmarks/flower_fedavg.py [--numel 1000000] [--rounds 10] [--clients 10] [--participation 0.5] [--density 1/400] [--mod]

The first run is FedAvg with Flower's strategy, SuperLink and SuperNodes. With --mod, the second run adds fedcomp's strategy `Compressed`
and `compression_mod` to this Flower App. The last run is fedcomp with STC in both directions; its server runs in this process, and each
client in its own process. A TCP proxy in front of the SuperLink counts Flower's bytes, and the kernel counts fedcomp's bytes. The bytes
include headers, polls, heartbeats, missed broadcasts, joining and leaving.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import flower_fedavg_app as app  # noqa: E402 — a task file's folder is not on sys.path

from fedcomp import Data, RunConfig, Task
from fedcomp.callbacks import Callback
from fedcomp.deployment.start import Deployment, Endpoint

LOOPBACK = "127.0.0.1"

BUNDLE = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "bench"
version = "1.0.0"
description = "Names the module of the benchmark"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedcomp"

[tool.flwr.app.components]
serverapp = "flower_fedavg_app:server"
clientapp = "flower_fedavg_app:client"

[tool.flwr.app.config]
rounds = 10
participation = 0.5
density = ""
out = ""
"""
CONNECTION = '[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{}:{}"\ninsecure = true\n'


task = Task(
    "ten clouds",
    app.network,
    train=lambda: Data(*app.clouds(4000, 2)),
    test=lambda: Data(*app.clouds(2000, 3)),
)


@dataclass(frozen=True)
class Result:
    name: str
    exchanges: int
    frames: int  # bytes of frames
    received: int  # bytes received at the server's port
    sent: int  # bytes sent from the server's port
    accuracy: float
    seconds: float
    rounds: str = ""  # text: bytes per exchange in the rounds after the first

    @property
    def total_bytes(self) -> int:
        return self.received + self.sent


class Proxy:
    """Context manager that forwards TCP connections to a port of this machine and counts their bytes."""

    def __init__(self, to: int):
        self.to, self.received, self.sent = to, 0, 0
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port = self._listener.getsockname()[1]

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection((LOOPBACK, self.to))
                for ends, up in (((client, server), True), ((server, client), False)):
                    threading.Thread(target=self._pass, args=(*ends, up), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
                if up:
                    self.received += len(data)
                else:
                    self.sent += len(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def processes(environment: dict[str, str], folder: Path) -> Iterator:
    """Yield a function start(*command) that starts a process. On exit, all started processes are terminated."""
    started = []

    def start(*words: str) -> subprocess.Popen:
        with (folder / f"process-{len(started)}.txt").open("wb") as log:
            started.append(
                subprocess.Popen(
                    [*words], cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT
                )
            )
        return started[-1]

    try:
        yield start
    finally:
        for process in started[::-1]:
            process.terminate()
        for process in started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def flower(folder: Path, options: argparse.Namespace, density: str) -> Result:
    """Run FedAvg with Flower's SuperLink and SuperNodes, with compressed messages if `density` is not empty."""
    folder.mkdir()
    (folder / "app").mkdir()
    (folder / "app" / "pyproject.toml").write_text(BUNDLE)
    port, scripts = free_port(), Path(sysconfig.get_path("scripts"))
    (folder / "config.toml").write_text(CONNECTION.format(LOOPBACK, port))
    environment = process_environment(options) | {
        "FLWR_HOME": str(folder),
        "PATH": os.pathsep.join([str(scripts), os.environ.get("PATH", "")]),
        "BENCH_STATE": str(folder / "state") if density else "",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    out, relay = folder / "result.json", Proxy(port)
    with processes(environment, folder) as start:
        link = start(
            str(scripts / "flower-superlink"),
            "--insecure",
            "--host",
            LOOPBACK,
            "--port",
            str(port),
            "--disable-runtime-dependency-installation",
        )
        wait(lambda: healthy(port), link)
        with relay:
            began = time.monotonic()
            values = {
                "rounds": options.rounds,
                "participation": options.participation,
                "density": density,
                "out": str(out),
            }
            overrides = " ".join(f"{name}={json.dumps(value)}" for name, value in values.items())
            subprocess.run(
                [scripts / "flwr", "run", folder / "app", "here", "--run-config", overrides],
                env=environment,
                cwd=folder,
                check=True,
                stdout=subprocess.DEVNULL,
                timeout=300,
            )
            for i in range(options.clients):
                connection = [
                    "--superlink",
                    f"{LOOPBACK}:{relay.port}",
                    "--host",
                    LOOPBACK,
                    "--port",
                    str(free_port()),
                ]
                start(
                    str(scripts / "flower-supernode"),
                    "--insecure",
                    *connection,
                    "--node-config",
                    f"partition-id={i}",
                )
            wait(out.exists, link)
            result, seconds = json.loads(out.read_text()), time.monotonic() - began
    exchanges = round(options.participation * options.clients) * options.rounds
    if density:
        assert result["exchanges"] == exchanges
    name = f"FedAvg, stc:density={density} by the mod" if density else "FedAvg"
    return Result(
        name, exchanges, result["frames"], relay.received, relay.sent, result["accuracy"], seconds
    )


def fedcomp_run(folder: Path, options: argparse.Namespace) -> Result:
    folder.mkdir()
    codec, this = f"stc:density={options.density}", f"{Path(__file__).resolve()}:task"
    config = RunConfig(  # same training as in flower_fedavg_app.py
        task=this,
        clients=options.clients,
        rounds=options.rounds,
        participation=options.participation,
        uplink=codec,
        downlink=codec,
        partition="iid",
        local_steps=app.LOCAL_STEPS,
        batch_size=app.BATCH,
        lr=app.LR,
        eval_every=options.rounds,
        device="cpu",
        out=str(folder / "run"),
    )
    deployment = Deployment(config, Endpoint(port=0), Callback())
    began = time.monotonic()
    with processes(process_environment(options), folder) as start:

        def opened(port: int) -> None:
            for i in range(options.clients):
                start(
                    sys.executable,
                    "-m",
                    "fedcomp",
                    "client",
                    "--insecure",
                    "--server",
                    f"{LOOPBACK}:{port}",
                    "--partition-id",
                    str(i),
                    "--task",
                    this,
                    "--state-dir",
                    f"state-{i}",
                )

        summary = deployment.run(opened)
    records = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    frames = sum(record["uplink_bytes"] + record["downlink_bytes"] for record in records)
    exchanges = sum(record["accepted"] for record in records)
    seconds = time.monotonic() - began
    counted = summary.wire_bytes_in, summary.wire_bytes_out
    return Result(
        f"fedcomp, {codec}",
        exchanges,
        frames,
        *counted,
        summary.accuracy,
        seconds,
        overhead_text(records[1:]),
    )


def overhead_text(records: list[dict]) -> str:
    """Return the bytes per exchange (download and upload of a client) in addition to the frames, as text."""
    frames = sum(record["uplink_bytes"] + record["downlink_bytes"] for record in records)
    port = sum(record["wire_bytes_in"] + record["wire_bytes_out"] for record in records)
    exchanges = sum(record["accepted"] for record in records)
    return f"{(port - frames) / exchanges:,.0f} bytes per exchange in addition to the frames"


def process_environment(options: argparse.Namespace) -> dict[str, str]:
    here = Path(__file__).resolve().parent
    variables = {"BENCH_NUMEL": str(options.numel), "BENCH_CLIENTS": str(options.clients)}
    return (
        os.environ
        | variables
        | {
            "PYTHONPATH": os.pathsep.join([str(here.parent), str(here)]),
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
        }
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def healthy(port: int) -> bool:
    with suppress(OSError):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        return opener.open(f"http://{LOOPBACK}:{port}/health", timeout=1).status == 200
    return False


def wait(condition, process: subprocess.Popen) -> None:
    while not condition():
        if process.poll() is not None:
            raise SystemExit(f"{process.args[0]} ended with status {process.returncode}")
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, default=1_000_000)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--participation", type=float, default=0.5)
    parser.add_argument("--density", default="1/400")
    parser.add_argument(
        "--mod",
        action="store_true",
        help="also run Flower's FedAvg with fedcomp's Compressed and compression_mod",
    )
    parser.add_argument("--folder", type=Path, help="folder for the log files of the processes")
    options = parser.parse_args()
    os.environ["BENCH_NUMEL"] = str(options.numel)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        results = [flower(folder / "fedavg", options, "")]
        results += [flower(folder / "mod", options, options.density)] if options.mod else []
        results.append(fedcomp_run(folder / "fedcomp", options))
    numel = sum(p.numel() for p in app.network().parameters())
    print(
        f"{numel:,} parameters, {options.clients} clients, {options.rounds} rounds, participation {options.participation:g}, "
        f"load average {os.getloadavg()[0]:.1f}\n"
    )
    print(
        f"{'':38}{'exchanges':>10}{'frames':>13}{'port in':>13}{'port out':>13}{'total':>13}{'ratio':>8}{'accuracy':>10}{'seconds':>9}"
    )
    for r in results:
        ratio = results[0].total_bytes / r.total_bytes
        frames = f"{r.frames:,}" if r.frames else "–"
        print(
            f"{r.name:38}{r.exchanges:>10}{frames:>13}{r.received:>13,}{r.sent:>13,}{r.total_bytes:>13,}{ratio:>7.1f}×"
            f"{r.accuracy:>10.4f}{r.seconds:>9.0f}"
        )
    print(f"\nfedcomp without the first round, in which clients join: {results[-1].rounds}")


if __name__ == "__main__":
    main()
