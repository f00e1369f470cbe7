"""Gradients through max-pooling that skip the zeros equal those of autograd up to rounding."""

import pytest
import torch
from cases import for_each
from torch.nn import functional as F
from torch_threads import torch_threads

from fedcomp.kernels import pooled

SHAPES = {  # batch, channels, height, width, filters, rows, columns, padding, patch, ceil mode
    "mnist-cnn's second": (20, 32, 14, 14, 64, 5, 5, (2, 2), 2, False),
    "no padding": (3, 16, 12, 9, 8, 3, 3, (0, 0), 2, False),
    "uneven": (9, 16, 11, 13, 5, 2, 3, (1, 2), (2, 3), False),
    "patches over the edge": (2, 32, 9, 9, 7, 3, 3, (1, 1), 2, True),
    "one output a plane": (17, 40, 4, 4, 3, 3, 3, (1, 1), 4, False),
    "a single example and kernel": (1, 32, 6, 6, 1, 1, 1, (0, 0), 3, False),
}


def drawn(b, c, h, w, k, rows, columns):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(b, c, h, w, generator=generator).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(k, c, rows, columns, generator=generator).contiguous(
        memory_format=torch.channels_last
    )
    return x, weight, generator


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gradients_equal_those_of_autograd(shape):
    *sizes, padding, patch, ceil = shape
    x, weight, generator = drawn(*sizes)
    outputs = F.conv2d(x.requires_grad_(), weight.requires_grad_(), padding=padding)
    maxima, places = F.max_pool2d(outputs, patch, ceil_mode=ceil, return_indices=True)
    result = F.relu(maxima)
    slopes = torch.randn(result.shape, generator=generator)
    expected = torch.autograd.grad(result, (x, weight), slopes)
    given = (
        x.detach(),
        weight.detach(),
        torch.where(result > 0, slopes, 0.0).detach(),
        places,
        padding,
    )
    for found, wanted in zip(pooled.gradients(*given, inputs=True), expected, strict=True):
        assert found.shape == wanted.shape
        assert (found - wanted).norm() <= 1e-6 * wanted.norm() + 1e-12
    none, of_weight = pooled.gradients(*given, inputs=False)
    assert none is None and torch.equal(of_weight, pooled.gradients(*given, inputs=True)[1])


def test_gradients_are_zero_where_the_relu_is_zero():
    x, weight, _ = drawn(2, 32, 8, 8, 4, 3, 3)
    places = torch.zeros(2, 4, 4, 4, dtype=torch.int64)
    of_x, of_weight = pooled.gradients(
        x, weight, torch.zeros(2, 4, 4, 4), places, (1, 1), inputs=True
    )
    assert not of_x.any() and not of_weight.any()


@for_each("slope", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_not_skipped(slope):
    x, weight, _ = drawn(2, 32, 8, 8, 4, 3, 3)
    slopes = torch.zeros(2, 4, 4, 4)
    slopes[1, 2, 0, 0] = slope
    of_x, of_weight = pooled.gradients(
        x, weight, slopes, torch.zeros(2, 4, 4, 4, dtype=torch.int64), (1, 1), inputs=True
    )
    assert not of_x[1].isfinite().all() and not of_weight[2].isfinite().all()
    assert not of_x[0].any() and not of_weight[[0, 1, 3]].any()


def test_the_default_dtype_changes_nothing():
    x, weight, generator = drawn(9, 32, 14, 14, 32, 5, 5)
    slopes, found = torch.randn(9, 32, 7, 7, generator=generator), []
    places = torch.randint(0, 196, (9, 32, 7, 7), generator=generator)
    try:
        for precision in (torch.float32, torch.float64):
            torch.set_default_dtype(precision)
            found.append(pooled.gradients(x, weight, slopes, places, (2, 2), inputs=True))
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_the_number_of_threads_changes_no_bit():
    x, weight, generator = drawn(20, 32, 14, 14, 16, 5, 5)
    slopes = torch.randn(20, 16, 7, 7, generator=generator)
    places = torch.randint(0, 196, (20, 16, 7, 7), generator=generator)
    found = []
    for count in (1, 4):
        with torch_threads(count):
            found.append(pooled.gradients(x, weight, slopes, places, (2, 2), inputs=True))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, True),
        ({"channels": 2}, False),
        ({"height": 1}, False),
        ({"height": 2}, True),
        ({"dtype": torch.float64}, False),
        ({"format": torch.contiguous_format}, False),
    ],
    ids=str,
)
def test_the_kernel_is_used_for_large_channels_last_convolutions(change, said):
    channels, dtype, order = (
        change.get("channels", 32),
        change.get("dtype", torch.float32),
        change.get("format", torch.channels_last),
    )
    x = torch.zeros(4, channels, change.get("height", 14), 14, dtype=dtype).contiguous(
        memory_format=order
    )
    weight = torch.zeros(64, channels, 5, 5, dtype=dtype).contiguous(memory_format=order)
    assert pooled.is_faster(x, weight, (2, 2), (2, 2)) is said
    assert not pooled.is_faster(x, weight, (2, 2), (15, 2))
