import dataclasses
import random

import numpy as np
import pytest
import torch
from cases import for_each
from torch import nn

from fedcomp.errors import ConfigError, DataError, TaskError
from fedcomp.tasks import Augmentation, Data, Task
from fedcomp.tasks.check import changing_buffers, check, data_of

LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


def data() -> Data:
    return Data(torch.randn(6, 4), LABELS)


GOOD = Task("toy", lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), data, data)


class Wrapped(nn.Module):
    """A linear model that returns `change(outputs)`."""

    def __init__(self, change):
        super().__init__()
        self.linear, self.change = nn.Linear(4, 3), change

    def forward(self, inputs):
        return self.change(self.linear(inputs))


def frozen() -> nn.Module:
    return nn.Linear(4, 3).requires_grad_(False)


def spoiled() -> nn.Module:
    model = nn.Linear(4, 3)
    nn.init.constant_(model.bias, float("nan"))
    return model


def raising(*_args):
    raise RuntimeError("no\nway")


def leaving(*_args):
    raise SystemExit(3)


class OnlyTrains(nn.Linear):
    def forward(self, inputs):
        if not self.training:
            raise RuntimeError("no evaluation")
        return super().forward(inputs)


def test_the_check_of_a_valid_task_returns_its_layout_and_restores_the_generator():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    layout = check(GOOD, 20)
    assert (
        layout.numel == 4 * 5 + 5 + 5 * 3 + 3 and [entry.name for entry in layout][0] == "0.weight"
    )
    assert torch.equal(torch.get_rng_state(), before)


class Buffered(nn.Linear):
    def __init__(self, buffer: torch.Tensor):
        super().__init__(4, 3)
        self.register_buffer("constant", buffer)


def test_buffers_and_frozen_weights_may_be_drawn_from_seeded_generators_only():
    check(
        dataclasses.replace(
            GOOD,
            model=lambda: Buffered(torch.tensor([float("nan"), np.random.rand(), random.random()])),
        ),
        20,
    )
    for draw in (
        lambda: Buffered(torch.tensor(np.random.default_rng().random())),
        lambda: frozen_at(np.random.default_rng().random()),
    ):
        with pytest.raises(
            TaskError,
            match="a different model in a second call; expected the same parameters and buffers every time",
        ):
            check(dataclasses.replace(GOOD, model=draw), 20)


def frozen_at(value: float) -> nn.Module:
    model = nn.Linear(4, 3)
    nn.init.constant_(model.bias.requires_grad_(False), value)
    return model


def test_the_check_does_not_load_data_that_is_passed_to_it():
    task = dataclasses.replace(GOOD, train=raising, test=raising)
    assert check(task, 20, train=data(), test=data()).numel == 43


def test_with_batch_size_1_the_check_uses_one_example():
    task = dataclasses.replace(
        GOOD, model=lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    )
    check(task, 2)
    with pytest.raises(TaskError, match="Expected more than 1 value per channel"):
        check(task, 1)


