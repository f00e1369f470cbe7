"""Layers in their batched form: what they give and their gradients, beside those of torch.nn, client by client."""

import itertools

import pytest
import torch
from cases import for_each
from torch import nn
from torch.func import functional_call

from fedcomp.sim.batched import convolutions, layers
from fedcomp.sim.batched.traced import traced_model

CLIENTS, EXAMPLES = 3, 4
CONVOLUTIONS = tuple(convolutions.CONVOLUTIONS)


class LastState(nn.Module):
    """What an LSTM leaves at the end, read along the first axis."""

    def __init__(self, **options):
        super().__init__()
        self.lstm = nn.LSTM(5, 6, **options)

    def forward(self, x):
        _, (hidden, cell) = self.lstm(x.transpose(0, 1))
        return hidden[-1] - 0.5 * cell[0]


class Started(nn.Module):
    """An LSTM that goes on where another one ended."""

    def __init__(self):
        super().__init__()
        self.reader, self.writer = (
            nn.LSTM(5, 6, 2, batch_first=True),
            nn.LSTM(5, 6, 2, batch_first=True),
        )

    def forward(self, x):
        _, state = self.reader(x)
        return self.writer(x, state)[0]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.past = (
            nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1), nn.GroupNorm(3, 6)),
            nn.Conv2d(4, 6, 1, 2, bias=False),
        )

    def forward(self, x):
        return torch.relu(self.inner(x) + self.past(x)).mean((2, 3))


def image(channels=4, height=9, width=8):
    return channels, height, width


CASES = {
    "linear": (lambda: nn.Linear(5, 3), (5,)),
    "linear on sequences": (lambda: nn.Linear(5, 3, bias=False), (6, 5)),
    "convolution": (lambda: nn.Conv2d(4, 6, 3), image()),
    "pool": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 6, 5, padding=2), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)
        ),
        image(),
    ),
    "same": (lambda: nn.Conv2d(4, 6, (3, 5), padding="same", dilation=(2, 1)), image()),
    "same, uneven": (lambda: nn.Conv2d(4, 6, 2, padding="same"), image()),
    "valid": (lambda: nn.Conv2d(4, 6, 3, padding="valid"), image()),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), image()),
    "mirrored": (
        lambda: nn.Sequential(
            nn.ZeroPad2d(1), nn.Conv2d(4, 6, 3, bias=False), nn.ReLU(inplace=True)
        ),
        image(),
    ),
    "residual": (Residual, image()),
    "group norm": (lambda: nn.GroupNorm(2, 4), image()),
    "group norm of rows": (
        lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.GroupNorm(1, 4, affine=False)),
        (4,),
    ),
    "layer norm": (lambda: nn.LayerNorm((8,)), image()),
    "layer norm of maps": (lambda: nn.LayerNorm((4, 9, 8), bias=False), image()),
    "lstm": (lambda: nn.Sequential(nn.Linear(5, 5), nn.LSTM(5, 6, batch_first=True)), (7, 5)),
    "lstm, two layers, no bias": (lambda: nn.LSTM(5, 6, 2, bias=False, batch_first=True), (7, 5)),
    "lstm, steps first": (lambda: LastState(num_layers=2), (7, 5)),
    "lstm, given state": (Started, (7, 5)),
}


def stacked(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights of clients who differ, float64."""
    drawn = torch.Generator().manual_seed(2)
    shapes = {name: (CLIENTS, *p.shape) for name, p in model.named_parameters()}
    return {
        name: torch.randn(shape, generator=drawn, dtype=torch.float64, requires_grad=True)
        for name, shape in shapes.items()
    }


def outputs(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.filterwarnings("ignore:Using padding='same' with even")
@for_each("form", CONVOLUTIONS)
@for_each("make, shape", CASES.values(), ids=CASES)
def test_a_stack_gives_what_each_client_gives(make, shape, form):
    model = make()
    passes, weights = traced_model(model, form), stacked(model)
    x = torch.randn(CLIENTS, EXAMPLES, *shape, dtype=torch.float64, requires_grad=True)
    found = outputs(passes.run(weights, CLIENTS, x.flatten(0, 1)))
    model.double()
    alone = [
        functional_call(model, {name: w[i] for name, w in weights.items()}, (x[i].clone(),))
        for i in range(CLIENTS)
    ]
    expected = torch.cat([outputs(result) for result in alone])
    torch.testing.assert_close(found, expected)
    slope = torch.randn_like(expected)
    used = [x, *weights.values()]
    for a, b in zip(
        torch.autograd.grad(found, used, slope),
        torch.autograd.grad(expected, used, slope),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


GEOMETRIES = [
    *itertools.product(
        ((1, 1), (3, 3), (2, 4)), ((1, 1), (2, 1), (2, 3)), (0, 1, (2, 0), 4), (1, (1, 2))
    ),
]


@for_each("kernel, stride, padding, dilation", GEOMETRIES)
def test_products_of_windows_are_convolutions(kernel, stride, padding, dilation):
    layer = nn.Conv2d(2, 3, kernel, stride, padding, dilation).double()
    weight, bias = (
        torch.stack([p.detach() * (i + 1) for i in range(CLIENTS)]).requires_grad_()
        for p in (layer.weight, layer.bias)
    )
    x = torch.randn(CLIENTS * EXAMPLES, 2, 8, 9, dtype=torch.float64, requires_grad=True)
    found = convolutions.products(layer, x, weight, bias)
    expected = torch.cat(
        [
            functional_call(layer, {"weight": w, "bias": b}, (some,))
            for w, b, some in zip(weight, bias, x.chunk(CLIENTS), strict=True)
        ]
    )
    torch.testing.assert_close(found, expected)
    slope = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(found, [x, weight, bias], slope),
        torch.autograd.grad(expected, [x, weight, bias], slope),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@for_each("padding", [None, 3])
def test_each_client_has_an_embedding_of_its_own(padding):
    model = nn.Embedding(9, 4, padding_idx=padding)
    passes, weights, tokens = (
        traced_model(model, "grouped"),
        stacked(model),
        torch.randint(0, 9, (CLIENTS, EXAMPLES, 6)),
    )
    found = passes.run(weights, CLIENTS, tokens.flatten(0, 1))
    model.double()
    expected = torch.cat(
        [
            functional_call(model, {"weight": w}, (t,))
            for w, t in zip(weights["weight"], tokens, strict=True)
        ]
    )
    assert torch.equal(found, expected)
    slope = torch.randn_like(expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(y, weights["weight"], slope)[0] for y in (found, expected))
    )


def test_both_ways_to_the_rows_of_an_embedding():
    weight, tokens = (
        torch.randn(CLIENTS, 9, 4, requires_grad=True),
        torch.randint(0, 9, (CLIENTS, 12)),
    )
    found, slope = (
        [way(weight, tokens) for way in (layers.embed_by_lookup, layers.embed_by_product)],
        torch.randn(CLIENTS, 12, 4),
    )
    assert torch.equal(*found)
    torch.testing.assert_close(*(torch.autograd.grad(rows, weight, slope)[0] for rows in found))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(4, 4).bfloat16(),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout()),
        lambda: nn.BatchNorm2d(4),
        lambda: nn.GRU(4, 4),
        lambda: nn.LSTM(4, 4, bidirectional=True),
        lambda: nn.LSTM(4, 4, proj_size=2),
        lambda: nn.Embedding(4, 4, max_norm=1.0),
        lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
    ],
    ids=lambda make: str(make()),
)
def test_what_has_no_batched_form_has_no_program(make):
    assert traced_model(make(), "products") is None
