import dataclasses

import numpy as np
import pytest
import torch
from cases import for_each
from small_models import Coarse, Scalar, Tied, small_task, train_together
from torch import nn
from torch.nn import functional as F

from fedcomp import RunConfig
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout
from fedcomp.sim.batched import BatchedEngine
from fedcomp.sim.engine_choice import EngineChoice, clients_at_once
from fedcomp.tasks.base import Task
from fedcomp.tasks.data import Data
from fedcomp.training.engine import SerialEngine
from fedcomp.training.local_sgd import LocalSGD, plan_batches

SGD = LocalSGD(steps=4, batch_size=8, lr=0.1)
VARIANTS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "weight decay": {"weight_decay": 0.1},
    "clip": {"clip": 0.05},
    "all": {"momentum": 0.9, "weight_decay": 0.1, "clip": 0.3},
    "proximal": {"proximal": 0.7, "momentum": 0.5, "clip": 0.5},
    "epochs": {"epochs": 2, "momentum": 0.5},
}


class Scaled(nn.Linear):
    """A linear layer with a constant buffer and its own forward pass."""

    def __init__(self):
        super().__init__(12, 4)
        self.register_buffer("scale", torch.full((12,), 2.0))

    def forward(self, x):
        return super().forward(x * self.scale)


def shared_and_frozen() -> nn.Module:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12, bias=False), nn.Linear(12, 4)
    )
    model[3].weight = model[1].weight
    model[4].bias.requires_grad_(False)
    return model


def frozen_below() -> nn.Module:
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    return model


def doubled() -> nn.Module:
    """Return a layer with a hook that doubles its output."""
    model = nn.Linear(12, 4)
    model.register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 1),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


MODELS = {
    "linear": lambda: nn.Linear(12, 4),
    "mlp": lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)),
    "activations in place": lambda: nn.Sequential(
        nn.Linear(12, 8), nn.ELU(inplace=True), nn.Linear(8, 8), nn.SiLU(True), nn.Linear(8, 4)
    ),
    "frozen below": frozen_below,
    "tied, frozen": shared_and_frozen,
    "convolution": convolution,
    "tied, frozen, unused": Tied,
    "bfloat16": Coarse,
    "scalar": Scalar,
    "constant buffer": Scaled,
    "hook": doubled,
}


def examples() -> Data:
    drawn = torch.Generator().manual_seed(1)
    return Data(torch.randn(90, 12, generator=drawn), torch.randint(0, 4, (90,), generator=drawn))


def parts(make, **options) -> tuple[Task, nn.Module, Layout, torch.Tensor]:
    return small_task(make, examples, **options)


def one_by_one(task, model, layout, start, data, plans, sgd) -> tuple[torch.Tensor, torch.Tensor]:
    engine = SerialEngine(task, model, layout, "cpu")
    trained = [engine.train(start, data, plan, sgd) for plan in plans]
    return torch.stack([t.update for t in trained]), torch.tensor([t.result.loss for t in trained])


def assert_same_as_one_by_one(make, data, plans, sgd, at_once=0, **options):
    task, model, layout, start = parts(make, **options)
    given = start.clone()
    updates, losses = train_together(
        BatchedEngine(task, model, layout, "cpu", at_once), start, data, plans, sgd
    )
    assert torch.equal(start, given) and updates.dtype == losses.dtype == torch.float32
    expected, expected_losses = one_by_one(*parts(make, **options), data, plans, sgd)
    tolerance = 0.03 if make is Coarse else 1e-4
    assert ((updates - expected).norm(dim=1) < tolerance * expected.norm(dim=1)).all()
    torch.testing.assert_close(losses, expected_losses, rtol=tolerance, atol=0)


@for_each(
    "name, variant",
    [(name, "all") for name in MODELS] + [("mlp", v) for v in VARIANTS if v != "all"],
)
def test_updates_equal_those_of_the_serial_engine(name, variant):
    make = MODELS[name]
    sgd = dataclasses.replace(SGD, **VARIANTS[variant])
    # Clients whose batches have three different lists of sizes if `epochs` is set.
    starts_and_sizes = ((0, 20), (20, 5), (25, 20), (45, 5), (50, 37))
    shards = [np.arange(start, start + size) for start, size in starts_and_sizes]
    plans = [plan_batches(sgd, shard, 0, 1, who) for who, shard in enumerate(shards)]
    assert_same_as_one_by_one(make, examples(), plans, sgd)


