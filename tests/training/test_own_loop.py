"""Clients train by the task's `train_fn`, whose state is stored between rounds."""

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from fedcomp import Data, Task, simulate
from fedcomp.errors import NonFiniteError, TaskError
from fedcomp.layout import Layout
from fedcomp.tasks import initial_model
from fedcomp.training import nested_state
from fedcomp.training.local_sgd import LocalSGD
from fedcomp.training.own_loop import client_engine

DATA = Data(torch.arange(12.0).reshape(6, 2), torch.arange(6))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def run(train_fn, state=None, rows=(1, 3, 4)):
    task = Task("own", network, DATA, DATA, train_fn=train_fn)
    model = initial_model(task, 0)
    layout = Layout.of(model)
    engine = client_engine(task, model, layout, "cpu")
    start = torch.linspace(-1, 1, layout.numel)
    batches = [np.array(rows[:1])]
    return engine.train(
        start,
        DATA,
        batches,
        LocalSGD(steps=7, lr=0.3),
        round=5,
        client=2,
        rows=np.array(rows),
        state=state,
    )


def test_the_update_and_the_metrics_are_those_of_the_train_fn():
    seen = {}

    def train(model, data, round):
        seen["targets"] = [int(target) for _, target in data]
        seen["round"] = (round.round, round.client, round.steps, round.lr)
        with torch.no_grad():
            model[0].weight += 2.0
        return {"loss": torch.tensor(1.5), "examples": 9, "perplexity": 4}

    update, result = run(train)
    assert seen == {"targets": [1, 3, 4], "round": (5, 2, 7, 0.3)}
    assert torch.allclose(update[:6], torch.full((6,), 2.0))
    assert not update[6:].any()
    assert (result.loss, result.examples, result.metrics) == (1.5, 9, {"perplexity": 4.0})


def test_changed_buffers_and_the_state_of_a_train_fn_are_returned():
    def train(model, data, round):
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.5)
        if round.state:
            optimizer.load_state_dict(round.state["sgd"])
        for inputs, _ in DataLoader(data, batch_size=3):
            model(inputs).square().mean().backward()
            optimizer.step()
        round.state["sgd"] = optimizer.state_dict()
        return {"loss": 0.0}

    first = run(train)
    assert first.result.buffers["1.num_batches_tracked"] == 1
    kept = nested_state.unpack(nested_state.pack(first.result.state))
    second = run(train, state=kept)
    assert torch.allclose(second.update, 1.5 * first.update, atol=1e-6)
    again = run(train, state=kept)
    assert torch.equal(again.update, second.update), "the kept state is not changed in place"


def test_random_draws_of_a_train_fn_do_not_depend_on_the_global_generator():
    def train(model, data, round):
        with torch.no_grad():
            model[0].bias += torch.randn(3)
        return {"loss": 0.0}

    torch.manual_seed(1)
    first = run(train).update
    torch.manual_seed(2)
    assert torch.equal(run(train).update, first)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "train_fn returned NoneType"),
        (
            {"examples": 3},
            r"train_fn returned a dict with the keys \[examples\]; return a dict with at least 'loss'",
        ),
        ({"loss": "low"}, "train_fn returned a str for 'loss'"),
        ({"loss": 1.0, "curve": [1, 2]}, "train_fn returned a list for 'curve'"),
        ({"loss": 1.0, "examples": 0}, "train_fn returned 0 as 'examples'; return a number from 1"),
    ],
)
def test_an_invalid_result_of_a_train_fn_is_one_error_message(returned, said):
    with pytest.raises(TaskError, match=said):
        run(lambda model, data, round: returned)


def one_round(train, folder):
    """Simulate one round of two clients. Return the record of the round and the reasons of the rejections."""
    task = Task(
        *("own", lambda: nn.Linear(2, 3), DATA, DATA),
        train_fn=train,
        evaluate_fn=lambda model, data: {"loss": 1.0},
    )
    run = simulate(task, clients=2, rounds=1, participation=1, out=folder, progress=False)
    return run.records[0], [rejection.reason for rejection in run.summary.rejections]


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), torch.tensor(float("nan"))])
def test_a_client_whose_train_fn_returns_a_loss_that_is_not_finite_is_rejected(loss, tmp_path):
    def train(model, data, local_round):
        return {"loss": loss if local_round.client else 1.0}

    said = "task 'own': train_fn returned the loss (nan|inf); return a finite loss"
    with pytest.raises(NonFiniteError, match=said):
        run(train)
    record, (reason,) = one_round(train, tmp_path / "run")
    assert (record.accepted, record.rejected, record.train_loss) == (1, 1, 1.0)
    assert re.match(said, reason)


def test_an_update_that_is_not_finite_is_reported_with_its_tensor(tmp_path):
    def train(model, data, local_round):
        with torch.no_grad():
            model.weight += float("nan")
        return {"loss": float("nan")}

    record, reasons = one_round(train, tmp_path / "run")
    assert record.rejected == 2 and "the update is nan in tensor 'weight'" in reasons[0]


def test_state_that_cannot_be_stored_is_one_error_message():
    with pytest.raises(
        TaskError, match="the state that a client keeps between rounds contains a Layout"
    ):
        nested_state.pack({"layout": Layout.flat(3)})

    def train(model, data, round):
        round.state["last"] = [Layout.flat(3)]
        return {"loss": 1.0}

    with pytest.raises(
        TaskError, match="the state that a client keeps between rounds contains a Layout"
    ):
        run(train)


def freeze(model):
    model.requires_grad_(False)


def convert(model):
    model.half()


def replace(model):
    model[0].weight = nn.Parameter(torch.ones(3, 2))


def reshape(model):
    model[0].weight = nn.Parameter(torch.ones(4, 2))


@pytest.mark.parametrize("change", [freeze, convert, replace, reshape])
def test_parameters_that_a_train_fn_changes_are_restored_for_the_next_client(change):
    def train(model, data, round):
        if round.client == 1:
            change(model)
        else:
            model[0](torch.ones(1, 2)).sum().backward()
            with torch.no_grad():
                model[0].weight += model[0].weight.grad
        return {"loss": 1.0}

    task = Task("own", network, DATA, DATA, train_fn=train)
    model = initial_model(task, 0)
    layout = Layout.of(model)
    alone = client_engine(task, initial_model(task, 0), layout, "cpu")
    engine = client_engine(task, model, layout, "cpu")
    start, batches = torch.linspace(-1, 1, layout.numel), [np.array([1])]
    if change is reshape:
        message = r"the parameter 'weight' of Linear is of the shape \[4, 2\]; keep the parameter with its shape"
        with pytest.raises(TaskError, match=message):
            engine.train(start, DATA, batches, LocalSGD(), client=1)
    else:
        engine.train(start, DATA, batches, LocalSGD(), client=1)
    after = engine.train(start, DATA, batches, LocalSGD(), client=2).update
    assert torch.equal(after, alone.train(start, DATA, batches, LocalSGD(), client=2).update)
    assert after.any()


def test_unpacking_inverts_packing_of_nested_values():
    value = {"a": [1, 2.5, None, True], 3: (torch.ones(2, 2), {"b": "c"}), "empty": {}}
    found = nested_state.unpack(nested_state.pack(value))
    assert found["a"] == value["a"] and found["empty"] == {}
    assert torch.equal(found[3][0], torch.ones(2, 2)) and found[3][1] == {"b": "c"}
    assert isinstance(found[3], tuple)
