"""A model with fused layers has the same updates as the original model."""

import dataclasses

import numpy as np
import pytest
import torch
from cases import for_each
from torch import nn
from torch.nn import functional as F

from fedcomp.kernels import pooled as kernel
from fedcomp.layout import Layout
from fedcomp.tasks.base import Task
from fedcomp.tasks.data import Data
from fedcomp.training.cpu_convolutions import PooledConvolution, fused
from fedcomp.training.engine import SerialEngine
from fedcomp.training.local_sgd import LocalSGD

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


def pooled() -> nn.Module:
    """Return a model with two convolutions before max-pooling. Only the second is large enough for the faster backward pass."""
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


MODELS = {"convolutions": convolutions, "pooled": pooled}


def examples() -> Data:
    drawn = torch.Generator().manual_seed(1)
    return Data(
        torch.randn(60, 3, 16, 16, generator=drawn), torch.randint(0, 4, (60,), generator=drawn)
    )


def engine(make, is_fused: bool) -> SerialEngine:
    torch.manual_seed(0)
    model = make()
    made = SerialEngine(
        Task("pooled", make, None, None, F.cross_entropy), model, Layout.of(model), "cpu"
    )
    made.fused = made.fused if is_fused else made.model
    return made


@for_each("change", [{}, {"momentum": 0.9, "clip": 0.5}, {"precision": "bfloat16"}])
@for_each("make", MODELS.values(), ids=MODELS)
def test_fused_layers_change_updates_only_by_rounding(make, change):
    data, batches, sgd = (
        examples(),
        [np.arange(20) + 20 * i for i in range(3)],
        dataclasses.replace(SGD, **change),
    )
    plain = engine(make, False)
    start = plain.layout.gather(plain.model)
    found, expected = (
        each.train(start, data, batches, sgd, seed=1) for each in (engine(make, True), plain)
    )
    tolerance = 0.1 if "precision" in change else 1e-5
    assert (found.update - expected.update).norm() < tolerance * expected.update.norm()
    assert found.result.loss == pytest.approx(expected.result.loss, rel=tolerance)
    assert (found.result.buffers or {}).keys() == (expected.result.buffers or {}).keys()


def test_the_backward_pass_that_skips_zeros_is_used_only_where_it_is_faster(monkeypatch):
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


def test_nan_propagates_to_outputs_and_gradients():
    layer, maximum = (
        nn.Conv2d(32, 64, 5, padding=2).to(memory_format=torch.channels_last),
        nn.MaxPool2d(2),
    )
    x = torch.randn(4, 32, 14, 14).contiguous(memory_format=torch.channels_last)
    x[2, 5, 6, 6] = float("nan")
    outputs = PooledConvolution(layer, maximum)(x)
    assert outputs[2].isnan().any() and outputs[[0, 1, 3]].isfinite().all()
    assert torch.autograd.grad(outputs.sum(), layer.weight)[0].isnan().any()


@pytest.mark.parametrize(
    ("layer", "maximum"),
    [
        (nn.Conv2d(32, 32, 5, stride=2), nn.MaxPool2d(2)),
        (nn.Conv2d(32, 32, 5, groups=2), nn.MaxPool2d(2)),
        (nn.Conv2d(32, 32, 5, dilation=2), nn.MaxPool2d(2)),
        (nn.Conv2d(32, 32, 5, padding="same"), nn.MaxPool2d(2)),
        (nn.Conv2d(32, 32, 5, padding=1, padding_mode="circular"), nn.MaxPool2d(2)),
        (nn.Conv2d(32, 32, 5), nn.MaxPool2d(3, stride=2)),
        (nn.Conv2d(32, 32, 5), nn.MaxPool2d(2, padding=1)),
    ],
    ids=str,
)
def test_unsupported_layers_have_the_gradients_of_torch(layer, maximum):
    x = torch.randn(20, 32, 16, 16).contiguous(memory_format=torch.channels_last)
    layer = layer.to(memory_format=torch.channels_last)
    found = PooledConvolution(layer, maximum)(x)
    expected = maximum(F.relu(layer(x)))
    assert torch.equal(found, expected)
    (mine,), (torchs,) = (
        torch.autograd.grad(outputs.square().sum(), [layer.weight]) for outputs in (found, expected)
    )
    assert torch.equal(mine, torchs)


def test_computing_the_maximum_before_the_relu_changes_no_bit():
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
    assert [type(layer) for layer in chained.fused[:2]] == [PooledConvolution] * 2
    start = plain.layout.gather(plain.model)
    assert torch.equal(
        chained.train(start, data, batches, SGD).update,
        plain.train(start, data, batches, SGD).update,
    )


class Own(nn.Sequential):
    """A subclass of nn.Sequential, whose layers `fused` does not change."""


def hooked() -> nn.Module:
    model = convolutions()
    model[4].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


@for_each(
    "make",
    [
        lambda: Own(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2)),
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()),
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.MaxPool2d(2)),
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2, return_indices=True)),
        hooked,
    ],
    ids=["own forward", "no maximum", "no relu", "indices", "hook"],
)
def test_models_without_fusable_layers_or_with_hooks_are_not_changed(make):
    model = make()
    assert fused(model) is model
