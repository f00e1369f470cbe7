import copy
import dataclasses

import numpy as np
import pytest
import torch
from cases import for_each
from small_models import Coarse, Scalar, Tied, small_task
from torch import nn
from torch.nn import functional as F

from fedcomp.config import RunConfig
from fedcomp.layout import Layout
from fedcomp.tasks.base import Task
from fedcomp.tasks.data import Data
from fedcomp.training.engine import SerialEngine
from fedcomp.training.evaluation import evaluate
from fedcomp.training.local_sgd import LocalSGD, plan_batches

SGD = LocalSGD(steps=6, batch_size=8, lr=0.1)
VARIANTS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "weight decay": {"weight_decay": 0.1},
    "clip": {"clip": 0.05},
    "wide clip": {"clip": 1e6},
    "all": {"momentum": 0.9, "weight_decay": 0.1, "clip": 0.3},
    "proximal": {"proximal": 0.7, "momentum": 0.5, "clip": 0.5},
}


MODELS = {
    "linear": lambda: nn.Linear(12, 4),
    "mlp": lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4)
    ),
    "tied, frozen, unused": Tied,
    "bfloat16": Coarse,
    "scalar": Scalar,
}


def examples(count: int = 60) -> Data:
    drawn = torch.Generator().manual_seed(1)
    return Data(
        torch.randn(count, 12, generator=drawn), torch.randint(0, 4, (count,), generator=drawn)
    )


def parts(make, **options) -> tuple[Task, nn.Module, Layout, torch.Tensor]:
    return small_task(make, examples, **options)


def by_torch_optim(
    task: Task, model: nn.Module, layout: Layout, start, data: Data, batches, sgd: LocalSGD
):
    model, losses = copy.deepcopy(model).train(), []
    layout.scatter(start, model)
    start = layout.gather(model)
    reached = [p for name, p in model.named_parameters() if p.requires_grad and name != "unused"]
    began = [p.detach().clone() for p in reached]
    optimizer = torch.optim.SGD(
        reached, lr=sgd.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay
    )
    for batch in batches:
        optimizer.zero_grad()
        loss = task.criterion(model(data.inputs[batch]), data.targets[batch])
        loss.backward()
        if sgd.clip:
            nn.utils.clip_grad_norm_(reached, sgd.clip)
        for p, near in zip(reached, began, strict=True):
            p.grad += sgd.proximal * (p.detach() - near)
        optimizer.step()
        losses.append(loss.item())
    return layout.gather(model) - start, sum(losses) / len(losses)


# Every variant of the options with one model, and all models with the variant that combines the options.
@for_each(
    "model_name, variant",
    [("mlp", variant) for variant in VARIANTS]
    + [(model, variant) for model in MODELS for variant in ("all", "proximal") if model != "mlp"],
)
def test_updates_equal_those_of_torch_optim_sgd(model_name, variant):
    make = MODELS[model_name]
    task, model, layout, start = parts(make)
    sgd, data = dataclasses.replace(SGD, **VARIANTS[variant]), examples()
    batches = plan_batches(sgd, np.arange(40), seed=0, round=1, client=2)
    update, loss = by_torch_optim(task, model, layout, start, data, batches, sgd)
    trained = SerialEngine(task, model, layout, "cpu").train(start, data, batches, sgd)
    unused = layout.views(update).get("unused")
    if (
        unused is not None
    ):  # weight decay changes a parameter without a gradient here, but not in torch.optim
        unused.copy_(layout.views(trained.update)["unused"])
    tolerance = 0.03 if make is Coarse else 1e-5
    assert (trained.update - update).norm() < tolerance * update.norm()
    assert trained.result.loss == pytest.approx(loss, rel=tolerance)
    assert trained.update.dtype == torch.float32 and trained.result.buffers is None


def test_the_training_of_a_client_does_not_affect_the_next_client():
    task, model, layout, start = parts(MODELS["mlp"])
    engine, data, sgd = (
        SerialEngine(task, model, layout, "cpu"),
        examples(),
        dataclasses.replace(SGD, momentum=0.9),
    )
    mine, other = (plan_batches(sgd, np.arange(30) + 30 * who, 0, 1, who) for who in (0, 1))
    given, first = start.clone(), engine.train(start, data, mine, sgd)
    engine.train(torch.randn(layout.numel), data, other, sgd)
    again = engine.train(start, data, mine, sgd)
    assert torch.equal(first.update, again.update) and first.result.loss == again.result.loss
    assert torch.equal(start, given)


def test_with_bfloat16_weights_rounding_is_not_part_of_the_update():
    task, model, layout, start = parts(Coarse)
    start += 1e-4
    still = SerialEngine(task, model, layout, "cpu").train(
        start, examples(), [np.arange(8)], dataclasses.replace(SGD, lr=1e-30)
    )
    assert not still.update.any()


