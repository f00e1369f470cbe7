"""Checks of a task before the first round of a run."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import UninitializedParameter

from ..callbacks import RoundRecord
from ..errors import ConfigError, TaskError
from ..layout import Layout
from .augment import Augmentation
from .base import MetricFunction, Task, forward_takes, initial_model, predictions, share_correct
from .data import (
    DATA_FORMS,
    Batch,
    Data,
    Examples,
    LazyData,
    concatenate_nested,
    describe_non_finite,
    tensors,
)
from .running_statistics import recalibrated_layers
from .user_errors import GIVE_FOLDER, task_errors

T = TypeVar("T")
# Beginning of torch's warning that outputs and targets, the arguments of a loss, have different shapes.
DIFFERENT_SHAPES = "Using a target size"
# Keys of metrics.jsonl, which no metric may have as its name.
RESERVED_NAMES = {f.name for f in dataclasses.fields(RoundRecord)}
# Allowed dtypes of trainable parameters.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LABEL_DTYPES = (torch.int64, torch.uint8)  # class labels that torch's cross-entropy accepts


def check(
    task: Task,
    batch_size: int,
    train: Examples | None = None,
    test: Examples | None = None,
    augment: bool = False,
) -> Layout:
    """Check a task's model, data, loss, accuracy and metrics on two examples, or on one if `batch_size` is 1. Return the model's layout.

    `train` and `test` are data that `data_of` returned. If one of them is None, the task's data is loaded. If the task has no test data,
    pass the training data as `test`. With `augment`, the task's augmentation is checked as well. A metric that fails on two examples is
    called again on the whole test set. The state of torch's global generator does not change.

    Raises TaskError if a check fails, with a message that names the task, the value that its code returned, and the expected value. Raises
    ConfigError if `augment` is True and the task has no augmentation. If the task's code raises a FedcompError, such as DataError, this
    error is passed on.
    """
    if augment and task.augment is None:
        raise ConfigError(
            f"--augment: task '{task.name}' has no augmentation; leave --augment out, or give the task an 'augment'"
        )
    with torch.random.fork_rng(devices=[]):
        model = _model(task)
        layout = Layout.of(model)
        second = _model(task)
        same = Layout.of(second) == layout and _have_same_constants(model, second, layout)
        wanted = "the same parameters and buffers every time"
        _require(task, same, "model()", "a different model in a second call", wanted)
        train = data_of(task, "train") if train is None else train
        test = data_of(task, "test") if test is None else test
        if augment and task.augment is not None:
            _check_augmentation(task, task.augment, train)
        _check_training_step(task, model, train, min(2, batch_size, len(train)))
        _check_evaluation(task, model, "train" if test is train else "test", test)
    return layout


def layout_of(task: Task) -> Layout:
    """Return the layout of a task's model without reading the task's data. Raises TaskError for a model that cannot be trained."""
    with torch.random.fork_rng(devices=[]):
        return Layout.of(_model(task))


def changing_buffers(task: Task, model: nn.Module, train: Examples) -> list[str]:
    """Return the names of the buffers that training changes but that stay unchanged in the server's model.

    Clients do not send buffers. The server therefore evaluates, for example, spectral normalization with its initial buffers. The result
    omits the running statistics of layers such as BatchNorm, which the server computes itself. `model` is left in eval mode.
    """
    layers = recalibrated_layers(model)
    names = [name for name, _ in model.named_buffers() if name.rpartition(".")[0] not in layers]
    if not names or task.train_fn is not None:
        return []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        trained = _model(task).train()
        buffers = dict(trained.named_buffers())
        before = {name: buffers[name].clone() for name in names}
        batch = _first_batch(task, "train", train).to("cpu")
        _call(task, "model()(inputs)", lambda: task.outputs(trained, batch))
        buffers = dict(trained.named_buffers())
        return [name for name in names if not _same(before[name], buffers[name])]


def data_of(task: Task, split: str) -> Examples:
    """Return the task's "train" or "test" data. Raises TaskError if the data is missing, unreadable or invalid."""
    data = data_or_none(task, split)
    if data is None and split == "test":
        raise TaskError(
            f"task '{task.name}' has no test data; give the task a 'test', or let the clients evaluate with --evaluate clients"
        )
    return _check_data(task, split, data)


