"""The batched engine has the results of the serial engine: with every method for gradients, low precision, and too little memory."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import for_each
from small_models import Tied, small_task, train_together
from torch import nn
from torch.nn import functional as F

from fedcomp.errors import UserError
from fedcomp.sim.batched import BatchedEngine
from fedcomp.sim.batched.gradients import LAYERED, MAPPED
from fedcomp.tasks.cifar10 import ResNet18
from fedcomp.tasks.data import Data
from fedcomp.training.engine import SerialEngine
from fedcomp.training.local_sgd import LocalSGD, Traces, plan_batches

SGD = LocalSGD(steps=3, batch_size=4, lr=0.05)


def images() -> Data:
    drawn = torch.Generator().manual_seed(1)
    return Data(
        torch.randn(60, 3, 8, 8, generator=drawn), torch.randint(0, 4, (60,), generator=drawn)
    )


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Tanh()),
        nn.Flatten(),
        nn.Linear(128, 16),
        nn.ReLU(),
        nn.Linear(16, 4),
    )


def tied_and_frozen() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 3, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(3, 3, 3, padding=1),
        nn.Conv2d(3, 5, 3),
        nn.Flatten(),
        nn.Linear(180, 4),
    )
    model[2].weight = model[0].weight
    model[3].requires_grad_(False)
    return model


class Own(nn.Module):
    """A module with its own forward pass around a layer."""

    def __init__(self, forward):
        super().__init__()
        self.layer, self.own = nn.Linear(192, 4), forward

    def forward(self, x):
        return self.own(self.layer, x.flatten(1))


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Tanh(), nn.Linear(16, 4))


def flattened(layer, x):
    return layer(x).view(x.size(0), -1)


MODELS = {  # model, method for its gradients
    "network": (network, MAPPED),
    "tied, frozen": (tied_and_frozen, MAPPED),
    "resnet": (lambda: ResNet18(2, 4), MAPPED),
    "dense": (dense, LAYERED),
    "own": (lambda: Own(flattened), MAPPED),
}


def planned(sgd: LocalSGD, clients: int) -> list[list[np.ndarray]]:
    """Return the batches of clients with 12 examples each, except the last one, which has 3."""
    shards = [np.arange(12) + 9 * who for who in range(clients - 1)] + [np.arange(3) + 57]
    return [plan_batches(sgd, shard, 0, 1, who) for who, shard in enumerate(shards)]


def one_by_one(make, data, plans, sgd, **options) -> tuple[torch.Tensor, torch.Tensor]:
    task, model, layout, start = small_task(make, data, **options)
    engine = SerialEngine(task, model, layout, "cpu")
    trained = [
        engine.train(start, data, plan, sgd, round=1, client=who) for who, plan in enumerate(plans)
    ]
    return torch.stack([t.update for t in trained]), torch.tensor([t.result.loss for t in trained])


def assert_close(found, expected, tolerance=1e-4):
    assert (
        (found[0] - expected[0]).norm(dim=1) <= tolerance * expected[0].norm(dim=1)
    ).all() and expected[0].any(1).all()
    torch.testing.assert_close(found[1], expected[1], rtol=tolerance, atol=0)


@for_each("make, method", MODELS.values(), ids=MODELS)
def test_every_batched_form_equals_the_serial_engine(make, method):
    data, sgd = images(), replace(SGD, momentum=0.5, clip=1.0)
    plans = planned(sgd, 4)
    task, model, layout, start = small_task(make, data)
    engine = BatchedEngine(task, model, layout, "cpu")
    assert_close(
        train_together(engine, start, data, plans, sgd), one_by_one(make, data, plans, sgd)
    )
    assert engine.gradient_method == method


def test_a_loss_of_the_task_and_probabilities_as_targets_are_trained():
    data = Data(images().inputs, torch.rand(60, 4).softmax(1))
    plans, squared = (
        planned(SGD, 3),
        {"loss": lambda outputs, targets: (outputs.softmax(-1) - targets).square().sum(-1).mean()},
    )
    for options in (squared, {"loss": F.cross_entropy}):
        task, model, layout, start = small_task(network, data, **options)
        engine = BatchedEngine(task, model, layout, "cpu")
        assert_close(
            train_together(engine, start, data, plans, SGD),
            one_by_one(network, data, plans, SGD, **options),
        )


@for_each("make", [network, dense, lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4))])
def test_bfloat16_is_used_only_in_forward_and_backward_passes(make):
    data, plans = images(), planned(SGD, 3)
    task, model, layout, start = small_task(make, data)
    updates, losses = train_together(
        BatchedEngine(task, model, layout, "cpu"),
        start,
        data,
        plans,
        replace(SGD, precision="bfloat16"),
    )
    exact, exact_losses = train_together(
        BatchedEngine(*small_task(make, data)[:3], "cpu"), start, data, plans, SGD
    )
    assert updates.dtype == losses.dtype == torch.float32
    apart = (updates - exact).norm(dim=1) / exact.norm(dim=1)
    assert (apart > 1e-5).all() and (apart < 0.1).all()
    assert ((losses - exact_losses).abs() < 0.05 * exact_losses).all()


def test_training_changes_neither_the_model_nor_the_start_weights():
    data = images()
    task, model, layout, start = small_task(network, data)
    engine, given = BatchedEngine(task, model, layout, "cpu"), start.clone()
    first, second = (train_together(engine, start, data, planned(SGD, 3), SGD) for _ in range(2))
    assert (
        torch.equal(start, given)
        and torch.equal(first[0], second[0])
        and torch.equal(first[1], second[1])
    )


# Lack of memory, simulated by an error in the first operation of a step.


def limited(monkeypatch, max_clients: int, error: Exception) -> list[int]:
    """Let steps of more than `max_clients` clients raise `error`. Return a list that collects the number of clients of each step."""
    sizes, gradients = [], BatchedEngine._gradients

    def bounded(self, parameters, data, batch, sgd):
        if len(batch[0]) > max_clients:
            raise error
        sizes.append(len(batch[0]))
        return gradients(self, parameters, data, batch, sgd)

    monkeypatch.setattr(BatchedEngine, "_gradients", bounded)
    return sizes


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_too_little_memory_halves_the_number_of_clients_from_then_on(monkeypatch, error):
    sizes, said = limited(monkeypatch, 3, error), []
    sgd, data = replace(SGD, momentum=0.9, keep_momentum=True), images()
    plans = planned(sgd, 6)[:5] * 3
    task, model, layout, start = small_task(network, data)
    engine = BatchedEngine(task, model, layout, "cpu", warn=said.append)
    kept, whole, again = (
        [Traces(momentum=torch.ones(layout.numel)) for _ in plans] for _ in range(3)
    )
    found = train_together(engine, start, data, plans, sgd, traces=kept)
    assert len(said) == 1 and "15 clients" in said[0] and engine.at_once == max(sizes) == 2
    monkeypatch.undo()
    expected = train_together(
        BatchedEngine(*small_task(network, data)[:3], "cpu"), start, data, plans, sgd, traces=whole
    )
    assert_close(found, expected)
    for mine, theirs in zip(kept, whole, strict=True):
        torch.testing.assert_close(mine.momentum, theirs.momentum)
    assert_close(train_together(engine, start, data, plans, sgd, traces=again), expected)
    assert len(said) == 1


def test_memory_may_run_out_in_a_later_step(monkeypatch):
    data, plans = images(), planned(SGD, 6)
    task, model, layout, start = small_task(network, data)
    engine, passed, gradients = (
        BatchedEngine(task, model, layout, "cpu", at_once=3),
        [],
        BatchedEngine._gradients,
    )

    def later(self, parameters, data, batch, sgd):
        passed.append(len(batch[0]))
        if len(passed) == 8:  # in the second batch's second step
            raise torch.OutOfMemoryError
        return gradients(self, parameters, data, batch, sgd)

    monkeypatch.setattr(BatchedEngine, "_gradients", later)
    found = train_together(engine, start, data, plans, SGD)
    monkeypatch.undo()
    assert_close(found, one_by_one(network, data, plans, SGD))


def test_an_error_says_that_one_client_does_not_fit_into_memory(monkeypatch):
    limited(monkeypatch, 0, torch.OutOfMemoryError())
    task, model, layout, start = small_task(network, images())
    with pytest.raises(
        UserError, match="is too small to train one client; give a smaller --batch-size"
    ):
        train_together(
            BatchedEngine(task, model, layout, "cpu"), start, images(), planned(SGD, 4), SGD
        )


def test_other_errors_are_not_treated_as_out_of_memory(monkeypatch):
    limited(monkeypatch, 2, RuntimeError("the model's own"))
    said = []
    task, model, layout, start = small_task(
        Tied, Data(torch.randn(60, 12), torch.randint(0, 4, (60,)))
    )
    engine = BatchedEngine(task, model, layout, "cpu", warn=said.append)
    with pytest.raises(RuntimeError, match="the model's own"):
        train_together(engine, start, task.train(), planned(SGD, 4), SGD)
    assert not said and engine.at_once == 0


def test_bfloat16_models_are_trained():
    data = Data(images().inputs.bfloat16(), images().targets)

    def make():
        return nn.Sequential(
            nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 4)
        ).bfloat16()

    plans = planned(SGD, 3)
    task, model, layout, start = small_task(make, data)
    assert_close(
        train_together(BatchedEngine(task, model, layout, "cpu"), start, data, plans, SGD),
        one_by_one(make, data, plans, SGD),
        0.1,
    )
