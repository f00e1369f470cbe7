"""A chain of known layers gives what the model gives, whose step autograd takes."""

import dataclasses

import numpy as np
import pytest
import torch
from cases import for_each
from torch import nn
from torch.nn import functional as F

from fedcomp.kernels import pooled as kernel
from fedcomp.layout import Layout
from fedcomp.tasks.base import Data, Task
from fedcomp.training.chains import Chain, Pooled
from fedcomp.training.local_sgd import LocalSGD, SerialEngine

SGD = LocalSGD(lr=0.1)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        nn.BatchNorm2d(16),
        nn.Dropout2d(0.2),
        nn.Flatten(),
        nn.Linear(1024, 128),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(128, 4),
    )


def tied_and_frozen() -> nn.Module:
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(768, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.Tanh(),
        nn.Linear(256, 256, bias=False),
        nn.Linear(256, 300),
        nn.Linear(300, 4),
    )
    model[5].weight = model[3].weight
    model[6].weight.requires_grad_(False)
    return model


def rows() -> nn.Module:
    """Linear layers on [b, 3, 256], without biases."""
    return nn.Sequential(
        nn.Flatten(2),
        nn.Linear(256, 300, bias=False),
        nn.ELU(inplace=True),
        nn.Flatten(),
        nn.Linear(900, 4),
    )


def pooled() -> nn.Module:
    """Two convolutions whose maxima alone have gradients, of which the first is too narrow to go by them."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 48, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(768, 128),
        nn.ReLU(),
        nn.Linear(128, 4),
    )


MODELS = {  # and large products in them
    "convolutions": (convolutions, 1),
    "one linear layer": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 500)), 1),
    "tied and frozen": (tied_and_frozen, 1),
    "rows": (rows, 1),
    "pooled": (pooled, 1),
}


def examples() -> Data:
    drawn = torch.Generator().manual_seed(1)
    return Data(
        torch.randn(60, 3, 16, 16, generator=drawn), torch.randint(0, 4, (60,), generator=drawn)
    )


def engine(make, with_chain: bool, loss=F.cross_entropy) -> SerialEngine:
    torch.manual_seed(0)
    model = make()
    made = SerialEngine(Task("chain", make, None, None, loss), model, Layout.of(model), "cpu")
    made.chain = made.chain if with_chain else None
    return made


@for_each("precision", ["float32", "bfloat16"])
@for_each("make, products", MODELS.values(), ids=MODELS)
def test_updates_are_those_of_the_model_to_rounding(make, products, precision):
    data, batches, sgd = (
        examples(),
        [np.arange(20) + 20 * i for i in range(3)],
        dataclasses.replace(SGD, precision=precision),
    )
    chained, plain = engine(make, True), engine(make, False)
    assert len(chained.chain.products) == products
    start = plain.layout.gather(plain.model)
    found, expected = (
        chained.train(start, data, batches, sgd, seed=1),
        plain.train(start, data, batches, sgd, seed=1),
    )
    tolerance = 1e-5 if precision == "float32" else 0.1
    assert (found.update - expected.update).norm() < tolerance * expected.update.norm()
    assert found.loss == pytest.approx(expected.loss, rel=tolerance)
    assert (found.buffers or {}).keys() == (expected.buffers or {}).keys()


@pytest.mark.parametrize(
    "change",
    [{"momentum": 0.9}, {"weight_decay": 0.1}, {"clip": 0.5}, {"proximal": 0.5}],
    ids=lambda change: next(iter(change)),
)
def test_where_a_step_is_more_than_the_gradient_the_model_takes_it(change):
    data, batches, sgd = (
        examples(),
        [np.arange(20), np.arange(20) + 20],
        dataclasses.replace(SGD, **change),
    )
    chained, plain = engine(convolutions, True), engine(convolutions, False)
    start = plain.layout.gather(plain.model)
    assert torch.equal(
        chained.train(start, data, batches, sgd).update,
        plain.train(start, data, batches, sgd).update,
    )


def test_maxima_are_gone_by_where_it_pays(monkeypatch):
    seen, gradients = [], kernel.gradients
    monkeypatch.setattr(
        kernel, "gradients", lambda x, *rest: seen.append(x.shape[1]) or gradients(x, *rest)
    )
    made, data = engine(pooled, True), examples()
    made.train(made.layout.gather(made.model).clone(), data, [np.arange(20)], SGD)
    assert seen == [32]
    made.train(
        made.layout.gather(made.model).clone(),
        data,
        [np.arange(20)],
        dataclasses.replace(SGD, precision="bfloat16"),
    )
    assert seen == [32]


def test_what_is_no_number_reaches_the_gradients():
    layer, maximum = (
        nn.Conv2d(32, 64, 5, padding=2).to(memory_format=torch.channels_last),
        nn.MaxPool2d(2),
    )
    x = torch.randn(4, 32, 14, 14).contiguous(memory_format=torch.channels_last)
    x[2, 5, 6, 6] = float("nan")
    outputs = Pooled.of([layer, maximum, nn.ReLU()])(x)
    assert outputs[2].isnan().any() and outputs[[0, 1, 3]].isfinite().all()
    assert torch.autograd.grad(outputs.sum(), layer.weight)[0].isnan().any()


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Conv2d(32, 32, 3, stride=2), nn.MaxPool2d(2), nn.ReLU()),
        (nn.Conv2d(32, 32, 3, groups=2), nn.MaxPool2d(2), nn.ReLU()),
        (nn.Conv2d(32, 32, 3, dilation=2), nn.MaxPool2d(2), nn.ReLU()),
        (nn.Conv2d(32, 32, 3, padding="same"), nn.MaxPool2d(2), nn.ReLU()),
        (nn.Conv2d(32, 32, 3, padding=1, padding_mode="circular"), nn.MaxPool2d(2), nn.ReLU()),
        (nn.Conv2d(32, 32, 3), nn.MaxPool2d(3, stride=2), nn.ReLU()),
        (nn.Conv2d(32, 32, 3), nn.MaxPool2d(2, padding=1), nn.ReLU()),
        (nn.Conv2d(32, 32, 3), nn.MaxPool2d(2), nn.Tanh()),
        (nn.Conv2d(32, 32, 3), nn.MaxPool2d(2)),
    ],
    ids=str,
)
def test_what_skips_groups_or_overlaps_is_left_as_it_is(layers):
    assert Pooled.of(layers) is None


def test_a_maximum_before_the_relu_changes_no_bit():
    def small() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
            nn.Conv2d(8, 8, 3),
            nn.ReLU(),
            nn.MaxPool2d(2, ceil_mode=True),
            nn.Flatten(),
            nn.Linear(72, 4),
        )

    data, batches = examples(), [np.arange(20), np.arange(20) + 20]
    chained, plain = engine(small, True), engine(small, False)
    assert [type(layer) for layer in chained.chain.layers[1:3]] == [
        nn.MaxPool2d,
        nn.ReLU,
    ] and not chained.chain.products
    start = plain.layout.gather(plain.model)
    assert torch.equal(
        chained.train(start, data, batches, SGD).update,
        plain.train(start, data, batches, SGD).update,
    )


class Own(nn.Sequential):
    pass


def hooked() -> nn.Module:
    model = convolutions()
    model[4].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


@for_each(
    "make",
    [lambda: Own(nn.Linear(4, 4)), lambda: nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4)), hooked],
    ids=["own forward", "unknown layer", "hook"],
)
def test_other_models_are_no_chains(make):
    assert Chain.of(make()) is None
