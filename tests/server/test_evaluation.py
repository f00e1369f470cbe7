"""Evaluation by the server: running statistics, metrics of the whole test set, and the exported model."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import fedcomp
from fedcomp import Data, RunConfig, Task
from fedcomp.errors import TaskError
from fedcomp.layout import Layout
from fedcomp.server.evaluation import NO_TRAINING_DATA, Evaluator
from fedcomp.tasks import initial_model
from fedcomp.tasks.check import check

CPU = torch.device("cpu")


def digits() -> tuple[Data, Data]:
    """Return digits of scikit-learn, not scaled: training data, and test data that is sorted by class."""
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, labels = datasets.load_digits(return_X_y=True)
    first, rest = np.arange(400), np.arange(400, len(labels))
    first = first[np.argsort(labels[first], kind="stable")]
    inputs, targets = torch.tensor(pixels, dtype=torch.float32), torch.tensor(labels)
    return Data(inputs[rest], targets[rest]), Data(inputs[first], targets[first])


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


def share_correct(model: nn.Module, data: Data) -> float:
    with torch.no_grad():
        return (model(data.inputs).argmax(1) == data.targets).float().mean().item()


def evaluator(make, train: Data | None, test: Data, **parts) -> tuple[Evaluator, torch.Tensor]:
    task = Task("small", make, train, test, **parts)
    model = initial_model(task, 0)
    layout = Layout.of(model)
    return Evaluator(RunConfig(), task, layout, train, test, CPU), layout.gather(model)


@pytest.mark.slow
def test_an_exported_model_with_batchnorm_scores_what_the_run_reported(tmp_path):
    train, test = digits()
    task = Task("digits with BatchNorm", normalized, train, test)
    options = {
        "clients": 10,
        "participation": 0.5,
        "lr": 0.05,
        "uplink": "stc:density=10%",
        "partition": "dirichlet:0.5",
        "progress": False,
    }
    run = fedcomp.simulate(task, rounds=3, out=tmp_path / "run", **options)
    assert share_correct(run.model(), test) == pytest.approx(run.accuracy, abs=1e-6)
    alone = normalized()
    alone.load_state_dict(load_file(run.folder / "model.safetensors"), strict=True)
    assert share_correct(alone.eval(), test) == pytest.approx(run.accuracy, abs=1e-6)

    fedcomp.simulate(task, rounds=2, out=tmp_path / "resumed", **options)
    again = fedcomp.simulate(task, rounds=3, out=tmp_path / "resumed", resume=True, **options)
    assert again.records[-1].loss == run.records[-1].loss
    exported = [r.folder.joinpath("model.safetensors").read_bytes() for r in (run, again)]
    assert exported[0] == exported[1]


@pytest.mark.slow
def test_metrics_are_computed_on_the_whole_test_set(tmp_path):
    """The test set is sorted by class, so that the metrics of a batch differ from those of the whole set."""
    scores = pytest.importorskip("sklearn.metrics")
    train, test = digits()

    def f1(outputs, targets):
        return scores.f1_score(targets, outputs.argmax(-1), average="macro")

    def auc(outputs, targets):
        return scores.roc_auc_score(targets, outputs.softmax(-1), multi_class="ovr")

    def perplexity(outputs, targets):
        return F.cross_entropy(outputs, targets).exp()

    metrics = {"f1": f1, "auc": auc, "perplexity": perplexity}
    task = Task("digits", lambda: nn.Linear(64, 10), train, test, metrics=metrics)
    run = fedcomp.simulate(
        task, rounds=2, clients=10, lr=0.01, out=tmp_path / "run", progress=False
    )
    with torch.no_grad():
        outputs = run.model()(test.inputs)
    for name, metric in metrics.items():
        assert run.metrics[name][-1] == pytest.approx(float(metric(outputs, test.targets)))
    assert run.metrics["perplexity"][-1] == pytest.approx(np.exp(run.metrics["loss"][-1]))


def test_running_statistics_are_averages_over_training_examples():
    """A module that occurs twice in the model averages the inputs of both places. Dropout is off."""
    normalization = nn.BatchNorm1d(3, momentum=0.9)
    inputs = 5 + 3 * torch.randn(500, 3, 4)

    def make():
        return nn.Sequential(
            normalization, normalization, nn.Dropout(0.9), nn.Flatten(), nn.Linear(12, 2)
        )

    data = Data(inputs, torch.zeros(500, dtype=torch.int64))
    momentum = normalization.momentum
    made, weights = evaluator(make, data, Data(inputs[:1], data.targets[:1]))
    found = made.evaluate(RunConfig.rounds, weights)
    layer = made.model[0]
    assert torch.allclose(layer.running_mean, torch.full((3,), 2.5), atol=0.3)
    assert layer.momentum == momentum
    assert found.loss == made.evaluate(RunConfig.rounds, weights).loss


class Unusual(nn.Module):
    """A model with buffers of every kind, frozen and tied parameters, and a BatchNorm layer that stays in eval mode."""

    def __init__(self):
        super().__init__()
        self.start, self.frozen = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.frozen.running_mean.fill_(7.0)
        self.register_buffer("passes", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("phases", torch.ones(2, dtype=torch.complex64))

    def train(self, mode: bool = True):
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, inputs):
        self.passes += self.training
        return self.second(self.frozen(self.first(self.start(inputs))))


def test_other_buffers_are_exported_with_their_initial_values(tmp_path):
    data = Data(3 + torch.randn(50, 4), torch.arange(50) % 4)
    made, weights = evaluator(Unusual, data, data)
    made.evaluate(RunConfig.rounds, weights)
    save_file(made.export(weights), tmp_path / "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    assert exported.keys() == Unusual().state_dict().keys() - {"phases"}
    assert exported["passes"] == 0 and exported["frozen.running_mean"].tolist() == [7.0] * 4
    assert torch.allclose(exported["start.running_mean"], data.inputs.mean(0), atol=1e-5)
    assert len(made.warnings) == 1 and "buffers of the model (passes)" in made.warnings[0]


def test_an_accuracy_may_be_nan_but_not_above_1():
    """The accuracy of a diverged model may be NaN; an accuracy outside of 0 to 1 is an error of the task."""
    data = Data(torch.randn(20, 3), torch.arange(20) % 2)
    for value in (math.nan, 1.5):
        made, weights = evaluator(
            lambda: nn.Linear(3, 2), data, data, accuracy=lambda outputs, targets, v=value: v
        )
        if math.isnan(value):
            assert math.isnan(made.evaluate(1, weights).accuracy)
        else:
            with pytest.raises(TaskError, match="returned 1.5"):
                made.evaluate(1, weights)


def test_an_evaluate_fn_gets_the_statistics_that_are_exported():
    def measure(model, data):
        return {"loss": 1.0, "mean": model[0].running_mean.sum()}

    data = Data(torch.arange(40.0).reshape(10, 4), torch.arange(10) % 2)
    made, weights = evaluator(
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), data, data, evaluate_fn=measure
    )
    assert not made.warnings
    found = made.evaluate(1, weights).metrics["mean"]
    assert found == pytest.approx(data.inputs.mean(0).sum().item())
    assert made.export(weights)["0.running_mean"].sum().item() == found


def test_there_is_a_warning_about_initial_statistics_if_the_forward_pass_fails():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

    data = Data(torch.arange(40.0).reshape(10, 4), torch.arange(10) % 2)
    evaluate = {"evaluate_fn": lambda model, data: {"loss": 1.0}, "train_fn": lambda *parts: {}}
    made, weights = evaluator(Parts, data, data, **evaluate)
    (warning,) = made.warnings
    assert "keep their initial values" in warning and "NotImplementedError" in warning
    assert made.evaluate(1, weights).loss == 1.0
    assert not made.export(weights)["norm.running_mean"].any()


def test_a_model_without_buffers_is_exported_as_its_trained_parameters():
    def make():
        return nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))

    data = Data(torch.randn(20, 4), torch.arange(20) % 2)
    made, weights = evaluator(make, data, data)
    assert made.export(weights).keys() == {"1.weight", "1.bias"}
    assert not made.calibrates and not made.warnings


def test_without_training_data_the_statistics_are_those_of_the_test_inputs():
    test = Data(3 + torch.randn(50, 4), torch.arange(50) % 2)
    made, weights = evaluator(lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), None, test)
    exported = made.export(weights)
    assert torch.allclose(exported["0.running_mean"], test.inputs.mean(0), atol=1e-5)
    assert made.warnings == [NO_TRAINING_DATA]


def test_a_metric_that_fails_on_two_examples_is_checked_on_all():
    def needs_both_classes(outputs, targets):
        if len(targets.unique()) < 2:
            raise ValueError("only one class is present")
        return 0.5

    test = Data(torch.randn(20, 4), torch.arange(20) // 10)
    task = Task("sorted", lambda: nn.Linear(4, 2), test, test, metrics={"auc": needs_both_classes})
    check(task, 20)
    one_class = Data(test.inputs, torch.zeros(20, dtype=torch.int64))
    with pytest.raises(TaskError, match=r"metrics\['auc'\].* failed: .*ValueError: only one class"):
        check(dataclasses.replace(task, test=one_class), 20)