@for_each("at_once", [1, 2, 3, 7, 100])
@for_each("make", [MODELS["mlp"], Tied], ids=["mlp", "tied"])
def test_updates_do_not_depend_on_the_number_of_clients_at_once(make, at_once):
    plans = [plan_batches(SGD, np.arange(30) + 12 * who, 0, 1, who) for who in range(5)]
    assert_same_as_one_by_one(make, examples(), plans, SGD, at_once)


def test_embeddings_and_sequences_are_trained():
    drawn = torch.Generator().manual_seed(1)
    texts = Data(
        torch.randint(0, 9, (40, 5), generator=drawn), torch.randint(0, 4, (40,), generator=drawn)
    )
    bag = lambda: nn.Sequential(nn.Embedding(9, 6), nn.Flatten(), nn.Linear(30, 4))  # noqa: E731
    plans = [plan_batches(SGD, np.arange(20) + 10 * who, 0, 1, who) for who in range(3)]
    assert_same_as_one_by_one(bag, texts, plans, SGD)
    rows = Data(torch.randn(40, 3, 12, generator=drawn), torch.randn(40, 3, 4, generator=drawn))
    assert_same_as_one_by_one(MODELS["mlp"], rows, plans, SGD, loss=F.mse_loss)


def test_a_loss_of_the_task_is_used():
    plans = [plan_batches(SGD, np.arange(30) + 12 * who, 0, 1, who) for who in range(5)]
    squared = lambda outputs, targets: ((outputs - F.one_hot(targets, 4)) ** 2).mean()  # noqa: E731
    assert_same_as_one_by_one(MODELS["linear"], examples(), plans, SGD, loss=squared)


def test_targets_that_cross_entropy_ignores_are_ignored():
    data = examples()
    data.targets[::3] = -100
    plans = [plan_batches(SGD, np.arange(30) + 12 * who, 0, 1, who) for who in range(5)]
    assert_same_as_one_by_one(MODELS["linear"], data, plans, SGD)


@for_each(
    "options",
    [{}, {"momentum": 0.9, "weight_decay": 0.1}, {"clip": 0.1}],
    ids=["plain", "momentum", "clip"],
)
@for_each(
    "model, method",
    [("linear", "layered"), ("convolution", "mapped"), ("tied, frozen, unused", "mapped")],
)
def test_a_batch_with_only_ignored_targets_has_no_gradient(model, method, options):
    make, data, sgd = MODELS[model], examples(), dataclasses.replace(SGD, **options)
    data.targets[80:88] = -100
    plans = [
        [np.arange(20, 28), np.arange(80, 88), np.arange(30, 38)],
        [np.arange(40, 48), np.arange(50, 58), np.arange(60, 68)],
    ]
    engine = BatchedEngine(*parts(make)[:3], "cpu")
    updates, losses = train_together(engine, parts(make)[3], data, plans, sgd)
    assert engine.gradient_method == method
    expected, expected_losses = one_by_one(*parts(make), data, plans, sgd)
    assert expected.isfinite().all() and expected_losses.isfinite().tolist() == [False, True]
    torch.testing.assert_close(updates, expected)
    torch.testing.assert_close(losses, expected_losses, equal_nan=True)


def test_targets_can_be_probabilities():
    data = Data(examples().inputs, torch.rand(90, 4).softmax(1))
    plans = [plan_batches(SGD, np.arange(30) + 12 * who, 0, 1, who) for who in range(5)]
    assert_same_as_one_by_one(MODELS["linear"], data, plans, SGD)


def test_updates_are_float32_for_any_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        task, model, layout, start = parts(MODELS["mlp"])
        data = Data(examples().inputs.double(), examples().targets)
        updates, losses = train_together(
            BatchedEngine(task, model, layout, "cpu"),
            start,
            data,
            [[np.arange(8)], [np.arange(8) + 8]],
            SGD,
        )
        assert model[0].weight.dtype == torch.float64 and updates.any()
        assert updates.dtype == losses.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_client_that_diverges_does_not_affect_the_others():
    data = examples()
    data.inputs[:30] = torch.inf
    task, model, layout, start = parts(MODELS["mlp"])
    plans = [plan_batches(SGD, np.arange(30) + 30 * who, 0, 1, who) for who in range(3)]
    updates, losses = train_together(
        BatchedEngine(task, model, layout, "cpu"), start, data, plans, SGD
    )
    assert (
        not updates[0].isfinite().all()
        and updates[1:].isfinite().all()
        and losses[1:].isfinite().all()
    )