def test_dropout_depends_only_on_seed_round_and_client():
    class Functional(nn.Linear):
        def forward(self, x):
            return super().forward(F.dropout(x, 0.5, self.training))

    for make in (lambda: nn.Sequential(nn.Dropout(), nn.Linear(12, 4)), lambda: Functional(12, 4)):
        task, model, layout, start = parts(make)
        engine, data, batches = (
            SerialEngine(task, model, layout, "cpu"),
            examples(),
            [np.arange(20)] * 3,
        )
        before = torch.get_rng_state()
        first = engine.train(start, data, batches, SGD, seed=3, round=4, client=5).update
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(9)
        assert torch.equal(
            engine.train(start, data, batches, SGD, seed=3, round=4, client=5).update, first
        )
        for other in (
            {"seed": 0, "round": 4, "client": 5},
            {"seed": 3, "round": 0, "client": 5},
            {"seed": 3, "round": 4, "client": 0},
        ):
            assert not torch.equal(engine.train(start, data, batches, SGD, **other).update, first)


def test_running_statistics_of_a_client_do_not_affect_other_clients():
    make = lambda: nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))  # noqa: E731
    task, model, layout, start = parts(make)
    engine, data, batches = (
        SerialEngine(task, model, layout, "cpu"),
        examples(),
        [np.arange(20)] * 3,
    )
    fresh = engine.train(start, data, batches, SGD)
    assert set(fresh.result.buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert fresh.result.buffers["1.num_batches_tracked"] == 3
    assert (
        engine.train(start, data, batches, SGD, buffers=fresh.result.buffers).result.buffers[
            "1.num_batches_tracked"
        ]
        == 6
    )
    again = engine.train(start, data, batches, SGD).result.buffers
    assert all(
        torch.equal(again[name], fresh.result.buffers[name]) for name in fresh.result.buffers
    )


def test_buffers_that_do_not_change_are_not_returned():
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(12, 4)
            self.register_buffer("scale", torch.full((12,), 2.0))

        def forward(self, x):
            return super().forward(x * self.scale)

    task, model, layout, start = parts(Scaled)
    assert (
        SerialEngine(task, model, layout, "cpu")
        .train(start, examples(), [np.arange(8)], SGD)
        .result.buffers
        is None
    )


@for_each("batch", [7, 60, 1000])
def test_evaluation_averages_over_examples(monkeypatch, batch):
    monkeypatch.setattr("fedcomp.training.evaluation.CPU_BATCH", batch)
    task, model, layout, start = parts(lambda: nn.Sequential(nn.Linear(12, 4), nn.Dropout()))
    weights, data = start * 2, examples()
    loss, accuracy, _ = evaluate(task, model, layout, weights, data, "cpu")
    layout.scatter(weights, model)
    with torch.no_grad():
        outputs = model.eval()(data.inputs)
    assert loss == pytest.approx(F.cross_entropy(outputs, data.targets).item(), rel=1e-5)
    assert accuracy == pytest.approx(
        (outputs.argmax(-1) == data.targets).double().mean().item(), rel=1e-6
    )


FORMS = {
    "one element": lambda value: value[None],
    "number": torch.Tensor.item,
    "scalar": lambda value: value,
}


@for_each("given", FORMS.values(), ids=FORMS)
def test_a_task_may_return_loss_and_accuracy_as_tensors_or_numbers(given):
    task, model, layout, start = parts(MODELS["linear"])
    wrapped = dataclasses.replace(
        task,
        loss=lambda o, t: given(task.criterion(o, t)),
        accuracy=lambda o, t: given(task.accuracy(o, t)),
    )
    found = evaluate(wrapped, model, layout, start, examples(), "cpu")
    assert (
        found == evaluate(task, model, layout, start, examples(), "cpu")
        and type(found.loss) is type(found.accuracy) is float
    )


def test_vectors_are_float32_even_if_a_task_changes_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        task, model, layout, start = parts(MODELS["mlp"])
        data = Data(examples().inputs.double(), examples().targets)
        trained = SerialEngine(task, model, layout, "cpu").train(start, data, [np.arange(8)], SGD)
        assert model[0].weight.dtype == torch.float64 and trained.update.any()
        assert start.dtype == trained.update.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_evaluation_in_the_model_of_the_engine_does_not_affect_training():
    task, model, layout, start = parts(MODELS["mlp"])
    engine, data = SerialEngine(task, model, layout, "cpu"), examples()
    first = engine.train(start, data, [np.arange(20)], SGD).update
    evaluate(task, model, layout, start + 1, data, "cpu")
    assert torch.equal(engine.train(start, data, [np.arange(20)], SGD).update, first)


def test_the_training_options_are_those_of_the_run():
    config = RunConfig(
        local_steps=3,
        local_epochs=2,
        batch_size=7,
        lr=0.5,
        momentum=0.25,
        weight_decay=0.125,
        clip=2.0,
        proximal=0.5,
    )
    assert LocalSGD.from_config(config) == LocalSGD(3, 2, 7, 0.5, 0.25, 0.125, 2.0, proximal=0.5)
    assert LocalSGD.from_config(RunConfig()) == LocalSGD()


@for_each("channels, stride, last", [(3, 2, False), (5, 2, False), (8, 2, True), (3, 1, True)])
def test_channels_last_is_not_used_where_torch_writes_out_of_bounds(channels, stride, last):
    model = nn.Sequential(nn.Conv2d(channels, 4, 1, stride=stride), nn.Flatten(), nn.LazyLinear(2))
    model(torch.zeros(1, channels, 8, 8))
    made = SerialEngine(Task("strided", lambda: model, None, None), model, Layout.of(model), "cpu")
    assert made.channels_last is last
