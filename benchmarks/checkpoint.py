"""Time to write a checkpoint with the state of 20 clients and a model of 865,482 parameters, compared with a plain write of the same bytes.

python benchmarks/checkpoint.py [--numel 865482] [--cohort 20] [--repeats 15] [--folder .]
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from fedcomp.server.broadcasts import Broadcast
from fedcomp.server.checkpoint import Checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=865_482)
    parser.add_argument("--cohort", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--folder", default=".", help="folder on the disk whose write time is measured"
    )
    args = parser.parse_args()
    rows = {f"client/{i}.residual": torch.randn(args.numel) for i in range(args.cohort)}
    rows |= {"weights": torch.randn(args.numel), "downlink.residual": torch.randn(args.numel)}
    values = {f"client/{i}": b"{}" * 40 for i in range(args.cohort)} | {
        f"client/{i}.pending": bytes(3000) for i in range(args.cohort)
    }
    timings: dict[str, list[float]] = {
        "plain write": [],
        "plain write, flushed": [],
        "checkpoint": [],
    }
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        checkpoint = Checkpoint(Path(folder))
        for round in range(args.repeats + 1):
            timings["plain write"].append(plain_write_s(Path(folder, "plain"), rows, flush=False))
            timings["plain write, flushed"].append(
                plain_write_s(Path(folder, "plain"), rows, flush=True)
            )
            begin = time.perf_counter()
            checkpoint.save(
                rows, values, [Broadcast(round, str(round), str(round + 1), bytes(3000))]
            )
            timings["checkpoint"].append(time.perf_counter() - begin)
        checkpoint.close()
    flushed = statistics.median(timings["plain write, flushed"][1:])
    print(
        f"{len(rows)} vectors of {args.numel:,} elements, {4 * args.numel * len(rows) / 1e6:.1f} MB; medians of {args.repeats} repeats\n"
    )
    for name, seconds in timings.items():
        median = statistics.median(seconds[1:])
        print(
            f"{name:24}{median * 1e3:8.1f} ms{max(seconds[1:]) * 1e3:10.1f} ms maximum{median / flushed:8.2f} × the flushed write"
        )


def plain_write_s(path: Path, rows: dict[str, torch.Tensor], flush: bool) -> float:
    begin = time.perf_counter()
    with open(path, "wb") as file:
        for row in rows.values():
            file.write(row.numpy())
        if flush:
            file.flush()
            os.fdatasync(file.fileno())
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
