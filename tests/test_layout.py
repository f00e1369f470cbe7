"""A model's trainable tensors as one vector, and back."""

import torch
from cases import for_each
from torch import nn

from fedcomp import Layout
from fedcomp.layout import model_fingerprint


class Mixed(nn.Module):
    """Frozen, tied and bfloat16 parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.coarse = nn.Linear(3, 3).to(torch.bfloat16)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_the_layout_has_tied_parameters_once_and_no_frozen_parameters_or_buffers():
    layout = Layout.of(Mixed())
    assert [e.name for e in layout] == [
        "embed.weight",
        "coarse.weight",
        "coarse.bias",
        "norm.weight",
        "norm.bias",
    ]
    assert layout.numel == 15 + 9 + 3 + 3 + 3
    assert [e.offset for e in layout] == [0, 15, 24, 27, 30]


def test_gather_inverts_scatter_up_to_the_precision_of_each_tensor():
    model = Mixed()
    layout = Layout.of(model)
    vector = torch.randn(layout.numel)
    layout.scatter(vector, model)
    assert model.coarse.weight.dtype == torch.bfloat16 and torch.equal(
        model.head.weight, model.embed.weight
    )
    back = layout.gather(model)
    assert torch.equal(back[:15], vector[:15]) and torch.equal(
        back[15:27], vector[15:27].bfloat16().float()
    )
    assert back.dtype == torch.float32


def test_views_share_the_memory_and_the_leading_axes_of_a_vector():
    layout = Layout.from_shapes({"a": (2, 3), "b": (), "c": (4,)})
    stack = torch.arange(22.0).view(2, 11)
    views = layout.views(stack)
    assert views["a"].shape == (2, 2, 3) and views["b"].shape == (2,) and views["c"].shape == (2, 4)
    views["c"][1, 3] = -1
    assert stack[1, 10] == -1


@for_each("position, name", [(0, "a"), (5, "a"), (6, "c"), (9, "c")])
def test_an_element_is_found_beside_empty_tensors(position, name):
    layout = Layout.from_shapes({"a": (2, 3), "empty": (0, 7), "c": (4,)})
    assert layout.entry_at(position).name == name


def test_the_fingerprint_changes_with_any_name_shape_or_order():
    shapes = [
        {"a": (2,), "b": (3,)},
        {"b": (3,), "a": (2,)},
        {"a": (3,), "b": (2,)},
        {"a": (2,), "c": (3,)},
        {"a": (2, 1), "b": (3,)},
    ]
    assert len({Layout.from_shapes(s).fingerprint for s in shapes}) == 5
    assert (
        Layout.from_shapes(shapes[0]).fingerprint == Layout.from_shapes(dict(shapes[0])).fingerprint
    )


def test_a_vector_is_float32_for_any_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        assert (
            Layout(()).gather(nn.ReLU()).dtype
            == Layout.of(nn.Linear(2, 2)).gather(nn.Linear(2, 2)).dtype
            == torch.float32
        )
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_parameter_without_dimensions_is_part_of_the_layout():
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(3.0))
    layout = Layout.of(model)
    assert layout.numel == 1 and layout.gather(model).tolist() == [3.0]
    assert layout.views(torch.tensor([5.0]))["scale"].shape == () and layout.views(
        torch.ones(4, 1)
    )["scale"].shape == (4,)
    layout.scatter(torch.tensor([7.0]), model)
    assert model.scale.item() == 7.0


def test_the_fingerprint_of_a_model_covers_its_frozen_parameters():
    def model(value: float, frozen: bool) -> nn.Module:
        made = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.fill_(value)
        made[0].weight.requires_grad_(not frozen)
        return made

    trained = model_fingerprint(model(1.0, frozen=False))
    assert trained == model_fingerprint(model(2.0, frozen=False))
    assert trained == Layout.of(model(1.0, frozen=False)).fingerprint
    frozen = model_fingerprint(model(1.0, frozen=True))
    assert frozen == model_fingerprint(model(1.0, frozen=True))
    assert frozen != model_fingerprint(model(2.0, frozen=True))
    assert frozen.partition("+")[0] == Layout.of(model(1.0, frozen=True)).fingerprint
