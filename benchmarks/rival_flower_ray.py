"""Time of rounds of Flower's own simulator on its Ray engine, for rivals.py.

    FEDCOMP_DATA=... python benchmarks/rival_flower_ray.py --task mnist-cnn --clients 200 --cohort 20 --rounds 6 [--cores 2]
    python benchmarks/rival_flower_ray.py WORKLOAD.npz --task mnist-cnn ...

The program prints one line of JSON. The second command needs only flwr[simulation] and torch, not fedcomp. The ServerApp and the ClientApp
follow Flower's PyTorch tutorial, with FedAvg, a shuffling DataLoader over the client's examples, and torch.optim.SGD. Ray runs one actor
with one thread on each of the --cores. Each actor reads the examples once, and rounds are not evaluated.
"""

import argparse
import functools
import itertools
import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from rival_models import MODELS
from torch.utils.data import DataLoader, TensorDataset

client_app = ClientApp()


@functools.cache
def stored(workload: str) -> dict[str, np.ndarray]:
    return dict(np.load(workload))


@client_app.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    model = MODELS[config["model"]]()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = stored(config["workload"])
    shard = data["shards"][context.node_config["partition-id"]]
    examples = TensorDataset(
        torch.from_numpy(data["inputs"][shard]), torch.from_numpy(data["targets"][shard])
    )
    loader = DataLoader(examples, batch_size=config["batch-size"], shuffle=True)
    loss_of, optimizer, total = (
        torch.nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=config["lr"]),
        0.0,
    )
    model.train()
    for inputs, targets in itertools.islice(
        itertools.chain.from_iterable(itertools.repeat(loader)), config["steps"]
    ):
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.item()
    metrics = MetricRecord({"train-loss": total / config["steps"], "num-examples": len(examples)})
    return Message(
        RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}),
        reply_to=message,
    )


class Timed(FedAvg):
    """FedAvg that records the duration of each round, from the selection of the clients to the averaged model."""

    def configure_train(self, server_round, arrays, config, grid):
        self.began = time.perf_counter()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        if any(reply.has_error() for reply in replies):
            raise SystemExit(next(reply.error.reason for reply in replies if reply.has_error()))
        averaged = super().aggregate_train(server_round, replies)
        seconds.append(time.perf_counter() - self.began)
        answered.append(len(replies))
        return averaged


seconds: list[float] = []
answered: list[int] = []


def server_app(args: argparse.Namespace, workload: str, accuracies: list[float]) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        data, model = stored(workload), MODELS[args.task]()
        model.load_state_dict(
            {name: torch.from_numpy(data["weights." + name]) for name in model.state_dict()}
        )
        strategy = Timed(
            fraction_train=args.cohort / args.clients,
            fraction_evaluate=0.0,
            min_train_nodes=args.cohort,
            min_evaluate_nodes=0,
            min_available_nodes=args.clients,
        )
        config = {
            "workload": workload,
            "model": args.task,
            "steps": args.steps,
            "batch-size": args.batch_size,
            "lr": args.lr,
        }
        result = strategy.start(
            grid,
            ArrayRecord(model.state_dict()),
            num_rounds=args.rounds,
            train_config=ConfigRecord(config),
        )
        model.load_state_dict(result.arrays.to_torch_state_dict())
        model.eval()
        with torch.inference_mode():
            correct = [
                int((model(torch.from_numpy(x)).argmax(-1) == torch.from_numpy(y)).sum())
                for x, y in zip(
                    np.array_split(data["test_inputs"], 10),
                    np.array_split(data["test_targets"], 10),
                    strict=True,
                )
            ]
        accuracies.append(sum(correct) / len(data["test_targets"]))

    return app


def options() -> argparse.Namespace:
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument(
        "workload",
        nargs="?",
        help="file in the format of rival_pfl.py; default: a file that fedcomp writes",
    )
    found.add_argument("--task", choices=MODELS, required=True)
    found.add_argument("--clients", type=int, default=200)
    found.add_argument("--cohort", type=int, default=20)
    found.add_argument("--rounds", type=int, default=10)
    found.add_argument("--steps", type=int, default=5)
    found.add_argument("--batch-size", type=int, default=20)
    found.add_argument("--lr", type=float, default=0.05)
    found.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    return found.parse_args()


def main() -> None:
    args, accuracies = options(), []
    with tempfile.TemporaryDirectory() as folder:
        workload = args.workload
        if workload is None:
            from rivals import Workload, export

            workload = export(
                Workload(args.task, args.clients, args.cohort, args.rounds), Path(folder)
            )
        import rival_flower_ray as here  # the name by which actors import this file, so that they cache the examples

        run_simulation(
            here.server_app(args, str(Path(workload).absolute()), accuracies),
            here.client_app,
            num_supernodes=args.clients,
            backend_config={
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": {"num_cpus": args.cores},
            },
        )
    if set(here.answered) != {args.cohort} or len(here.seconds) != args.rounds:
        sys.exit(
            f"{here.answered} clients answered in {len(here.seconds)} rounds; expected {args.cohort} in each of {args.rounds} rounds"
        )
    rate = args.cohort / sorted(here.seconds[1:] or here.seconds)[len(here.seconds[1:]) // 2]
    print(
        json.dumps(
            {
                "seconds": here.seconds,
                "accuracy": accuracies[-1],
                "client_updates_per_s": rate,
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    logging.getLogger("flwr").setLevel(logging.ERROR)
    from flwr.simulation import run_simulation

    main()
