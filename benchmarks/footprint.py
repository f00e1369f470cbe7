"""Cost of a client on a device: start-up time, installed size, and memory while the client waits for a round.

    python benchmarks/footprint.py [--repeats 11]

Times are medians of interleaved repeats. The installed size includes fedcomp and the packages that it requires without extras. torch is
listed separately, since its CPU and CUDA builds differ by gigabytes. The memory is that of a client with a model of 7,850 parameters,
compared with a process that has only imported torch.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
FEDCOMP = (sys.executable, "-m", "fedcomp")
COMMANDS = {
    "python -c pass": (sys.executable, "-c", "pass"),
    "python -c 'import fedcomp'": (sys.executable, "-c", "import fedcomp"),
    "fedcomp --help": (*FEDCOMP, "--help"),
    "fedcomp sim --help": (*FEDCOMP, "sim", "--help"),
    "python -c 'import torch'": (sys.executable, "-c", "import torch"),
}
TASK = """\
import torch
from torch import nn
from fedcomp import Data, Task

data = Data(torch.zeros(100, 784), torch.zeros(100, dtype=torch.int64))
task = Task("idle", lambda: nn.Linear(784, 10), train=data, test=data)
"""
START_TIMEOUT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11)
    print_times(parser.parse_args().repeats)
    print_sizes()
    print_memory()


def print_times(repeats: int) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(repeats):
        for name, command in COMMANDS.items():
            begin = time.perf_counter()
            subprocess.run(command, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
            seconds[name].append(time.perf_counter() - begin)
    python_s = statistics.median(seconds["python -c pass"])
    for name, values in seconds.items():
        median = statistics.median(values)
        extra = (
            f", {(median - python_s) * 1e3:.0f} ms more than Python" if median > python_s else ""
        )
        print(f"{name:28}{median * 1e3:8.0f} ms{extra}")


def print_sizes() -> None:
    sizes = {name: installed_bytes(name) for name in required("fedcomp")}
    own = sum(file.stat().st_size for file in (ROOT / "fedcomp").rglob("*.py"))
    print(f"{'installed: fedcomp':28}{own / 1e6:8.1f} MB")
    print(f"{'installed: torch':28}{sizes.pop('torch') / 1e6:8.0f} MB")
    print(
        f"{'installed: other packages':28}{sum(sizes.values()) / 1e6:8.0f} MB, {len(sizes)} packages"
    )
    for name in sorted(sizes, key=lambda name: -sizes[name])[:5]:
        print(f"    {name:24}{sizes[name] / 1e6:8.0f} MB")


def required(name: str) -> set[str]:
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for requirement in map(Requirement, metadata.requires(waiting.pop()) or ()):
            needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if needed and requirement.name not in found:
                found.add(requirement.name)
                waiting.append(requirement.name)
    return found


def installed_bytes(name: str) -> int:
    paths = [Path(str(file.locate())) for file in metadata.files(name) or ()]
    return sum(path.stat().st_size for path in paths if path.is_file())


def print_memory() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "idle.py").write_text(TASK)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        shared = ("--task", "idle.py:task", "--insecure")
        serve = (*FEDCOMP, "server", "start", "--clients", "2", "--plain", "--port", port, *shared)
        join = (*FEDCOMP, "client", "--server", f"127.0.0.1:{port}", "--partition-id", "0", *shared)
        with started(serve, folder, "0 of 2"), started(join, folder, "joined the run") as client:
            print(f"{'a waiting client':28}{resident_mb(client):8.0f} MB")
        bare = (sys.executable, "-c", "import torch, time; print('ready'); time.sleep(60)")
        with started(bare, folder, "ready") as process:
            print(f"{'a process with torch':28}{resident_mb(process):8.0f} MB")


@contextmanager
def started(command: tuple[str, ...], folder: str, until: str) -> Iterator[subprocess.Popen[bytes]]:
    """Context manager that starts a command, waits for the text `until` in its output, and terminates the command on exit."""
    with tempfile.NamedTemporaryFile(dir=folder) as output:
        process = subprocess.Popen(
            command, cwd=folder, env=ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            end = time.monotonic() + START_TIMEOUT_S
            while until not in (text := Path(output.name).read_text()):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"{' '.join(command)} did not print '{until}':\n{text}")
                time.sleep(0.1)
            time.sleep(1)  # wait until the process is idle
            yield process
        finally:
            process.terminate()
            process.wait()


def resident_mb(process: subprocess.Popen[bytes]) -> float:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1e3


if __name__ == "__main__":
    main()
