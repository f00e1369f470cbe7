"""Compressed Flower runs of apps that train fedcomp tasks: one with dict batches, one with its own training loop."""

import numpy as np
import torch
from cases import for_each
from flower_grid import AppGrid
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.nn import functional as F

from fedcomp import Data, Task
from fedcomp.layout import Layout
from fedcomp.tasks import initial_model
from fedcomp.training.evaluation import evaluate
from fedcomp.training.local_sgd import LocalSGD, plan_batches
from fedcomp.training.own_loop import client_engine
from fedcomp.transports.flower import Compressed, compression_mod

CLIENTS, EXAMPLES = 3, 20
SGD = LocalSGD(steps=5, batch_size=10, lr=0.2)
GENERATOR = torch.Generator().manual_seed(3)
LABELS = torch.arange(CLIENTS * EXAMPLES) % 2
POINTS = torch.randn(len(LABELS), 4, generator=GENERATOR) + 2.0 * LABELS[:, None]


class TwoInputs(nn.Module):
    """A linear model whose inputs are keyword arguments, and which computes its loss."""

    class Output(dict):
        loss = property(lambda self: self["loss"])
        logits = property(lambda self: self["logits"])

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, first, second, labels):
        logits = self.linear(torch.cat([first, second], 1))
        return self.Output(logits=logits, loss=F.cross_entropy(logits, labels))


def dict_data() -> Data:
    return Data({"first": POINTS[:, :1], "second": POINTS[:, 1:], "labels": LABELS}, LABELS)


def train_by_adam(model, data, local_round):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    optimizer.load_state_dict(local_round.state.get("adam", optimizer.state_dict()))
    inputs, targets = (torch.stack(column) for column in zip(*data, strict=True))
    for _ in range(local_round.steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    local_round.state["adam"] = optimizer.state_dict()
    return {"loss": loss.item(), "examples": len(targets)}


TASKS = {
    "dict batches": Task("dict batches", TwoInputs, dict_data, dict_data),
    "own loop": Task(
        "own loop",
        lambda: nn.Linear(4, 2),
        lambda: Data(POINTS, LABELS),
        lambda: Data(POINTS, LABELS),
        train_fn=train_by_adam,
    ),
}


def app_of(task: Task, mods: list) -> ClientApp:
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context) -> Message:
        model = initial_model(task, 0)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        layout, round = Layout.of(model), int(message.content["config"]["server-round"])
        client = context.node_config["partition-id"]
        shard = np.arange(client * EXAMPLES, (client + 1) * EXAMPLES)
        plan, start = plan_batches(SGD, shard, 0, round, client), layout.gather(model)
        engine = client_engine(task, model, layout, "cpu")
        trained = engine.train(start, task.train(), plan, SGD, round=round, client=client)
        layout.scatter(start + trained.update, model)
        metrics = {"num-examples": EXAMPLES, "loss": trained.result.loss}
        reply = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
        return Message(RecordDict(reply), reply_to=message)

    return app


def final_model(task: Task, mods: list, strategy, rounds: int = 3) -> tuple[torch.Tensor, AppGrid]:
    grid = AppGrid(lambda: app_of(task, mods), CLIENTS)
    initial = ArrayRecord(initial_model(task, 0).state_dict())
    result = strategy.start(grid, initial, num_rounds=rounds)
    model = initial_model(task, 0)
    model.load_state_dict(result.arrays.to_torch_state_dict())
    return Layout.of(model).gather(model), grid


def loss_of(task: Task, weights: torch.Tensor) -> float:
    model = initial_model(task, 0)
    return evaluate(task, model, Layout.of(model), weights, task.test(), "cpu").loss


@for_each("name", TASKS)
def test_identity_changes_nothing(tmp_path, name):
    task = TASKS[name]
    expected, _ = final_model(task, [], FedAvg(fraction_evaluate=0.0))
    compressed = Compressed(FedAvg(fraction_evaluate=0.0), uplink="identity", downlink="identity")
    weights, _ = final_model(task, [compression_mod(state_dir=tmp_path)], compressed)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@for_each("name", TASKS)
def test_sparse_updates_lower_the_loss(tmp_path, name):
    task = TASKS[name]
    mods = [compression_mod(state_dir=tmp_path)]
    strategy = Compressed(
        FedAvg(fraction_evaluate=0.0), uplink="topk:density=30%", downlink="identity"
    )
    weights, _ = final_model(task, mods, strategy)
    model = initial_model(task, 0)
    initial = Layout.of(model).gather(model)
    assert not any(strategy.rejections.values())
    assert loss_of(task, weights) < 0.8 * loss_of(task, initial)
