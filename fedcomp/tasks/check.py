"""What a task must keep to, tried on two examples before the first round."""

import dataclasses
import numbers
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import UninitializedParameter

from ..callbacks import RoundRecord
from ..errors import ConfigError, FedcompError, TaskError
from ..layout import Layout
from .base import Data, Measure, Task, initial_model, share_correct
from .data import FORMS, non_finite
from .running_statistics import recalibrated
from .user_errors import SEE_TRACEBACK, describe, out_of_memory

T = TypeVar("T")
TAKEN = {f.name for f in dataclasses.fields(RoundRecord)}  # names of numbers of a round
PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of what is trained


def check(
    task: Task,
    batch_size: int,
    train: Data | None = None,
    test: Data | None = None,
    augment: bool = False,
) -> Layout:
    """Try model, data, loss, accuracy and metrics on two examples, or one if batches are no larger. Return the layout of the model.

    A metric that fails on two examples is tried on the whole test set. Data that is loaded already may be handed in, so that it is not
    made twice. Raises TaskError, in a sentence that names the task, what it returned and what was expected; ConfigError where examples
    are to be changed and the task does not say how; errors of fedcomp's own, such as DataError, pass through. Leaves torch's global
    generator as it was.
    """
    if augment and task.augment is None:
        raise ConfigError(
            f"--augment changes examples in the task's own way, and task '{task.name}' has none; leave it out, or give the "
            "task an 'augment'"
        )
    with torch.random.fork_rng(devices=[]):
        model = _model(task)
        layout = Layout.of(model)
        again = _model(task)
        if Layout.of(again) != layout or not _alike(model, again, layout):
            raise _broken(
                task,
                "model()",
                "another model when called again",
                "the same parameters and buffers every time",
            )
        train = data_of(task, "train") if train is None else _valid(task, "train", train)
        test = data_of(task, "test") if test is None else _valid(task, "test", test)
        if augment:
            _augmentation(task, train)
        _step(task, model, train, min(2, batch_size, len(train)))
        _evaluation(task, model, test)
    return layout


def layout_of(task: Task) -> Layout:
    """Return the layout of a task's model, without its data. Raises TaskError for a model that cannot be trained."""
    with torch.random.fork_rng(devices=[]):
        return Layout.of(_model(task))


def changing_buffers(task: Task, model: nn.Module, train: Data) -> list[str]:
    """Return the names of buffers that training changes and the server does not recalibrate, such as those of spectral normalization.

    Buffers are not sent: the server keeps the initial values of these. `model` is one of the task's; it is left in eval mode.
    """
    layers = recalibrated(model)
    names = [name for name, _ in model.named_buffers() if name.rpartition(".")[0] not in layers]
    if not names:
        return []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        trained = _model(task).train()
        buffers = dict(trained.named_buffers())
        before = {name: buffers[name].clone() for name in names}
        _tried(task, "model()(inputs)", lambda: trained(train.inputs[:2].cpu()))
        buffers = dict(trained.named_buffers())
        return [name for name in names if not _same(before[name], buffers[name])]


def data_of(task: Task, split: str) -> Data:
    """The task's "train" or "test" data. Raises TaskError where making it fails or it is not examples with as many targets."""
    return _valid(task, split, _tried(task, f"{split}()", getattr(task, split)))


def _model(task: Task) -> nn.Module:
    model = _tried(task, "model()", lambda: initial_model(task, 0))
    if not isinstance(model, nn.Module):
        raise _broken(task, "model()", _kind(model), "a torch.nn.Module")
    if any(isinstance(p, UninitializedParameter) for p in model.parameters()):
        raise _broken(task, "model()", "a lazy layer", "layers with their sizes")
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}
    if not trainable:
        raise _broken(task, "model()", "a module without a trainable parameter", "at least one")
    for name, parameter in trainable.items():
        if parameter.dtype not in PRECISIONS or parameter.is_meta:
            kind = "on the meta device" if parameter.is_meta else f"of {parameter.dtype}"
            raise _broken(
                task,
                "model()",
                f"a parameter {name} {kind}",
                "one of float16, bfloat16, float32 or float64",
            )
        if not parameter.isfinite().all():
            raise _broken(
                task,
                "model()",
                f"a parameter {name} with NaN or infinity",
                "finite initial weights",
            )
    return model


