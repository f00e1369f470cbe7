"""If the training data contains NaN, the error message names this cause, not the learning rate."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedcomp.config import RunConfig
from fedcomp.errors import TaskError
from fedcomp.sim import simulate
from fedcomp.tasks import Task


def task(bad: slice) -> Task:
    """Return a task with 400 training examples. Those in the slice have NaN in one of four inputs; the test data has no NaN."""
    inputs = torch.randn(400, 4, generator=torch.Generator().manual_seed(1))
    targets = (inputs[:, 1] > 0).long()
    spoiled = inputs.clone()
    spoiled[bad, 0] = torch.nan
    return Task("sensors", nn.Linear(4, 2), (spoiled, targets), (inputs, targets))


def test_a_client_reports_how_many_of_its_examples_are_not_finite(tmp_path):
    config = RunConfig(
        "object:sensors", clients=2, rounds=1, local_epochs=1, out=str(tmp_path / "run")
    )
    (found,) = simulate(config, task=task(slice(100, 400))).rejections
    assert (
        found.stage == "encode"
        and "this client's training data contains NaN or infinity in 1" in found.reason
    )
    assert "of 200 examples; correct train()" in found.reason and "--lr" not in found.reason


def test_data_that_is_read_batch_by_batch_is_named_as_a_possible_cause(tmp_path):
    inputs = torch.randn(400, 4, generator=torch.Generator().manual_seed(1))
    targets = (inputs[:, 1] > 0).long()
    spoiled = inputs.clone()
    spoiled[100:] = torch.nan
    sensors = Task("sensors", nn.Linear(4, 2), TensorDataset(spoiled, targets), (inputs, targets))
    config = RunConfig(
        "object:sensors", clients=2, rounds=1, local_epochs=1, out=str(tmp_path / "run")
    )
    summary = simulate(config, task=sensors)
    assert summary.rejections
    for found in summary.rejections:
        assert "check the data of train() for NaN and infinity" in found.reason


def test_the_check_before_the_first_round_counts_the_examples(tmp_path):
    config = RunConfig("object:sensors", rounds=1, out=str(tmp_path / "run"))
    with pytest.raises(
        TaskError,
        match=r"the training data contains NaN or infinity in 7 of 400 examples; correct train\(\)",
    ):
        simulate(config, task=task(slice(0, 7)))
