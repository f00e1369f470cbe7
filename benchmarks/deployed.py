"""What an exchange costs in a deployment on this machine: a server and clients of their own processes, training next to nothing.

    python benchmarks/deployed.py [--clients 10] [--rounds 20]

Prints seconds a round, in which every client takes part once, and bytes at the port per client and exchange.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

FEDCOMP = [sys.executable, "-m", "fedcomp"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--task", default="digits")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        records = measure(Path(folder), given.clients, given.rounds, given.task)[1:]  # the first follows a wait
    seconds = sorted(record["seconds"] for record in records)
    exchanges = given.clients * len(records)
    frames = sum(record["uplink_bytes"] + record["downlink_bytes"] for record in records)
    wire = sum(record["wire_bytes_in"] + record["wire_bytes_out"] for record in records)
    print(f"clients {given.clients}, rounds {len(records)}")
    print(f"seconds a round   median {statistics.median(seconds):.2f}, slowest {seconds[-1]:.2f}")
    print(f"bytes an exchange frames {frames / exchanges:,.0f}, at the port {wire / exchanges:,.0f}")


def measure(folder: Path, clients: int, rounds: int, task: str) -> list[dict]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    run = ["--clients", str(clients), "--rounds", str(rounds), "--participation", "1", "--task", task, "--local-steps", "1"]
    door = ["--insecure", "--port", str(port), "--eval-every", str(rounds), "--out", "run", "--plain"]
    started = []
    try:
        server = subprocess.Popen([*FEDCOMP, "server", "start", *run, *door], cwd=folder, env=environment, stdout=subprocess.DEVNULL)
        started.append(server)
        for i in range(clients):
            client = [*FEDCOMP, "client", "--insecure", "--server", f"127.0.0.1:{port}", "--partition-id", str(i), "--task", task]
            started.append(subprocess.Popen(client, cwd=folder, env=environment, stdout=subprocess.DEVNULL))
        if server.wait():
            raise SystemExit(server.returncode)
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()