def data_or_none(task: Task, split: str) -> Examples | None:
    """Return the task's "train" or "test" data, or None if the task has none. Raises TaskError if the data is unreadable or invalid."""
    with task_errors(f"task '{task.name}': {split}()", without_folder=GIVE_FOLDER):
        data = getattr(task, split)()
    return None if data is None else _check_data(task, split, data)


def local_data(task: Task, split: str) -> Examples | None:
    """Return the task's "train" or "test" data. Return None if the task has none, or if reading it fails because a file does not exist."""
    try:
        return data_or_none(task, split)
    except TaskError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def _model(task: Task) -> nn.Module:
    model = _call(task, "model()", lambda: initial_model(task, 0))
    is_module = isinstance(model, nn.Module)
    _require(task, is_module, "model()", _describe(model), "a torch.nn.Module")
    lazy = any(isinstance(p, UninitializedParameter) for p in model.parameters())
    _require(task, not lazy, "model()", "a lazy layer", "layers with their sizes")
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}
    _require(task, trainable, "model()", "a module without a trainable parameter", "at least one")
    for name, p in trainable.items():
        got = f"a parameter {name} {'on the meta device' if p.is_meta else f'of {p.dtype}'}"
        wanted = "one of float16, bfloat16, float32 or float64"
        _require(task, p.dtype in DTYPES and not p.is_meta, "model()", got, wanted)
        got = f"a parameter {name} with NaN or infinity"
        _require(task, p.isfinite().all(), "model()", got, "finite initial weights")
    return model