@for_each(
    "change, says",
    [
        ({"model": lambda: "a model"}, r"model\(\): got str; expected a torch.nn.Module"),
        ({"model": raising}, r"model\(\) failed: .*RuntimeError: no; correct the task"),
        ({"model": frozen}, "without a trainable parameter; expected at least one"),
        ({"model": nn.Identity}, "without a trainable parameter"),
        ({"model": spoiled}, "a parameter bias with NaN or infinity; expected finite"),
        (
            {"model": lambda: nn.Linear(7, 3)},
            r"model\(\)\(inputs float32 \[2, 4\]\) failed: .*RuntimeError: mat1 and mat2",
        ),
        (
            {"model": lambda: Wrapped(lambda x: (x, x))},
            r"model\(\)\(inputs float32 \[2, 4\]\): got tuple; expected a tensor",
        ),
        (
            {"model": lambda: Wrapped(lambda x: x[:, :0])},
            r"got float32 \[2, 0\]; expected a tensor of outputs",
        ),
        (
            {"model": lambda: Wrapped(lambda x: x[:, :2])},
            "targets: got labels from 0 to 2; expected 0 to 1, as the model has 2 outputs",
        ),
        ({"train": lambda: (1, 2, 3)}, r"train\(\): got tuple; expected a fedcomp Data, a pair"),
        ({"train": raising}, r"train\(\) failed: .*RuntimeError"),
        (
            {"train": lambda: Data(torch.zeros(0, 4), torch.zeros(0))},
            r"train\(\): got no examples; expected at least one",
        ),
        ({"test": lambda: Data(torch.zeros(0, 4), torch.zeros(0))}, r"test\(\): got no examples"),
        (
            {"test": lambda: Data(torch.zeros(3, 4), torch.zeros(2))},
            r"test\(\): got 3 inputs and 2 targets; expected equal numbers",
        ),
        (
            {"test": lambda: Data(torch.zeros(2, 4), torch.tensor([0, 3]))},
            r"test\(\).targets: got labels from 0 to 3",
        ),
        (
            {"train": lambda: Data([[1.0]], [1])},
            r"train\(\).inputs: got list; expected a dense tensor",
        ),
        (
            {"train": lambda: Data(torch.zeros(6, 4, dtype=torch.float64), LABELS)},
            r"inputs float64 .*; give inputs .* such as inputs.to\(torch.float32\), or a model .* model.to\(torch.float64\), or set",
        ),
        (
            {"model": lambda: nn.Linear(4, 3, dtype=torch.float64)},
            r"inputs float32 .*, such as inputs.to\(torch.float64\), or a model .* model.to\(torch.float32\), or set",
        ),
        (
            {"test": lambda: Data(torch.zeros(6, 7), LABELS)},
            r"the model in eval mode on test\(\).inputs float32 \[2, 7\] failed: .*RuntimeError: mat1 and mat2",
        ),
        (
            {"train": lambda: Data(torch.zeros(6, 4), LABELS[:, None])},
            r"train\(\).targets: got int64 \[2, 1\]; expected a label for each example, such as targets.squeeze\(1\), or",
        ),
        (
            {"train": lambda: Data(torch.zeros(6, 4), LABELS[:, None] / 1)},
            r"got float32 \[2, 1\]; expected a label for each example, such as targets.squeeze\(1\).long\(\)",
        ),
        (
            {"train": lambda: Data(torch.zeros(6, 4), nn.functional.one_hot(LABELS))},
            r"got int64 \[2, 3\]; expected a label for each example, such as targets.argmax\(1\)",
        ),
        (
            {"train": lambda: Data(torch.zeros(6, 4), LABELS.int())},
            r"got int32 \[2\]; expected a label for each example, such as targets.long\(\)",
        ),
        (
            {"train": lambda: Data(torch.zeros(6, 4), LABELS / 1)},
            r"got float32 \[2\]; expected a label for each example, such as targets.long\(\)",
        ),
        (
            {"test": lambda: Data(torch.zeros(6, 4), nn.functional.one_hot(LABELS) / 1)},
            r"test\(\).targets: got float32 \[2, 3\]; expected integer labels, such as targets.argmax\(1\); for other",
        ),
        (
            {"loss": lambda o, t: 0.5},
            r"loss\(outputs, targets\): got float; expected a scalar tensor",
        ),
        ({"loss": lambda o, t: o.sum(1)}, r"got float32 \[2\]; expected a scalar tensor"),
        ({"loss": lambda o, t: o.sum() * float("nan")}, "got nan; expected a finite number"),
        ({"loss": lambda o, t: o.detach().sum()}, "got a tensor without gradient"),
        (
            {"loss": raising},
            r"loss of outputs float32 \[2, 3\] and targets int64 \[2\] failed: .*RuntimeError",
        ),
        ({"accuracy": lambda o, t: 93.5}, "got 93.5; expected a number from 0 to 1"),
        ({"accuracy": lambda o, t: float("nan")}, "got nan; expected a number from 0 to 1"),
        ({"accuracy": lambda o, t: o.argmax(1) == t}, r"got bool \[2\]; expected a number"),
        ({"accuracy": lambda o, t: None}, "got NoneType; expected a number"),
        ({"accuracy": raising}, r"accuracy\(outputs, targets\) failed: .*RuntimeError"),
    ],
)
def test_the_error_for_an_invalid_task_names_the_returned_and_the_expected_value(change, says):
    with pytest.raises(TaskError, match=f"^task 'toy': .*{says}") as caught:
        check(dataclasses.replace(GOOD, **change), 20)
    assert "\n" not in str(caught.value)


