import sys

import numpy as np
import pytest
import torch
from cases import for_each

from fedcomp.errors import DataError, MissingExtraError, TaskError
from fedcomp.layout import Layout
from fedcomp.tasks import Task, available_tasks, cifar10, initial_model, load
from fedcomp.tasks.check import check
from fedcomp.tasks.cifar10 import ResNet18

PARAMETERS = {
    "digits": 9_610,
    "mnist-logreg": 7_850,
    "mnist-logreg-global": 7_850,
    "mnist-cnn": 1_663_370,
    "cifar10-vgg11s": 865_482,
    "cifar10-resnet18": 11_173_962,
    "shakespeare-lstm": 824_425,
}
SHAPES = {
    "mnist-logreg": (784,),
    "mnist-logreg-global": (784,),
    "mnist-cnn": (1, 28, 28),
    "cifar10-vgg11s": (3, 32, 32),
    "cifar10-resnet18": (3, 32, 32),
    "shakespeare-lstm": (80,),
}


def test_the_registry_contains_the_built_in_tasks():
    assert set(available_tasks()) == set(PARAMETERS)


@for_each("name", PARAMETERS)
def test_models_have_the_published_number_of_parameters_and_need_no_data(name):
    task = load(name, None)
    assert task.name == name
    assert Layout.of(initial_model(task, 0)).numel == PARAMETERS[name]


@for_each("name", PARAMETERS)
def test_a_seed_gives_the_same_initial_weights(name):
    task = load(name)
    weights = [
        Layout.of(model).gather(model) for model in (initial_model(task, 7), initial_model(task, 7))
    ]
    assert torch.equal(*weights) and weights[0].isfinite().all()


def test_the_error_for_an_unknown_task_names_the_closest_task():
    with pytest.raises(TaskError, match="unknown task 'mnist-logrex'; did you mean 'mnist-logreg'"):
        load("mnist-logrex")
    with pytest.raises(
        TaskError, match="^--task mnits: unknown task 'mnits'; did you mean 'mnist-cnn'"
    ):
        load("mnits")


@for_each("name", SHAPES)
def test_missing_data_is_an_error_only_when_the_data_is_read(name):
    with pytest.raises(DataError, match="give --data DIR"):
        load(name, None).train()


def test_without_scikit_learn_the_error_of_digits_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(
        MissingExtraError,
        match=r"the task digits needs the package scikit-learn; .* 'fedcomp\[sim\]'",
    ):
        load("digits").train()


def test_digits_have_a_fixed_split_without_common_examples():
    pytest.importorskip("sklearn")
    task = load("digits")
    train, test = task.train(), task.test()
    assert (len(train), len(test)) == (1437, 360)
    assert (
        train.inputs.shape == (1437, 64)
        and train.inputs.dtype == torch.float32
        and train.targets.dtype == torch.int64
    )
    assert abs(train.inputs.mean()) < 1e-5 and abs(train.inputs.std() - 1) < 1e-3
    assert (
        torch.bincount(test.targets).tolist()
        == torch.bincount(load("digits").test().targets).tolist()
    )
    assert torch.bincount(test.targets, minlength=10).min() >= 25
    seen = {row.numpy().tobytes() for row in train.inputs}
    assert not seen & {row.numpy().tobytes() for row in test.inputs}


def test_digits_are_learned(one_thread):
    pytest.importorskip("sklearn")
    task = load("digits")
    model, train, test = initial_model(task, 0), task.train(), task.test()
    descend(task, model, train, steps=400, lr=0.1)
    assert task.accuracy(model(test.inputs), test.targets) > 0.95


def descend(task: Task, model, data, steps: int, lr: float) -> None:
    """Train with plain SGD on random batches of 20 examples."""
    rng, optimizer = np.random.default_rng(0), torch.optim.SGD(model.parameters(), lr)
    for _ in range(steps):
        rows = rng.integers(0, len(data), 20)
        optimizer.zero_grad()
        task.criterion(model(data.inputs[rows]), data.targets[rows]).backward()
        optimizer.step()


@pytest.mark.slow
def test_both_models_accept_real_mnist_and_the_linear_model_learns_it(data_folder, one_thread):
    """One test for both models, because decoding the training images takes most of the time."""
    pytest.importorskip("pyarrow")
    pytest.importorskip("PIL")
    cnn, logreg = load("mnist-cnn", data_folder), load("mnist-logreg", data_folder)
    train = logreg.train()
    assert len(train) == 60_000 and train.inputs.shape[1:] == SHAPES[logreg.name]
    for task in (cnn, logreg):
        test = task.test()
        assert len(test) == 10_000 and test.inputs.shape[1:] == SHAPES[task.name]
        counts = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
        assert torch.bincount(test.targets).tolist() == counts
        assert check(task, 20, test, test).numel == PARAMETERS[task.name]
    model = initial_model(logreg, 0)
    descend(logreg, model, train, steps=1000, lr=0.01)
    assert logreg.accuracy(model(test.inputs), test.targets) > 0.88


@pytest.mark.slow
def test_both_networks_accept_real_cifar10_images(data_folder):
    pytest.importorskip("pyarrow")
    pytest.importorskip("PIL")
    images, labels = cifar10.images(data_folder).read(
        "test"
    )  # decoding the training set would take longer than all other tests here
    assert images.shape == (10_000, 3, 32, 32) and np.bincount(labels).tolist() == [1000] * 10
    for make in (cifar10.network, ResNet18):
        assert make()(torch.tensor(images[:2]) / 255).shape == (2, 10)
