"""The compiled loops of softmax regression have the results of the serial engine. Other models do not use the loops."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_models import train_together
from torch import nn

from fedcomp.kernels import regression
from fedcomp.layout import Layout
from fedcomp.sim.batched import BatchedEngine
from fedcomp.tasks.base import Task
from fedcomp.tasks.data import Data
from fedcomp.training.engine import SerialEngine
from fedcomp.training.local_sgd import LocalSGD, Traces, plan_batches

SGD = LocalSGD(steps=4, batch_size=7, lr=0.1)
WIDTH, CLASSES = 45, 5  # neither is a multiple of the size of a vector register


@pytest.fixture(autouse=True)
def however_small(monkeypatch):
    monkeypatch.setattr(regression, "MIN_WORK", 100)


@pytest.fixture
def descents(monkeypatch) -> list[int]:
    """Return a list that collects the number of clients of each call of the kernel."""
    seen, descend = [], regression.descend
    monkeypatch.setattr(
        regression, "descend", lambda stack, *rest: seen.append(len(stack)) or descend(stack, *rest)
    )
    return seen


def examples(shape: tuple[int, ...] = (WIDTH,)) -> Data:
    drawn = torch.Generator().manual_seed(1)
    return Data(
        torch.randn(90, *shape, generator=drawn), torch.randint(0, CLASSES, (90,), generator=drawn)
    )


def linear() -> nn.Module:
    return nn.Linear(WIDTH, CLASSES)


def without_bias() -> nn.Module:
    return nn.Sequential(nn.Identity(), nn.Flatten(), nn.Linear(WIDTH, CLASSES, bias=False))


def engines(make, data, at_once=0, **options) -> tuple[BatchedEngine, SerialEngine, torch.Tensor]:
    torch.manual_seed(0)
    model, other = make(), make()
    other.load_state_dict(model.state_dict())
    task, layout = Task("small", make, lambda: data, lambda: data, **options), Layout.of(model)
    start = layout.gather(model)
    return (
        BatchedEngine(task, model, layout, "cpu", at_once),
        SerialEngine(task, other, layout, "cpu"),
        start,
    )


def planned(sgd: LocalSGD, clients: int) -> list[list[np.ndarray]]:
    """Return the batches of clients with 20 examples each, except the last one, which has 3."""
    shards = [np.arange(20) + 11 * who for who in range(clients - 1)] + [np.arange(3) + 87]
    return [plan_batches(sgd, shard, 0, 1, who) for who, shard in enumerate(shards)]


def assert_as_one_by_one(batched, serial, start, data, plans, sgd):
    updates, losses = train_together(batched, start, data, plans, sgd)
    for plan, update, loss in zip(plans, updates, losses, strict=True):
        expected = serial.train(start, data, plan, sgd)
        torch.testing.assert_close(update, expected.update, rtol=1e-4, atol=1e-6)
        assert loss.item() == pytest.approx(expected.result.loss, rel=1e-5)
    return updates


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "shape", "sgd"),
    [
        (linear, (WIDTH,), SGD),
        (linear, (WIDTH,), replace(SGD, batch_size=1)),
        (without_bias, (3, 5, 3), replace(SGD, epochs=2)),
        (without_bias, (3, 5, 3), replace(SGD, steps=1, batch_size=20)),
    ],
)
def test_updates_equal_those_of_the_serial_engine(make, shape, sgd, descents):
    data = examples(shape)
    plans = planned(sgd, 6)
    assert assert_as_one_by_one(*engines(make, data), data, plans, sgd).any(1).all()
    assert sum(descents) >= 5  # the kernel may refuse batches of one example


def test_the_loops_train_all_clients_at_once_for_any_at_once(descents):
    data, plans = examples(), planned(SGD, 6)
    whole = train_together(engines(linear, data)[0], engines(linear, data)[2], data, plans, SGD)
    batched, _, start = engines(linear, data, at_once=2)
    for found, expected in zip(
        train_together(batched, start, data, plans, SGD), whole, strict=True
    ):
        assert torch.equal(found, expected)
    assert descents == [1, 5, 1, 5]


def test_results_do_not_depend_on_other_clients_or_threads():
    data, plans = examples(), planned(SGD, 8)
    batched, _, start = engines(linear, data)
    updates, threads = train_together(batched, start, data, plans, SGD)[0], torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(train_together(batched, start, data, plans, SGD)[0], updates)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(train_together(batched, start, data, plans[2:3], SGD)[0][0], updates[2])


def test_the_default_dtype_does_not_change_the_results():
    data, plans = examples(), planned(SGD, 4)
    batched, _, start = engines(linear, data)
    expected = train_together(batched, start, data, plans, SGD)
    try:
        torch.set_default_dtype(torch.float64)
        found = train_together(batched, start, data, plans, SGD)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "option", [{"momentum": 0.5}, {"weight_decay": 0.1}, {"clip": 0.1}, {"proximal": 0.5}]
)
def test_options_without_support_in_the_loops_are_trained_by_torch(option, descents):
    data, sgd = examples(), replace(SGD, **option)
    assert_as_one_by_one(*engines(linear, data), data, planned(sgd, 4), sgd)
    assert not descents


def test_a_gradient_correction_is_trained_by_torch(descents):
    data, plans = examples(), planned(SGD, 4)
    batched, _, start = engines(linear, data)
    correction = torch.full((len(start),), 0.5)
    pulled, free = (
        train_together(batched, start, data, plans, SGD, traces=[traces] * 4)[0]
        for traces in (Traces(correction=correction), Traces())
    )
    torch.testing.assert_close(
        pulled - free, torch.full_like(free, -4 * SGD.lr * 0.5), rtol=0.1, atol=0.05
    )
    assert sum(descents) == 4


def test_targets_that_are_no_classes_are_trained_by_torch(descents):
    data = examples()
    data.targets[3] = -100  # ignored by cross_entropy
    assert_as_one_by_one(*engines(linear, data), data, planned(SGD, 4), SGD)
    data = replace(
        data, targets=data.targets.clamp(min=0).index_fill(0, torch.tensor([3]), CLASSES)
    )
    with pytest.raises(RuntimeError, match="out of bounds"):
        train_together(
            engines(linear, data)[0], engines(linear, data)[2], data, planned(SGD, 4), SGD
        )
    assert not descents


def test_targets_may_change_between_rounds(descents):
    data, plans = examples(), planned(SGD, 4)
    batched, serial, start = engines(linear, data)
    for target, first in ((2, 2), (2, -100), (1, 3)):
        data.targets[:] = target
        data.targets[::5] = first
        assert_as_one_by_one(batched, serial, start, data, plans, SGD)
    assert sum(descents) == 8


def test_losses_of_large_scores_are_not_rounded_away():
    data, plans = examples(), [[np.arange(7)]]
    batched, _, start = engines(linear, data)
    _, losses = train_together(
        batched,
        torch.cat([torch.zeros(WIDTH * CLASSES), torch.full((CLASSES,), 1e9)]),
        data,
        plans,
        SGD,
    )
    assert losses.item() == pytest.approx(np.log(CLASSES), rel=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: replace(data, inputs=torch._neg_view(data.inputs)),
        lambda data: replace(data, inputs=data.inputs.double()),
        lambda data: replace(data, targets=data.targets.int()),
    ],
    ids=["negative view", "float64", "int32"],
)
def test_unsupported_data_is_trained_by_torch(change, descents):
    data, plans = change(examples()), planned(SGD, 4)
    batched, _, start = engines(linear, data)
    with suppress(RuntimeError):  # torch may accept or refuse these targets
        train_together(batched, start, data, plans, SGD)
    assert not descents


def test_start_weights_that_require_grad_are_trained(descents):
    data, plans = examples(), planned(SGD, 4)
    batched, serial, start = engines(linear, data)
    assert_as_one_by_one(batched, serial, start.requires_grad_(), data, plans, SGD)
    assert sum(descents) == 4


def grown() -> nn.Module:
    """Return a layer whose weight was replaced by one with more rows, as if classes had been added."""
    model = linear()
    model.weight, model.bias = nn.Parameter(torch.randn(9, WIDTH)), nn.Parameter(torch.zeros(9))
    return model


def cut() -> nn.Module:
    model = nn.Linear(WIDTH, 11)
    model.weight, model.bias = (
        nn.Parameter(torch.randn(CLASSES, WIDTH)),
        nn.Parameter(torch.zeros(CLASSES)),
    )
    return model


def test_a_layer_with_added_or_removed_rows_is_trained(descents):
    data = examples()
    for make in (grown, cut):
        assert_as_one_by_one(*engines(make, data), data, planned(SGD, 4), SGD)
    assert sum(descents) == 8


def test_data_of_another_width_raises_an_error_as_in_torch(descents):
    data = examples((20,))
    batched, _, start = engines(linear, data)
    with pytest.raises(RuntimeError, match="size|shape"):
        train_together(batched, start, data, planned(SGD, 4), SGD)
    assert not descents


def test_a_position_out_of_range_raises_an_error_as_in_torch():
    data, plans = examples(), planned(SGD, 4)
    batched, _, start = engines(linear, data)
    for outside in (90, -1):
        plans[1][0][2] = outside
        with pytest.raises(IndexError):
            train_together(batched, start, data, plans, SGD)


def hidden() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, CLASSES), nn.ReLU())


def frozen() -> nn.Module:
    model = linear()
    model.bias.requires_grad_(False)
    return model


def bfloat16() -> nn.Module:
    return linear().to(torch.bfloat16)


def doubled() -> nn.Module:
    model = linear()
    model.register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def another_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)


@pytest.mark.parametrize(
    ("make", "options"),
    [(hidden, {}), (frozen, {}), (doubled, {}), (linear, {"loss": another_loss})],
    ids=["hidden", "frozen", "hook", "loss"],
)
def test_other_models_and_losses_do_not_use_the_loops(make, options, descents):
    data = examples()
    assert_as_one_by_one(*engines(make, data, **options), data, planned(SGD, 4), SGD)
    assert not descents


def test_data_and_weights_of_other_dtypes_do_not_use_the_loops(descents):
    data = examples()
    strided = replace(data, inputs=data.inputs.T.contiguous().T)
    assert_as_one_by_one(*engines(linear, strided), strided, planned(SGD, 4), SGD)
    coarse = replace(data, inputs=data.inputs.bfloat16())
    engine, _, start = engines(bfloat16, coarse)
    train_together(engine, start, coarse, planned(SGD, 4), SGD)
    assert not descents


def test_a_client_that_diverges_does_not_affect_the_others(descents):
    data, plans = examples(), planned(SGD, 6)
    batched, _, start = engines(linear, data)
    good = train_together(batched, start, data, plans, SGD)[0]
    data.inputs[11 * 2 + 20 - 1 : 11 * 2 + 20] = float("inf")  # an example of clients 2 and 3
    touched = [who for who, plan in enumerate(plans) if any((batch == 41).any() for batch in plan)]
    updates = train_together(batched, start, data, plans, SGD)[0]
    assert touched and all(not updates[who].isfinite().all() for who in touched)
    assert all(torch.equal(updates[who], good[who]) for who in set(range(6)) - set(touched))
    assert sum(descents) == 12