CPU = torch.device("cpu")


def chosen(model: nn.Module, engine: str) -> EngineChoice:
    data = Data(torch.zeros(1, 12), torch.zeros(1, dtype=torch.int64))
    task = Task("small", lambda: model, data, data)
    return EngineChoice.choose(RunConfig(engine=engine), task, data, model, CPU)


CHOICES = {  # model, value of --engine, chosen engine
    "linear": (lambda: nn.Linear(784, 10), "auto", "batched"),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        "auto",
        "batched",
    ),
    "convolution": (convolution, "auto", "serial"),
    "convolution, requested": (convolution, "batched", "batched"),
    "larger than the caches": (lambda: nn.Linear(2000, 1000), "auto", "batched"),
    "large mlp": (
        lambda: nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 10)),
        "auto",
        "serial",
    ),
    "large mlp, requested": (
        lambda: nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 10)),
        "batched",
        "batched",
    ),
    "large embedding": (
        lambda: nn.Sequential(nn.Embedding(9000, 40), nn.Flatten(), nn.Linear(80, 4)),
        "auto",
        "batched",
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 4)),
        "auto",
        "batched",
    ),
    "dropout": (lambda: nn.Sequential(nn.Linear(12, 4), nn.Dropout()), "auto", "serial"),
    "batch statistics": (
        lambda: nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4, affine=False)),
        "auto",
        "serial",
    ),
    "recurrent": (lambda: nn.LSTM(12, 4), "auto", "serial"),
}


@for_each("make, requested, engine", CHOICES.values(), ids=CHOICES)
def test_the_engine_is_chosen_by_the_model(monkeypatch, make, requested, engine):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    choice = chosen(make(), requested)
    assert choice.engine == engine
    assert choice.at_once == 1 if engine == "serial" else choice.at_once >= 2


def test_fewer_clients_of_larger_models_and_batches_are_trained_at_once():
    small, large = nn.Linear(100, 10), nn.Linear(784, 10)
    assert clients_at_once(small, CPU, 20) > clients_at_once(large, CPU, 20)
    assert clients_at_once(large, CPU, 5) > clients_at_once(large, CPU, 50)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout(),
        nn.GRU(12, 4),
        nn.BatchNorm1d(12),
        nn.MultiheadAttention(12, 2, dropout=0.1),
        nn.Embedding(9, 4, max_norm=1.0),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_the_error_for_a_model_that_cannot_be_batched_names_the_flag(layer):
    with pytest.raises(ConfigError, match=f"{type(layer).__name__}.*--engine serial"):
        chosen(nn.Sequential(nn.Linear(12, 12), layer), "batched")


@for_each(
    "forward",
    [
        lambda layer, x: x if x.sum() > 0 else -x,
        lambda layer, x: x * x.max().item(),
        lambda layer, x: F.dropout(x, 0.5),
        lambda layer, x: x + layer.average.mul_(0.9).add_(x.detach().mean(0)),
    ],
    ids=["branch", "item", "random", "buffer"],
)
def test_the_error_for_a_forward_pass_that_cannot_be_mapped_names_the_flag(forward):
    class Own(nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.register_buffer("average", torch.zeros(4))

        def forward(self, x):
            return forward(self, super().forward(x))

    task, model, layout, start = parts(lambda: Own(12, 4))
    with pytest.raises(
        ConfigError, match="'small' cannot be trained by the batched engine.*--engine serial"
    ):
        train_together(
            BatchedEngine(task, model, layout, "cpu"), start, examples(), [[np.arange(5)]] * 2, SGD
        )


def test_other_errors_of_the_model_are_raised_unchanged():
    task, model, layout, start = parts(lambda: nn.Sequential(nn.Linear(13, 4), nn.LayerNorm(4)))
    with pytest.raises(RuntimeError, match="size"):
        train_together(
            BatchedEngine(task, model, layout, "cpu"), start, examples(), [[np.arange(5)]] * 2, SGD
        )