def _have_same_constants(model: nn.Module, other: nn.Module, layout: Layout) -> bool:
    """Return whether the tensors that are never sent (buffers and frozen parameters) are equal in two models."""
    trained = {entry.name for entry in layout}
    first, second = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (model, other))
    return first.keys() == second.keys() and all(
        _same(first[name], second[name]) for name in first.keys() - trained
    )


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal, where NaN equals NaN."""
    if a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num())


def _check_data(task: Task, split: str, data: Any) -> Examples:
    call = f"{split}()"
    _require(task, isinstance(data, Data | LazyData), call, _describe(data), DATA_FORMS)
    parts = _named_parts(data) if isinstance(data, Data) else {}
    for part, value in parts.items():
        dense = isinstance(value, Tensor) and value.ndim and value.layout == torch.strided
        wanted = "a dense tensor with an example in each row"
        _require(task, dense, f"{call}.{part}", _describe(value), wanted)
    _require(task, len(data), call, "no examples", "at least one")
    for part, value in parts.items():
        got = f"{len(value)} {part} and {len(data.targets)} targets"
        _require(task, len(value) == len(data.targets), call, got, "equal numbers")
    return data


def _named_parts(data: Data) -> dict[str, Any]:
    """Return the inputs and targets by the names that error messages use, such as "inputs[0]"."""
    inputs: Any = data.inputs
    if isinstance(inputs, tuple):
        inputs = dict(enumerate(inputs))
    if isinstance(inputs, dict):
        named = {f"inputs[{key!r}]": value for key, value in inputs.items()}
    else:
        named = {"inputs": inputs}
    return {**named, "targets": data.targets}


def _first_batch(task: Task, split: str, data: Examples, count: int = 2) -> Batch:
    rows = torch.arange(min(count, len(data)), device=data.device)
    return _call(task, f"the first examples of {split}", lambda: data.batch(rows))


def _check_augmentation(task: Task, augment: Augmentation, data: Examples) -> None:
    inputs: Any = _first_batch(task, "train", data).inputs
    plan = [np.arange(min(2, len(data)))]
    one = isinstance(inputs, Tensor)
    _require(task, one, "train()", "several inputs", "one tensor, as --augment requires")
    draw, apply = "augment.draw(generator, count)", "augment.apply(inputs, drawn)"
    drawn = _call(task, draw, lambda: torch.from_numpy(augment.draw_for(plan, 0, 1, 0)))
    wanted = f"a numpy array with a row for each of {len(inputs)} examples"
    _require(task, drawn.shape[:1] == (len(inputs),), draw, _describe(drawn), wanted)
    changed = _call(task, apply, lambda: augment.apply(inputs, drawn))
    got, wanted = _describe(changed), _describe(inputs)
    _require(task, got == wanted, apply, got, wanted)


def _check_training_step(task: Task, model: nn.Module, data: Examples, count: int) -> None:
    if task.train_fn is not None:
        return
    batch = _first_batch(task, "train", data, count)
    outputs = _model_outputs(task, model.train(), batch, f"model()(inputs {_shapes(batch)})")
    _check_labels(task, "train", data, outputs, batch.targets)
    call = "loss(outputs, targets)"
    shapes = f"outputs {_describe(predictions(outputs))} and targets {_describe(batch.targets)}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = _call(task, f"loss of {shapes}", lambda: task.loss_of(outputs, batch.targets))
    if any(DIFFERENT_SHAPES in str(warning.message) for warning in caught):
        raise TaskError(
            f"task '{task.name}': {call}: {shapes} have different shapes, so the loss would compare each output with each target; "
            "give targets of the outputs' shape, such as targets[:, None]"
        )
    scalar = isinstance(loss, Tensor) and loss.numel() == 1 and not loss.ndim
    _require(task, scalar, call, _describe(loss), "a scalar tensor, the mean over the batch")
    if not loss.isfinite() and (problem := describe_non_finite(data)):
        raise TaskError(
            f"task '{task.name}': the training data contains {problem}; correct train()"
        )
    _require(task, loss.isfinite(), call, f"{loss.item()}", "a finite number")
    wanted = "a loss that is computed from the outputs and not detached"
    _require(task, loss.requires_grad, call, "a tensor without gradient", wanted)
    _call(task, f"{call}.backward()", loss.backward)


def _check_evaluation(task: Task, model: nn.Module, split: str, data: Examples) -> None:
    if task.evaluate_fn is not None:
        return
    with torch.inference_mode():
        batch = _first_batch(task, split, data)
        forward = f"the model in eval mode on {split}().inputs {_shapes(batch)}"
        model_outputs = _model_outputs(task, model.eval(), batch, forward)
        _check_labels(task, split, data, model_outputs, batch.targets)
        outputs, targets = predictions(model_outputs), batch.targets
        if task.accuracy is share_correct:
            labels = isinstance(targets, Tensor) and not targets.is_floating_point()
            fix = ", such as targets.argmax(1)" if task.criterion is F.cross_entropy else ""
            wanted = f"integer labels{fix}; for other targets, give the task accuracy=None and metrics={{name: function}}"
            _require(task, labels, f"{split}().targets", _describe(targets), wanted)
        if task.accuracy is not None:
            call, wanted = "accuracy(outputs, targets)", "a number from 0 to 1"
            accuracy = _number(task, call, task.accuracy, outputs, targets, wanted)
            _require(task, 0 <= accuracy <= 1, call, f"{accuracy:g}", wanted)
        call = f"loss(outputs, targets) on {split}()"
        _call(task, call, lambda: float(task.loss_of(model_outputs, targets)))
        for name in task.metrics:
            valid = isinstance(name, str) and name.isidentifier() and name not in RESERVED_NAMES
            wanted = "an identifier, such as mean_error, that is not a key of metrics.jsonl"
            _require(task, valid, "metrics", f"the name {name!r}", wanted)
            try:
                _check_metric(task, name, outputs, targets)
            except TaskError:  # a metric such as the AUC may need more than two examples
                pairs = [
                    (predictions(_model_outputs(task, model, b, forward)), b.targets)
                    for b in data.batches(250)
                ]
                _check_metric(task, name, *concatenate_nested(pairs))


def _check_metric(task: Task, name: str, outputs: Tensor, targets: Tensor) -> None:
    with warnings.catch_warnings():
        # A metric may warn, for example, that the two examples are of one class.
        warnings.simplefilter("ignore")
        call = f"metrics[{name!r}](outputs, targets)"
        _number(task, call, task.metrics[name], outputs, targets, "a number")


def _number(
    task: Task, call: str, function: MetricFunction, outputs: Any, targets: Any, expected: str
) -> float:
    """Return the result of a metric function as a float. Raises TaskError if the result is not a number."""
    value = _call(task, call, lambda: function(outputs, targets))
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise _unexpected(task, call, _describe(value), expected) from None


def _shapes(batch: Batch) -> str:
    return ", ".join(map(_describe, tensors(batch.inputs)))


def _model_outputs(task: Task, model: nn.Module, batch: Batch, call: str) -> Any:
    """Return the model's output for a batch.

    Raises TaskError if the model fails. Also raises TaskError if the model returns neither a loss nor a tensor of outputs, unless the task
    has its own `loss`, which may accept other outputs.
    """
    for name in batch.inputs if isinstance(batch.inputs, dict) else ():
        if name != task.target and not forward_takes(model, name):
            raise TaskError(
                f"task '{task.name}': the batch has the key '{name}', but the model's forward has no argument of this name; rename or drop "
                f"the key, or, if it is the key of the targets, give Task(target='{name}')"
            )
    used = {t.dtype for t in tensors(batch.inputs) if t.is_floating_point()}
    types = {p.dtype for p in model.parameters()}
    fix = "correct the task"
    if used - types:
        fix = (
            f"give inputs of the model's type, such as inputs.to({min(types, key=str)}), "
            f"or a model of the inputs' type, such as model.to({min(used, key=str)})"
        )
    outputs = _call(task, call, lambda: task.outputs(model, batch), fix)
    predicted = predictions(outputs)
    if task.loss not in (None, F.cross_entropy) or task.returns_loss(outputs):
        return outputs
    valid = isinstance(predicted, Tensor) and predicted.numel() > 0
    expected = "a tensor of outputs, or an object with .loss or .logits"
    _require(task, valid, call, _describe(outputs), expected)
    return outputs


def _check_labels(task: Task, split: str, data: Examples, outputs: Any, targets: Any) -> None:
    """Raise TaskError if the cross-entropy cannot use `targets` as labels, or if a label in `data` is not the index of an output."""
    if task.criterion is not F.cross_entropy or not isinstance(outputs, Tensor):
        return
    call = f"{split}().targets"
    if isinstance(targets, Tensor):
        fix = _label_conversion(outputs, targets)
        wanted = f"a label for each example, such as {fix}, or another loss"
        _require(task, not fix, call, _describe(targets), wanted)
    if outputs.ndim != 2 or not isinstance(data, Data):
        return
    n = outputs.shape[1]
    if n == 1:
        raise TaskError(
            f"task '{task.name}': the model has 1 output, for which the cross-entropy is always 0; give the task another loss, such as "
            "loss=torch.nn.functional.mse_loss"
        )
    if data.targets.ndim == 1 and not data.targets.is_floating_point():
        low, high = (int(limit) for limit in data.targets.aminmax())
        got, wanted = f"labels from {low} to {high}", f"0 to {n - 1}, as the model has {n} outputs"
        _require(task, low >= 0 and high < n, call, got, wanted)


def _label_conversion(outputs: Tensor, targets: Tensor) -> str:
    """Return an expression that converts targets to labels, such as "targets.long()", or "" if none is needed or known."""
    integer = "" if targets.dtype in LABEL_DTYPES else ".long()"
    if outputs.ndim == targets.ndim == 2 and outputs.shape[1] > 1:
        if targets.shape[1] == 1:
            return f"targets.squeeze(1){integer}"
        if targets.shape == outputs.shape and not targets.is_floating_point():
            return "targets.argmax(1)"
    if targets.ndim == outputs.ndim - 1 and integer:
        return f"targets{integer}"
    return ""


def _call(task: Task, call: str, function: Callable[[], T], fix: str = "correct the task") -> T:
    """Return the result of a function of the task's code. Raises TaskError, which names the call and the fix, if the function fails."""
    with task_errors(f"task '{task.name}': {call}", fix):
        return function()


def _require(task: Task, valid: Any, call: str, got: str, expected: str) -> None:
    """Raise TaskError if `valid` is false. The message names the call, its result (`got`) and the expected result."""
    if not valid:
        raise _unexpected(task, call, got, expected)


def _unexpected(task: Task, call: str, got: str, expected: str) -> TaskError:
    return TaskError(f"task '{task.name}': {call}: got {got}; expected {expected}")


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    sparse = "" if value.layout == torch.strided else "sparse "
    return f"{sparse}{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