def _alike(model: nn.Module, other: nn.Module, layout: Layout) -> bool:
    """Whether buffers and frozen parameters are the same to the bit: they are never sent."""
    trained = {entry.name for entry in layout}
    ours, theirs = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (model, other))
    return ours.keys() == theirs.keys() and all(
        _same(ours[name], theirs[name]) for name in ours.keys() - trained
    )


def _same(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return (
        torch.equal(a, b)
        or a.is_floating_point()
        and bool(((a == b) | a.isnan() & b.isnan()).all())
    )


def _valid(task: Task, split: str, data: Data) -> Data:
    if not isinstance(data, Data):
        raise _broken(task, f"{split}()", _kind(data), FORMS)
    for part, value in (("inputs", data.inputs), ("targets", data.targets)):
        if not isinstance(value, Tensor) or not value.ndim or value.layout != torch.strided:
            raise _broken(
                task,
                f"{split}().{part}",
                _kind(value),
                "a tensor with an example in each row, not sparse",
            )
    if not len(data.inputs):
        raise _broken(task, f"{split}()", "no examples", "at least one")
    if len(data.inputs) != len(data.targets):
        raise _broken(
            task,
            f"{split}()",
            f"{len(data.inputs)} inputs and {len(data.targets)} targets",
            "as many of one as of the other",
        )
    return data


def _augmentation(task: Task, data: Data) -> None:
    """Two examples, changed as in training."""
    inputs, plan = data.inputs[:2], [np.arange(min(2, len(data)))]
    drawn = _tried(
        task, "augment.draw(generator, count)", lambda: task.augment.drawn(plan, 0, 1, 0)
    )
    if not isinstance(drawn, np.ndarray) or drawn.shape[:1] != (len(inputs),):
        found = f"an array {list(drawn.shape)}" if isinstance(drawn, np.ndarray) else _kind(drawn)
        raise _broken(
            task,
            "augment.draw(generator, count)",
            found,
            f"a numpy array with a row for each of {len(inputs)} examples",
        )
    changed = _tried(
        task,
        "augment.apply(inputs, drawn)",
        lambda: task.augment.apply(inputs, torch.from_numpy(drawn)),
    )
    if _kind(changed) != _kind(inputs):
        raise _broken(task, "augment.apply(inputs, drawn)", _kind(changed), _kind(inputs))


def _step(task: Task, model: nn.Module, data: Data, count: int) -> None:
    """A forward and backward pass in training."""
    inputs, targets = data.inputs[:count], data.targets[:count]
    outputs = _outputs(task, model.train(), inputs)
    _labels(task, "train", data.targets, outputs)
    loss = _tried(task, "loss(outputs, targets)", lambda: task.loss(outputs, targets))
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.ndim:
        raise _broken(
            task, "loss(outputs, targets)", _kind(loss), "a scalar tensor, the mean over the batch"
        )
    if not loss.isfinite() and (found := non_finite(data)):
        raise TaskError(f"task '{task.name}': the training data holds {found}; correct train()")
    if not loss.isfinite():
        raise _broken(task, "loss(outputs, targets)", f"{loss.item()}", "a finite number")
    if not loss.requires_grad:
        raise _broken(
            task,
            "loss(outputs, targets)",
            "a tensor without gradient",
            "one computed from the outputs, not detached",
        )
    _tried(task, "loss(outputs, targets).backward()", loss.backward)


def _evaluation(task: Task, model: nn.Module, data: Data) -> None:
    """Loss, accuracy and metrics as the server computes them, on two examples."""
    with torch.inference_mode():
        outputs = _outputs(task, model.eval(), data.inputs[:2])
        _labels(task, "test", data.targets, outputs)
        targets = data.targets[:2]
        if task.accuracy is share_correct and targets.is_floating_point():
            raise _broken(
                task,
                "test().targets",
                _kind(targets),
                "labels, of which a share can be correct; else give the task "
                "accuracy=None, and metrics={name: function} for what is measured in its place",
            )
        if task.accuracy is not None:
            share = _number(
                task,
                "accuracy(outputs, targets)",
                task.accuracy,
                outputs,
                targets,
                "one number from 0 to 1",
            )
            if not 0 <= share <= 1:
                raise _broken(
                    task, "accuracy(outputs, targets)", f"{share:g}", "a share from 0 to 1"
                )
        _tried(task, "loss(outputs, targets) on test()", lambda: float(task.loss(outputs, targets)))
        for name in task.metrics:
            if not isinstance(name, str) or not name.isidentifier() or name in TAKEN:
                raise _broken(
                    task,
                    "metrics",
                    f"the name {name!r}",
                    "a word that metrics.jsonl does not use yet, such as mean_error",
                )
            try:
                _metric(task, name, outputs, targets)
            except TaskError:  # a metric such as AUC needs examples of every class
                _metric(task, name, *_whole(task, model, data))


def _metric(task: Task, name: str, outputs: Tensor, targets: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about classes that two examples cannot have
        what = f"metrics[{name!r}](outputs, targets)"
        _number(task, what, task.metrics[name], outputs, targets, "one number")


def _whole(task: Task, model: nn.Module, data: Data) -> tuple[Tensor, Tensor]:
    """Return outputs and targets of the whole test set."""
    parts = data.inputs.tensor_split(-(-len(data) // 250))
    return torch.cat([_outputs(task, model, part) for part in parts]), data.targets


def _number(
    task: Task, what: str, measure: Measure, outputs: Tensor, targets: Tensor, expected: str
) -> float:
    value = _tried(task, what, lambda: measure(outputs, targets))
    if isinstance(value, complex) or (isinstance(value, Tensor) and value.is_complex()):
        raise _broken(task, what, "a complex number", expected)
    if not isinstance(value, (numbers.Real, np.bool_)) and not (
        isinstance(value, Tensor) and value.numel() == 1
    ):
        raise _broken(task, what, _kind(value), expected)
    return float(value)


def _outputs(task: Task, model: nn.Module, inputs: Tensor) -> Tensor:
    outputs = _tried(task, f"model()(inputs {_kind(inputs)})", lambda: model(inputs))
    if not isinstance(outputs, Tensor) or not outputs.numel():
        raise _broken(task, "model()(inputs)", _kind(outputs), "a tensor of outputs")
    return outputs


def _labels(task: Task, split: str, targets: Tensor, outputs: Tensor) -> None:
    """Cross-entropy of a label without an output fails in whichever round first meets it, so that all labels are looked at before."""
    if (
        task.loss is not F.cross_entropy
        or outputs.ndim != 2
        or targets.ndim != 1
        or targets.is_floating_point()
    ):
        return
    low, high = (int(limit) for limit in targets.aminmax())
    classes = outputs.shape[1]
    if low < 0 or high >= classes:
        raise _broken(
            task,
            f"{split}().targets",
            f"labels from {low} to {high}",
            f"0 to {classes - 1}, as the model has {classes} outputs",
        )


def _tried(task: Task, what: str, run: Callable[[], T]) -> T:
    try:
        return run()
    except (FedcompError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise out_of_memory(error) or TaskError(
            f"task '{task.name}': {what} failed: {describe(error)}; correct the task, or {SEE_TRACEBACK}"
        ) from error


def _broken(task: Task, what: str, found: str, expected: str) -> TaskError:
    return TaskError(f"task '{task.name}': {what} gave {found}; expected {expected}")


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    sparse = "" if value.layout == torch.strided else "sparse "
    return f"{sparse}{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