def shift(generator: np.random.Generator, count: int) -> np.ndarray:
    return generator.random((count, 1), np.float32)


def test_augmentation_is_checked_only_with_augment():
    check(GOOD, 20)
    with pytest.raises(
        ConfigError, match="^--augment: task 'toy' has no augmentation; leave --augment out"
    ):
        check(GOOD, 20, augment=True)
    shifted = dataclasses.replace(GOOD, augment=Augmentation(shift, torch.add))
    assert check(shifted, 20, augment=True).numel == 43
    broken = dataclasses.replace(GOOD, augment=Augmentation(raising, raising))
    assert check(broken, 20).numel == 43


@for_each(
    "draw, apply, says",
    [
        (raising, torch.add, r"augment.draw\(generator, count\) failed: .*RuntimeError"),
        (
            lambda generator, count: [0.0] * count,
            torch.add,
            r"draw\(generator, count\) failed: .*TypeError: expected np.ndarray \(got list\)",
        ),
        (
            lambda generator, count: generator.random((1, 4)),
            torch.add,
            r"got float64 \[1, 4\]; expected a numpy array with a row for each of 2 examples",
        ),
        (lambda generator, count: np.array(0.0), torch.add, r"got float64 \[\]; expected"),
        (shift, raising, r"augment.apply\(inputs, drawn\) failed: .*RuntimeError"),
        (
            shift,
            lambda inputs, drawn: inputs[:, :2],
            r"apply\(inputs, drawn\): got float32 \[2, 2\]; expected float32 \[2, 4\]",
        ),
        (
            shift,
            lambda inputs, drawn: inputs.double(),
            r"got float64 \[2, 4\]; expected float32 \[2, 4\]",
        ),
    ],
)
def test_the_error_for_invalid_augmentation_names_the_returned_value(draw, apply, says):
    with pytest.raises(TaskError, match=f"^task 'toy': .*{says}"):
        check(dataclasses.replace(GOOD, augment=Augmentation(draw, apply)), 20, augment=True)


def test_fedcomp_errors_in_the_code_of_a_task_are_raised_unchanged():
    def missing() -> Data:
        raise DataError("no folder")

    with pytest.raises(DataError, match="^no folder$"):
        check(dataclasses.replace(GOOD, train=missing), 20)


@for_each("split", ["train", "test"])
def test_data_of_loads_and_checks_the_data(split):
    assert len(data_of(GOOD, split)) == 6
    with pytest.raises(TaskError, match=rf"^task 'toy': {split}\(\) failed: .*RuntimeError"):
        data_of(dataclasses.replace(GOOD, **{split: raising}), split)


def test_a_regression_task_is_valid():
    def pairs() -> Data:
        return Data(torch.randn(6, 4), torch.randn(6, 1))

    task = Task(
        "line",
        lambda: nn.Linear(4, 1),
        pairs,
        pairs,
        nn.functional.mse_loss,
        lambda o, t: ((o - t).abs() < 1).float().mean(),
    )
    assert check(task, 20).numel == 5


def test_changing_buffers_are_named_unless_they_are_recalibrated():
    def named(*layers: nn.Module) -> list[str]:
        model = nn.Sequential(nn.Linear(4, 3), *layers)
        return changing_buffers(dataclasses.replace(GOOD, model=lambda: model), model, data())

    assert named(nn.BatchNorm1d(3)) == named(nn.BatchNorm1d(3, track_running_stats=False)) == []
    layer = nn.Linear(3, 3)
    nn.init.orthogonal_(layer.weight)
    with torch.no_grad():
        layer.weight[0] *= (
            1.001  # singular values so close that the power iteration converges slowly
        )
    spectral = nn.utils.parametrizations.spectral_norm(layer)
    assert named(spectral) == ["1.parametrizations.weight.0._u", "1.parametrizations.weight.0._v"]


