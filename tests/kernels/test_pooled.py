"""Gradients through a maximum, without the zeros, are those of autograd, to rounding."""

import pytest
import torch
from cases import for_each
from torch.nn import functional as F

from fedcomp.kernels import pooled, winograd

SHAPES = {  # b, c, h, w, k, rows, columns, padding, patch, ceil
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
def test_gradients_are_autograds(shape):
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


def test_nothing_has_a_gradient_where_no_relu_let_it_pass():
    x, weight, _ = drawn(2, 32, 8, 8, 4, 3, 3)
    places = torch.zeros(2, 4, 4, 4, dtype=torch.int64)
    of_x, of_weight = pooled.gradients(
        x, weight, torch.zeros(2, 4, 4, 4), places, (1, 1), inputs=True
    )
    assert not of_x.any() and not of_weight.any()


@pytest.mark.slow
@pytest.mark.parametrize(("c", "k", "bias"), [(32, 64, True), (48, 32, False)])
@pytest.mark.parametrize(
    ("h", "w", "padding"), [(14, 14, (2, 2)), (13, 10, (0, 3)), (6, 6, (0, 0)), (7, 9, (1, 2))]
)
def test_maxima_are_torchs_to_rounding(c, k, bias, h, w, padding):
    """By Winograd's products: places are the same but where two outputs are all but equal."""
    x, weight, generator = drawn(9, c, h, w, k, 5, 5)
    biases = torch.randn(k, generator=generator) if bias else None
    assert winograd.suits(weight, (2, 2))
    expected, where = F.max_pool2d(
        F.conv2d(x, weight, biases, padding=padding), 2, return_indices=True
    )
    found, places = pooled.outputs(x, weight, biases, padding, (2, 2), ceil=False)
    assert found.shape == expected.shape and found.is_contiguous(memory_format=torch.channels_last)
    assert (found - F.relu(expected)).norm() <= 1e-5 * expected.norm()
    assert (places == where).float().mean() > 0.999


@for_each("value", [float("nan"), float("inf")])
def test_an_input_that_is_not_finite_reaches_every_output_that_sees_it(value):
    x, weight, _ = drawn(2, 32, 8, 8, 32, 5, 5)
    x[1, 3, 4, 4] = value
    found, _ = pooled.outputs(x, weight, None, (2, 2), (2, 2), ceil=False)
    expected = F.relu(F.max_pool2d(F.conv2d(x, weight, padding=2), 2))
    assert (
        not expected[1].isfinite().all() and not found[1][~expected[1].isfinite()].isfinite().any()
    )
    assert torch.equal(
        found[0], pooled.outputs(x[:1], weight, None, (2, 2), (2, 2), ceil=False)[0][0]
    )


def test_other_kernels_and_patches_are_torchs_to_the_bit():
    for size, patch, ceil in ((3, 2, False), (5, 3, False), (5, 2, True)):
        x, weight, generator = drawn(3, 32, 13, 13, 32, size, size)
        biases = torch.randn(32, generator=generator)
        expected, where = F.max_pool2d(
            F.conv2d(x, weight, biases), patch, ceil_mode=ceil, return_indices=True
        )
        found, places = pooled.outputs(x, weight, biases, (0, 0), (patch, patch), ceil)
        assert torch.equal(found, F.relu(expected)) and torch.equal(places, where)


@for_each("slope", [float("nan"), float("inf")])
def test_a_slope_that_is_not_finite_is_not_left_out(slope):
    x, weight, _ = drawn(2, 32, 8, 8, 4, 3, 3)
    slopes = torch.zeros(2, 4, 4, 4)
    slopes[1, 2, 0, 0] = slope
    of_x, of_weight = pooled.gradients(
        x, weight, slopes, torch.zeros(2, 4, 4, 4, dtype=torch.int64), (1, 1), inputs=True
    )
    assert not of_x[1].isfinite().all() and not of_weight[2].isfinite().all()
    assert not of_x[0].any() and not of_weight[[0, 1, 3]].any()


def test_the_default_precision_changes_nothing():
    x, weight, generator = drawn(9, 32, 14, 14, 32, 5, 5)
    slopes, found = torch.randn(9, 32, 7, 7, generator=generator), []
    try:
        for precision in (torch.float32, torch.float64):
            torch.set_default_dtype(precision)
            outputs, places = pooled.outputs(x, weight, None, (2, 2), (2, 2), ceil=False)
            found.append(
                (outputs, *pooled.gradients(x, weight, slopes, places, (2, 2), inputs=True))
            )
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_the_number_of_threads_changes_no_bit():
    x, weight, generator = drawn(20, 32, 14, 14, 16, 5, 5)
    wider = torch.cat([weight, weight + 1]).contiguous(memory_format=torch.channels_last)
    slopes = torch.randn(20, 16, 7, 7, generator=generator)
    places = torch.randint(0, 196, (20, 16, 7, 7), generator=generator)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            found.append(
                (
                    *pooled.gradients(x, weight, slopes, places, (2, 2), inputs=True),
                    *pooled.outputs(x, wider, None, (2, 2), (2, 2), ceil=False),
                )
            )
    finally:
        torch.set_num_threads(threads)
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
def test_for_large_convolutions_with_channels_last(change, said):
    channels, dtype, order = (
        change.get("channels", 32),
        change.get("dtype", torch.float32),
        change.get("format", torch.channels_last),
    )
    x = torch.zeros(4, channels, change.get("height", 14), 14, dtype=dtype).contiguous(
        memory_format=order
    )
    weight = torch.zeros(64, channels, 5, 5, dtype=dtype).contiguous(memory_format=order)
    assert pooled.suits(x, weight, (2, 2), (2, 2)) is said
    assert not pooled.suits(x, weight, (2, 2), (15, 2))
