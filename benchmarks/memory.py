"""Peak memory of simulations, servers and clients in addition to the model, as a multiple of the model's size.

    python benchmarks/memory.py [--cases sim-stc server-1 …] [--parameters 11M]

Each case runs with a model of the given size and with a model of a tenth of this size. The difference of the peaks, divided by the
difference of the model sizes, is the number of model-sized vectors in memory, because libraries and data cancel out. The column `vectors
above` is this number minus 1, for the model itself. A third run lists attributes of fedcomp's objects that hold tensors or byte strings of
at least half the model's size near the peak. Other memory belongs to temporary values, or was freed but not returned to the operating
system.
"""

import argparse
import atexit
import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from deployed import ENVIRONMENT, ROOT, free_port, parameters, resident_mb, wide_task

ROUNDS = 4
SAMPLE_S = 0.002
STC = "stc:density=1/400"
# Maps a case to the measured process, the number of clients, and the codec of both directions.
CASES = {
    "sim-stc": ("sim", 4, STC),
    "sim-dense": ("sim", 4, "identity"),
    "server-1": ("server", 1, "identity"),
    "server-2": ("server", 2, "identity"),
    "server-4": ("server", 4, "identity"),
    "server-stc": ("server", 4, STC),
    "client-dense": ("client", 1, "identity"),
    "client-stc": ("client", 1, STC),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--parameters", default="11M")
    given = parser.parse_args()
    large = parameters(given.parameters)
    small = large // 10
    print(
        f"{'case':>13} {'clients':>8} {'peak MB':>8} {'vectors above':>14}   large attributes near the peak"
    )
    for case in given.cases:
        (least_mb, _), (peak_mb, _), (_, holders) = (
            run(case, small),
            run(case, large),
            run(case, large, look=True),
        )
        vectors = (peak_mb - least_mb) * 1e6 / (4 * (large - small)) - 1
        print(
            f"{case:>13} {CASES[case][1]:8} {peak_mb:8.0f} {vectors:14.1f}   {holders}", flush=True
        )


def run(case: str, count: int, look: bool = False) -> tuple[float, str]:
    """Return the peak memory of a case in MB with a model of about `count` parameters and, if `look` is set, the attributes that hold it.

    The search for attributes delays the release of memory.
    """
    kind, clients, codec = CASES[case]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = wide_task(folder, str(count))
        watched = [sys.executable, __file__, str(count if look else 0)]
        options = ["--clients", clients, "--participation", 1, "--rounds", ROUNDS, "--task", task]
        options += ["--local-steps", 1, "--batch-size", 10, "--uplink", codec, "--downlink", codec]
        if kind == "sim":
            simulation = start(folder, kind, watched, "sim", *options, "--out", "run")
            return peak(folder, kind, simulation)
        port = free_port()
        plain = [sys.executable, "-m", "fedcomp"]
        words = ["server", "start", *options, "--port", port, "--out", "run", "--plain"]
        server = start(
            folder, "server", watched if kind == "server" else plain, *words, "--insecure"
        )
        while server.poll() is None and "0 of " not in (folder / "server.txt").read_text():
            time.sleep(0.05)
        words = ["client", "--server", f"127.0.0.1:{port}", "--task", task, "--insecure"]
        words += ["--count", clients, "--partition-id", 0]
        client = start(folder, "client", watched if kind == "client" else plain, *words)
        found = peak(folder, kind, server if kind == "server" else client)
        server.wait(), client.wait()
        return found


def start(folder: Path, name: str, program: list[str], *words: object) -> subprocess.Popen:
    with (folder / f"{name}.txt").open("wb") as said:
        command = [*program, *map(str, words)]
        return subprocess.Popen(
            command, cwd=folder, env=ENVIRONMENT, stdout=said, stderr=subprocess.STDOUT
        )


def peak(folder: Path, name: str, process: subprocess.Popen) -> tuple[float, str]:
    if process.wait():
        raise SystemExit((folder / f"{name}.txt").read_text())
    return tuple(json.loads((folder / "peak.json").read_text()))


# The functions below run in the measured process.


def watch(count: int) -> None:
    """Run fedcomp with the arguments of this process, and write its peak memory to peak.json when it exits.

    If `count`, the number of parameters of the model, is not 0, the attributes that hold large values near the peak are written too.
    """
    vector_mb, found, ended = 4 * count / 1e6, [0.0, ""], threading.Event()

    def sample() -> None:
        while not ended.wait(SAMPLE_S):
            now_mb = resident_mb(os.getpid())
            if now_mb > found[0] + vector_mb / 4:
                found[:] = now_mb, holders(2 * count)
            found[0] = max(found[0], now_mb)

    thread = threading.Thread(target=sample, daemon=True)
    if count:
        thread.start()

    def end() -> None:
        ended.set()
        if count:
            thread.join()
        found[0] = max(found[0], resident_mb(os.getpid(), "VmHWM"))
        Path("peak.json").write_text(json.dumps(found))

    atexit.register(end)
    sys.argv = ["fedcomp", *sys.argv[2:]]
    runpy.run_module("fedcomp", run_name="__main__")


def holders(least_bytes: int) -> str:
    """Return the attributes of fedcomp's objects that hold large tensors or byte strings, each value once."""
    found: dict[object, str] = {}
    for held in gc.get_objects():
        if str(type(held).__module__).startswith("fedcomp"):
            for name, value in getattr(held, "__dict__", {}).items():
                values = value if isinstance(value, list | tuple) else [value]
                for one in values:
                    if key := large(one, least_bytes):
                        found.setdefault(key, f"{type(held).__name__}.{name}")
    return ", ".join(f"{n} {name}" for name, n in sorted(Counter(found.values()).items()))


def large(value: object, least_bytes: int) -> object:
    """Return a key that identifies the memory of a tensor or byte string of at least `least_bytes` bytes, or None for other values."""
    if isinstance(value, bytes):
        return id(value) if len(value) >= least_bytes else None
    if not hasattr(value, "untyped_storage"):
        return None
    storage = value.untyped_storage()
    return storage.data_ptr() if storage.nbytes() >= least_bytes else None


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].isdigit():
        sys.path.insert(0, str(ROOT))
        watch(int(sys.argv[1]))
    else:
        main()
