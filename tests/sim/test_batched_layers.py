"""Layers in their batched form: outputs and gradients beside those of torch.nn, client by client."""

import pytest
import torch
from cases import for_each
from torch import nn
from torch.func import functional_call

from fedcomp.sim.batched.traced import traced_model

CLIENTS, EXAMPLES = 3, 4
CASES = {
    "linear": (lambda: nn.Linear(5, 3), (5,)),
    "linear on sequences": (lambda: nn.Linear(5, 3, bias=False), (6, 5)),
    "layer norm": (lambda: nn.LayerNorm((8,)), (4, 9, 8)),
    "layer norm of maps": (lambda: nn.LayerNorm((4, 9, 8), bias=False), (4, 9, 8)),
    "pool": (lambda: nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 3)), (4, 9, 8)),
    "no weights of its own": (
        lambda: nn.Sequential(nn.LayerNorm(5, elementwise_affine=False), nn.Linear(5, 3)),
        (5,),
    ),
}


def stacked(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights of clients who differ, float64."""
    drawn = torch.Generator().manual_seed(2)
    shapes = {name: (CLIENTS, *p.shape) for name, p in model.named_parameters()}
    return {
        name: torch.randn(shape, generator=drawn, dtype=torch.float64, requires_grad=True)
        for name, shape in shapes.items()
    }


@for_each("make, shape", CASES.values(), ids=CASES)
def test_a_stack_gives_what_each_client_gives(make, shape):
    model = make()
    passes, weights = traced_model(model), stacked(model)
    x = torch.randn(CLIENTS, EXAMPLES, *shape, dtype=torch.float64, requires_grad=True)
    found = passes.run(weights, CLIENTS, x.flatten(0, 1))
    model.double()
    alone = [
        functional_call(model, {name: w[i] for name, w in weights.items()}, (x[i].clone(),))
        for i in range(CLIENTS)
    ]
    expected = torch.cat(alone)
    torch.testing.assert_close(found, expected)
    slope = torch.randn_like(expected)
    used = [x, *weights.values()]
    for a, b in zip(
        torch.autograd.grad(found, used, slope),
        torch.autograd.grad(expected, used, slope),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@for_each("padding", [None, 3])
def test_each_client_has_an_embedding_of_its_own(padding):
    model = nn.Embedding(9, 4, padding_idx=padding)
    passes, weights, tokens = (
        traced_model(model),
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


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(4, 4).bfloat16(),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout()),
        lambda: nn.BatchNorm2d(4),
        lambda: nn.GRU(4, 4),
        lambda: nn.LSTM(4, 4),
        lambda: nn.Embedding(4, 4, max_norm=1.0),
        lambda: nn.Conv2d(4, 4, 3),
    ],
    ids=lambda make: str(make()),
)
def test_what_has_no_batched_form_has_no_program(make):
    assert traced_model(make()) is None
