"""Batched layers have the outputs and gradients of torch's layers for each client."""

import pytest
import torch
from cases import for_each
from torch import nn
from torch.func import functional_call

from fedcomp.sim.batched.gradients import layered_gradients
from fedcomp.tasks.base import Task

CLIENTS, EXAMPLES = 3, 4
CASES = {
    "linear": (lambda: nn.Linear(5, 3), (5,)),
    "linear on sequences": (lambda: nn.Linear(5, 3, bias=False), (6, 5)),
    "pool": (lambda: nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 3)), (4, 9, 8)),
    "no weights of its own": (
        lambda: nn.Sequential(nn.LayerNorm(5, elementwise_affine=False), nn.Linear(5, 3)),
        (5,),
    ),
    "embedding": (lambda: nn.Embedding(9, 4), None),
    "embedding with padding": (lambda: nn.Embedding(9, 4, padding_idx=3), None),
}


def task_of(model: nn.Module) -> Task:
    """A task whose loss is the product of outputs and targets."""
    return Task(
        "product", lambda: model, [], loss=lambda outputs, targets: (outputs * targets).sum()
    )


@for_each("make, shape", CASES.values(), ids=CASES)
def test_the_results_of_a_stack_equal_those_of_each_client(make, shape):
    model = make()
    gradients = layered_gradients(task_of(model), model)
    drawn = torch.Generator().manual_seed(2)
    weights = {
        name: torch.randn((CLIENTS, *p.shape), generator=drawn, dtype=torch.float64)
        for name, p in model.named_parameters()
    }
    if shape is None:
        x = torch.randint(0, 9, (CLIENTS, EXAMPLES, 6), generator=drawn)
    else:
        x = torch.randn(CLIENTS, EXAMPLES, *shape, generator=drawn, dtype=torch.float64)
    model.double()
    outputs = model(x[0].clone())
    slope = torch.randn(CLIENTS, *outputs.shape, generator=drawn, dtype=torch.float64)
    found, losses = gradients(weights, x.clone(), slope)
    for i in range(CLIENTS):
        own = {name: w[i].clone().requires_grad_() for name, w in weights.items()}
        loss = (functional_call(model, own, (x[i].clone(),)) * slope[i]).sum()
        torch.testing.assert_close(losses[i], loss.detach())
        expected = torch.autograd.grad(loss, list(own.values()))
        torch.testing.assert_close([gradient[i] for gradient in found], list(expected))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(4, 4).bfloat16(),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout()),
        lambda: nn.BatchNorm2d(4),
        lambda: nn.LSTM(4, 4),
        lambda: nn.LayerNorm(4),
        lambda: nn.Embedding(4, 4, max_norm=1.0),
        lambda: nn.Conv2d(4, 4, 3),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    ],
    ids=lambda make: str(make()).partition("(")[0],
)
def test_models_without_a_batched_form_are_mapped(make):
    model = make()
    assert layered_gradients(task_of(model), model) is None