class Counting:
    """A function that returns a wider model in each call."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> nn.Module:
        self.made += 1
        return nn.Sequential(nn.Linear(4, 5 + self.made), nn.ReLU(), nn.Linear(5 + self.made, 3))


@for_each(
    "change, says",
    [
        ({"model": lambda: nn.Linear(4, 3, dtype=torch.complex64)}, "of torch.complex64"),
        ({"model": lambda: nn.LazyLinear(3)}, "a lazy layer"),
        ({"model": lambda: nn.Linear(4, 3, device="meta")}, "on the meta device"),
        ({"model": Counting()}, "a different model in a second call"),
        (
            {
                "train": lambda: Data(
                    torch.ones(6, 4).to_sparse(), torch.zeros(6, dtype=torch.int64)
                )
            },
            "inputs: got sparse float32 [6, 4]",
        ),
        ({"model": lambda: OnlyTrains(4, 3)}, "in forward: RuntimeError: no evaluation; correct"),
        ({"model": leaving}, "model() failed: test_check.py, line "),
        ({"train": leaving}, "in leaving: SystemExit: 3; correct the task"),
        ({"accuracy": lambda outputs, targets: 1j}, "got complex; expected a number"),
        (
            {"model": lambda: nn.Linear(4, 1), "accuracy": None},
            "the model has 1 output, for which the cross-entropy is always 0; give the task another loss",
        ),
        (
            {
                "model": lambda: nn.Linear(4, 1),
                "train": lambda: Data(torch.ones(6, 4), torch.zeros(6)),
                "loss": nn.functional.mse_loss,
                "accuracy": None,
            },
            "outputs float32 [2, 1] and targets float32 [2] have different shapes, so the loss would compare",
        ),
        (
            {"accuracy": lambda outputs, targets: torch.tensor(1j)},
            "got complex64 []; expected a number",
        ),
    ],
)
def test_the_check_detects_errors_that_would_otherwise_occur_in_later_rounds(change, says):
    with pytest.raises(TaskError) as error:
        check(dataclasses.replace(GOOD, **change), 20)
    assert says in str(error.value) and "\n" not in str(error.value)


@for_each(
    "change, says",
    [
        (
            {"metrics": [lambda outputs, targets: 0.0]},
            "task 'toy': metrics is of type list; give a dict",
        ),
        ({"name": 5}, "the name of a task must be a string, not int"),
        ({"train_fn": 5}, "task 'toy': train_fn is of type int; give a function"),
        (
            {"train_fn": lambda model, data: {"loss": 1.0}},
            r"train_fn cannot be called as train_fn\(model, data, local_round\); change its parameters",
        ),
        ({"evaluate_fn": lambda model: {}}, r"called as evaluate_fn\(model, data\)"),
        (
            {"optimizer": "adam"},
            "optimizer is of type str; give a function, or name the optimizer with --optimizer",
        ),
        ({"optimizer": lambda: None}, r"called as optimizer\(parameters\)"),
    ],
)
def test_invalid_fields_are_refused_when_a_task_is_constructed(change, says):
    with pytest.raises(TaskError, match=says):
        dataclasses.replace(GOOD, **change)


@for_each("number", [np.float32(2.5), np.int64(2), np.bool_(True), True])
def test_a_metric_may_return_a_numpy_number(number):
    check(dataclasses.replace(GOOD, metrics={"measured": lambda outputs, targets: number}), 20)


def test_an_accuracy_of_one_element_is_a_number():
    check(dataclasses.replace(GOOD, accuracy=lambda outputs, targets: torch.tensor([0.5])), 20)


def test_one_test_example_suffices_for_a_model_with_batch_normalization():
    task = dataclasses.replace(
        GOOD,
        model=lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
        test=lambda: Data(torch.randn(1, 4), torch.tensor([0])),
    )
    check(task, 20)


def test_eight_bit_parameters_are_refused():
    class Eight(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.scale = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn))

    with pytest.raises(
        TaskError, match="a parameter scale of torch.float8_e4m3fn; expected one of float16"
    ):
        check(dataclasses.replace(GOOD, model=lambda: Eight()), 20)
