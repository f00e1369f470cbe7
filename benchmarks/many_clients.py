"""Time of a round, memory and disk space with many clients; each participant stores a residual (error feedback).

    python benchmarks/many_clients.py [--clients 10000] [--parameters 1M] [--participation 1%] [--rounds 50] [--residuals file]
    python benchmarks/many_clients.py --growth [--rounds 1000]       memory of the process over many rounds of a small model

With --growth, the model is just large enough to use the compiled loops from the first round on. Loading these loops later would look like
growth. Training is one step with two examples, so that the benchmark measures everything but training. Files are written below --folder and
removed at the end. The disk of --folder needs 4 bytes per parameter for each client that takes part at least once, plus the same for the
clients of one round. The column `page cache` is the part of the checkpoint that the operating system holds in memory. The last line has the
load average of the machine; results are not reliable if other processes cause load.
"""

import argparse
import ctypes
import mmap
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from fedcomp import RunConfig
from fedcomp.callbacks import Callback, Header, RoundRecord
from fedcomp.sim import simulate
from fedcomp.spec import parse_number

SUFFIXES = {"k": 1_000, "M": 1_000_000}
INPUTS, CLASSES = 100, 10
MAPPED_BYTES = 1 << 28
TASK = """\
import torch
from torch import nn

from fedcomp import Data, Task


def data(examples, seed):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(examples) % {classes}
    return Data(torch.randn(examples, {inputs}, generator=generator) + targets[:, None] / {classes}, targets)


def model():
    return nn.Sequential(nn.Linear({inputs}, {hidden}), nn.ReLU(), nn.Linear({hidden}, {classes}))


task = Task("many", model, train=lambda: data({examples}, 1), test=lambda: data(20, 2))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=0)
    parser.add_argument("--parameters", default="")
    parser.add_argument("--participation", type=parse_number, default=0.0)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--residuals", default="auto")
    parser.add_argument("--memory", default="residual")
    parser.add_argument("--uplink", default="stc:density=1/100")
    parser.add_argument("--checkpoint-every", default="auto")
    parser.add_argument(
        "--folder", default=tempfile.gettempdir(), help="folder on the disk that stores the run"
    )
    parser.add_argument("--growth", action="store_true")
    args = parser.parse_args()
    clients, rounds = (
        args.clients or (100 if args.growth else 10_000),
        args.rounds or (1000 if args.growth else 50),
    )
    participation = args.participation or (0.1 if args.growth else 0.01)
    parameters = _count(args.parameters or ("110k" if args.growth else "1M"))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        config = RunConfig(
            task=f"{_task(Path(folder), parameters, 2 * clients)}:task",
            clients=clients,
            participation=participation,
            rounds=rounds,
            local_steps=1,
            batch_size=2,
            lr=0.01,
            uplink=args.uplink,
            memory=args.memory,
            residuals=args.residuals,
            eval_every=rounds,
            checkpoint_every=args.checkpoint_every,
            out=f"{folder}/run",
        )
        simulate(config, Meter(Path(folder, "run"), rounds))
    print(
        f"load averages of the machine: {', '.join(f'{load:.1f}' for load in os.getloadavg())}, {os.cpu_count()} cores"
    )


class Meter(Callback):
    """Callback that prints the time, memory and disk space of this process for each tenth of the run."""

    def __init__(self, run: Path, rounds: int):
        self.run, self.tenth = run, max(1, rounds // 10)
        self.clients = 0  # sum of the cohort sizes so far
        # Time at which the run started, then the time at which each round ended.
        self.ended_s = [time.perf_counter()]
        self.saving_s = 0.0  # seconds spent on checkpoints in the current tenth of the run
        # Maps a round to the anonymous memory of the process after it, in MB.
        self.resident: dict[int, float] = {}

    def on_run_start(self, header: Header) -> None:
        print(
            f"{header.clients:,} clients of {header.parameters:,} parameters, {header.cohort:,} clients per round; memory {header.memory}; "
            f"residuals {header.residuals or 'in memory'}; {shutil.disk_usage(self.run).free / 1e9:.0f} GB of free disk space\n"
        )
        print(
            "rounds     clients so far   round (ms)    checkpoint (ms)   in memory (MB)   page cache (MB)   disk (MB)",
            flush=True,
        )
        self.ended_s = [time.perf_counter()]

    def on_warning(self, sentence: str) -> None:
        print(f"warning: {sentence}", file=sys.stderr)

    def on_checkpoint(self, round: int, seconds: float) -> None:
        self.saving_s += seconds

    def on_round_end(self, record: RoundRecord) -> None:
        """Print a line after each tenth of the run. The time of a round includes its checkpoint."""
        self.clients += record.cohort
        self.ended_s.append(time.perf_counter())
        if (round := record.round) % self.tenth:
            return
        files = [f for f in (self.run / "checkpoint").rglob("*") if f.is_file()]
        self.resident[round] = _resident()
        round_ms = 1e3 * (self.ended_s[-1] - self.ended_s[-1 - self.tenth]) / self.tenth
        saved_ms, self.saving_s = 1e3 * self.saving_s / self.tenth, 0.0
        written_mb = 512 * sum(file.stat().st_blocks for file in files) / 1e6
        print(
            f"{round - self.tenth + 1:5}–{round:<5}{self.clients:11,}{round_ms:13.0f}{saved_ms:19.0f}"
            f"{self.resident[round]:17.0f}{sum(map(_cached, files)):18.0f}{written_mb:12.0f}",
            flush=True,
        )
        self.ended_s[-1] = time.perf_counter()  # exclude the time of the measurements above

    def on_run_end(self, summary, out: str) -> None:
        first, last = min(self.resident), max(self.resident)
        print(
            f"\nthe memory after round {last:,} is {self.resident[last] / self.resident[first]:.3f} times that after round {first:,}"
        )


def _resident() -> float:
    status = Path("/proc/self/status").read_text()
    return (
        next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))
        * 1024
        / 1e6
    )


def _cached(path: Path) -> float:
    libc, size, cached = ctypes.CDLL(None), path.stat().st_size, 0
    with open(path, "r+b") as file:
        # Map the file in parts, since it may be larger than the memory.
        for first in range(0, size, MAPPED_BYTES):
            length = min(MAPPED_BYTES, size - first)
            with mmap.mmap(file.fileno(), length, mmap.MAP_PRIVATE, offset=first) as mapped:
                resident_pages, start = (
                    (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))(),
                    ctypes.c_ubyte.from_buffer(mapped),
                )
                libc.mincore(
                    ctypes.c_void_p(ctypes.addressof(start)),
                    ctypes.c_size_t(length),
                    resident_pages,
                )
                del start
            cached += sum(page & 1 for page in bytes(resident_pages))
    return cached * mmap.PAGESIZE / 1e6


def _task(folder: Path, parameters: int, examples: int) -> Path:
    hidden = max(1, round((parameters - CLASSES) / (INPUTS + 1 + CLASSES)))
    path = folder / "many.py"
    path.write_text(TASK.format(inputs=INPUTS, classes=CLASSES, hidden=hidden, examples=examples))
    return path


def _count(text: str) -> int:
    return round(float(text.rstrip("kM")) * SUFFIXES.get(text[-1], 1))


if __name__ == "__main__":
    main()
