"""The memory of a model's parameters is freed while no client trains."""

import torch
from torch import nn

from fedcomp.layout import Layout
from fedcomp.training.parameter_memory import allocate, free_parameters

SIDE = 600  # a parameter [SIDE, SIDE] is larger than 1 MiB


def sizes(model: nn.Module) -> dict[str, int]:
    return {name: p.untyped_storage().nbytes() for name, p in model.named_parameters()}


def test_large_parameters_are_freed_and_can_be_written_again():
    model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, 2))
    layout, inputs = Layout.of(model), torch.ones(3, SIDE)
    weights, expected, before = layout.gather(model), model(inputs), sizes(model)
    freed = free_parameters(model)
    assert sizes(model) == before | {"0.weight": 0}
    allocate(freed)
    assert sizes(model) == before
    layout.scatter(weights, model)
    assert torch.equal(model(inputs), expected)


def test_frozen_parameters_and_storages_with_other_values_are_kept():
    frozen, first, second = (nn.Linear(SIDE, SIDE, bias=False) for _ in range(3))
    frozen.requires_grad_(False)
    second.weight.data = first.weight.data
    part = nn.Linear(SIDE, SIDE, bias=False)
    part.weight.data = torch.ones(SIDE + 1, SIDE)[1:]
    model = nn.Sequential(frozen, first, second, part)
    before = sizes(model)
    assert free_parameters(model) == [] and sizes(model) == before


def test_a_tied_parameter_is_freed_once():
    model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE))
    model[1].weight = model[0].weight
    freed = free_parameters(model)
    assert [size for _, size in freed] == [4 * SIDE * SIDE]
    allocate(freed)
    assert model[1].weight.untyped_storage().nbytes() == 4 * SIDE * SIDE
