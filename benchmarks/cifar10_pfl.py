"""The CIFAR-10 workload of pfl's published benchmark: 1,000 users with 50 images each, 50 users per round, 5 steps of batch 10.

    FEDCOMP_DATA=... python benchmarks/cifar10_pfl.py [--rounds 1500] [--rivals FOLDER] [--no-dropout] [--dense]

The workload is from pfl-research, benchmarks/image_classification/configs/baseline.yaml, with the data set `cifar10_iid` and the model
`simple_cnn` (1,626,442 parameters, with dropout; rival_models.py). Each user trains one epoch on its 50 images, in batches of 10, at
learning rate 0.1. The server averages updates with equal weights, at server learning rate 1. The model is evaluated every 10 rounds. Images
are standardised per channel.

The benchmark runs 1,500 rounds on a CUDA device, and 20 on a CPU. fedcomp runs whole rounds, with STC at 1/100 in both directions, error
feedback and a checkpoint every 100 rounds; with --dense, it sends float32 updates, as pfl does. pfl runs if it was installed with
`rivals.py --rivals FOLDER --install`. --no-dropout removes the dropout layers from both models. On a GPU, fedcomp trains clients in batches
if the model has no dropout, and otherwise one by one.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # idle threads sleep early
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from rival_models import cifar10_cnn, cifar10_plain_cnn  # noqa: E402
from rivals import Rival, run  # noqa: E402

from fedcomp import RunConfig, config, tasks  # noqa: E402
from fedcomp.callbacks import Callback, RoundRecord  # noqa: E402
from fedcomp.sim import simulate  # noqa: E402
from fedcomp.tasks.partition import partition  # noqa: E402

USERS, COHORT, STEPS, BATCH, LR, EVALUATE_EVERY = 1000, 50, 5, 10, 0.1, 10
HERE = Path(__file__).resolve().parent

built_in = tasks.load("cifar10-vgg11s", config.data_folder(None))
task = dataclasses.replace(built_in, name="cifar10-cnn", model=cifar10_cnn)
plain = dataclasses.replace(built_in, name="cifar10-plain-cnn", model=cifar10_plain_cnn)


class Rounds(Callback):
    """Callback that keeps the duration and the record of each round, and the last accuracy."""

    def __init__(self, log_every: int):
        self.log_every, self.seconds, self.records, self.engine, self.accuracy = (
            log_every,
            [],
            [],
            "",
            None,
        )

    def on_run_start(self, header) -> None:
        self.engine, self.device, self.began = header.engine, header.device, time.perf_counter()

    def on_round_end(self, record: RoundRecord) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.began)
        self.began = now
        self.records.append(record)
        if record.accuracy is not None:
            self.accuracy = record.accuracy
        if record.round % self.log_every == 0:
            print(
                f"  fedcomp, round {record.round}: accuracy {self.accuracy or 0:.3f}, {sum(self.seconds):.1f} s",
                file=sys.stderr,
            )

    def on_warning(self, sentence: str) -> None:
        print(f"  fedcomp: {sentence}", file=sys.stderr)


def fedcomp_row(rounds: int, device: str, args: argparse.Namespace) -> dict[str, object]:
    codec = "identity" if args.dense else "stc:density=1/100"
    memory = "none" if args.dense else "residual"
    watch = Rounds(max(1, rounds // 10))
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        simulate(
            RunConfig(
                task=f"{__file__}:{'plain' if args.no_dropout else 'task'}",
                clients=USERS,
                participation=COHORT / USERS,
                partition="iid",
                rounds=rounds,
                local_steps=STEPS,
                batch_size=BATCH,
                lr=LR,
                uplink=codec,
                downlink=codec,
                memory=memory,
                downlink_memory=memory,
                engine=args.engine,
                precision=args.precision,
                device=device,
                eval_every=EVALUATE_EVERY,
                checkpoint_every=100,
                out=f"{folder}/run",
            ),
            watch,
        )
        whole = time.perf_counter() - began
    sent = {
        name: sum(getattr(record, name) for record in watch.records)
        for name in ("uplink_bytes", "dense_uplink_bytes")
    }
    return {
        "seconds": watch.seconds,
        "accuracy": watch.accuracy,
        "device": watch.device,
        "engine": watch.engine,
        "whole_s": whole,
    } | sent


def pfl_row(rounds: int, device: str, args: argparse.Namespace) -> dict[str, object] | None:
    python = Path(args.rivals or "") / "pfl" / "bin" / "python"
    if not args.rivals or not python.exists():
        print(
            "pfl is skipped: install it with rivals.py --rivals FOLDER --install, and pass --rivals FOLDER",
            file=sys.stderr,
        )
        return None
    chosen = plain if args.no_dropout else task
    data, test = chosen.train(), chosen.test()
    shards = partition("iid", data, USERS, 0, chosen.name)
    weights = {
        f"weights.{name}": value.detach().numpy()
        for name, value in tasks.initial_model(chosen, 0).state_dict().items()
    }
    with tempfile.TemporaryDirectory() as folder:
        stored = Path(folder) / "cifar10.npz"
        np.savez(
            stored,
            inputs=data.inputs,
            targets=data.targets,
            shards=np.array(shards),
            test_inputs=test.inputs,
            test_targets=test.targets,
            **weights,
        )
        words = (
            "--model",
            chosen.name,
            "--rounds",
            str(rounds),
            "--cohort",
            str(COHORT),
            "--steps",
            str(STEPS),
            "--batch-size",
            str(BATCH),
            "--lr",
            str(LR),
            "--evaluate-every",
            str(EVALUATE_EVERY),
            "--threads",
            str(torch.get_num_threads()),
        )
        began = time.perf_counter()
        os.environ["PFL_PYTORCH_DEVICE"] = device
        result = run(
            Rival("pfl 0.6", (str(python), str(HERE / "rival_pfl.py"), str(stored), *words)),
            torch.get_num_threads(),
            24 * 3600,
        )
    return result | {"whole_s": time.perf_counter() - began}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument(
        "--rounds", type=int, help="number of rounds; default: 1,500 on a GPU, 20 on a CPU"
    )
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--engine", default="auto")
    options.add_argument(
        "--precision",
        default="float32",
        help="precision of training in fedcomp: float32 or bfloat16",
    )
    options.add_argument(
        "--dense", action="store_true", help="send float32 updates in both directions"
    )
    options.add_argument("--no-dropout", action="store_true")
    options.add_argument("--rivals", metavar="FOLDER", help="folder in which pfl is installed")
    options.add_argument("--json", metavar="FILE", help="write the results to this JSON file")
    args = options.parse_args()
    rounds = args.rounds or (1500 if args.device.startswith("cuda") else 20)
    found = {
        "fedcomp": fedcomp_row(rounds, args.device, args),
        "pfl 0.6": pfl_row(rounds, args.device, args),
    }
    found = {name: row for name, row in found.items() if row}
    print(
        f"CIFAR-10, {USERS} users, {COHORT} per round, {STEPS} steps with batches of {BATCH}; {rounds} rounds on "
        f"{found['fedcomp']['device']}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"
    )
    for name, row in found.items():
        median = statistics.median(row["seconds"][1:] or row["seconds"])
        ratio = (
            f"{sum(found['pfl 0.6']['seconds']) / sum(row['seconds']):7.2f} × pfl"
            if "pfl 0.6" in found
            else ""
        )
        print(
            f"{name:10}{sum(row['seconds']):9.1f} s in rounds{row['whole_s']:9.1f} s in all{1e3 * median:9.1f} ms a round (median)"
            f"{COHORT / median:9.0f} client updates/s   accuracy {row['accuracy'] or 0:.3f}{ratio}   {row.get('engine', '')}"
        )
    sent = found["fedcomp"]
    print(
        f"fedcomp's uplink: {sent['uplink_bytes']:,} bytes, instead of {sent['dense_uplink_bytes']:,} in float32"
    )
    if args.json:
        Path(args.json).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
