"""Rounds of Flower's own simulator on its Ray engine, for rivals.py: one JSON line.

    FEDCOMP_DATA=... python benchmarks/rival_flower_ray.py --task mnist-cnn --clients 200 --cohort 20 --rounds 6 [--cores 2]
    python benchmarks/rival_flower_ray.py WORKLOAD.npz --task mnist-cnn ...

The second runs without fedcomp, where flwr[simulation] and torch are installed. A ServerApp with FedAvg and a ClientApp as Flower's PyTorch
tutorial writes them: the model from the message, a shuffling DataLoader over the client's examples, torch.optim.SGD, the state back; an
actor of one core and one thread for each of the --cores. Examples are read once by each actor, and nothing is evaluated between rounds.
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
    mine = data["shards"][context.node_config["partition-id"]]
    examples = TensorDataset(
        torch.from_numpy(data["inputs"][mine]), torch.from_numpy(data["targets"][mine])
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
    """FedAvg that notes how long rounds take, from the choice of the cohort to the averaged model."""

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


def server_app(given: argparse.Namespace, workload: str, reached: list[float]) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        data, model = stored(workload), MODELS[given.task]()
        model.load_state_dict(
            {name: torch.from_numpy(data["weights." + name]) for name in model.state_dict()}
        )
        strategy = Timed(
            fraction_train=given.cohort / given.clients,
            fraction_evaluate=0.0,
            min_train_nodes=given.cohort,
            min_evaluate_nodes=0,
            min_available_nodes=given.clients,
        )
        config = {
            "workload": workload,
            "model": given.task,
            "steps": given.steps,
            "batch-size": given.batch_size,
            "lr": given.lr,
        }
        result = strategy.start(
            grid,
            ArrayRecord(model.state_dict()),
            num_rounds=given.rounds,
            train_config=ConfigRecord(config),
        )
        model.load_state_dict(result.arrays.to_torch_state_dict())
        model.eval()
        with torch.inference_mode():
            right = [
                int((model(torch.from_numpy(x)).argmax(-1) == torch.from_numpy(y)).sum())
                for x, y in zip(
                    np.array_split(data["test_inputs"], 10),
                    np.array_split(data["test_targets"], 10),
                    strict=True,
                )
            ]
        reached.append(sum(right) / len(data["test_targets"]))

    return app


def options() -> argparse.Namespace:
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument(
        "workload", nargs="?", help="as rival_pfl.py reads it; made with fedcomp when not given"
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
    given, reached = options(), []
    with tempfile.TemporaryDirectory() as folder:
        workload = given.workload
        if workload is None:
            from rivals import Workload, export

            workload = export(
                Workload(given.task, given.clients, given.cohort, given.rounds), Path(folder)
            )
        import rival_flower_ray as here  # as actors know it: by its name, so that what they have read stays

        run_simulation(
            here.server_app(given, str(Path(workload).absolute()), reached),
            here.client_app,
            num_supernodes=given.clients,
            backend_config={
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": {"num_cpus": given.cores},
            },
        )
    if set(here.answered) != {given.cohort} or len(here.seconds) != given.rounds:
        sys.exit(
            f"{here.answered} clients answered in {len(here.seconds)} rounds; {given.cohort} were to in {given.rounds}"
        )
    rate = given.cohort / sorted(here.seconds[1:] or here.seconds)[len(here.seconds[1:]) // 2]
    print(
        json.dumps(
            {
                "seconds": here.seconds,
                "accuracy": reached[-1],
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
