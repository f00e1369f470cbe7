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
from .augment import Augmentation
from .base import Measure, Task, initial_model, predictions, share_correct
from .data import FORMS, Batch, Data, Examples, LazyData, non_finite, tensors
from .running_statistics import recalibrated
from .user_errors import SEE_TRACEBACK, describe, out_of_memory

T = TypeVar("T")
TAKEN = {f.name for f in dataclasses.fields(RoundRecord)}  # names of numbers of a round
PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of what is trained


def check(
    task: Task,
    batch_size: int,
    train: Examples | None = None,
    test: Examples | None = None,
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
        if augment and task.augment is not None:
            _check_augmentation(task, task.augment, train)
        _step(task, model, train, min(2, batch_size, len(train)))
        _evaluation(task, model, test)
    return layout


def layout_of(task: Task) -> Layout:
    """Return the layout of a task's model, without its data. Raises TaskError for a model that cannot be trained."""
    with torch.random.fork_rng(devices=[]):
        return Layout.of(_model(task))


def changing_buffers(task: Task, model: nn.Module, train: Examples) -> list[str]:
    """Return the names of buffers that training changes and the server does not recalibrate, such as those of spectral normalization.

    Buffers are not sent: the server keeps the initial values of these. `model` is one of the task's; it is left in eval mode.
    """
    layers = recalibrated(model)
    names = [name for name, _ in model.named_buffers() if name.rpartition(".")[0] not in layers]
    if not names or task.train_fn is not None:
        return []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        trained = _model(task).train()
        buffers = dict(trained.named_buffers())
        before = {name: buffers[name].clone() for name in names}
        batch = _first(task, "train", train).to("cpu")
        _tried(task, "model()(inputs)", lambda: task.outputs(trained, batch))
        buffers = dict(trained.named_buffers())
        return [name for name in names if not _same(before[name], buffers[name])]


def data_of(task: Task, split: str) -> Examples:
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


def _valid(task: Task, split: str, data: Any) -> Examples:
    if not isinstance(data, Data | LazyData):
        raise _broken(task, f"{split}()", _kind(data), FORMS)
    if isinstance(data, LazyData):
        if not len(data):
            raise _broken(task, f"{split}()", "no examples", "at least one")
        return data
    parts = {f"inputs{place}": value for place, value in _named(data.inputs).items()}
    parts["targets"] = data.targets
    for part, value in parts.items():
        if not isinstance(value, Tensor) or not value.ndim or value.layout != torch.strided:
            raise _broken(
                task,
                f"{split}().{part}",
                _kind(value),
                "a tensor with an example in each row, not sparse",
            )
    if not len(data):
        raise _broken(task, f"{split}()", "no examples", "at least one")
    for part, value in parts.items():
        if len(value) != len(data.targets):
            raise _broken(
                task,
                f"{split}()",
                f"{len(value)} {part} and {len(data.targets)} targets",
                "as many of one as of the other",
            )
    return data


def _named(inputs: Any) -> dict[str, Any]:
    """Return the parts of a data set's inputs by what stands behind `inputs` for each: "" for a single one."""
    if isinstance(inputs, dict):
        return {f"[{name!r}]": value for name, value in inputs.items()}
    if isinstance(inputs, tuple):
        return {f"[{place}]": value for place, value in enumerate(inputs)}
    return {"": inputs}


def _first(task: Task, split: str, data: Examples, count: int = 2) -> Batch:
    """Return the first examples. Raises TaskError where they cannot be read."""
    rows = torch.arange(min(count, len(data)), device=data.device)
    return _tried(task, f"the first examples of {split}", lambda: data.batch(rows))


def _check_augmentation(task: Task, augment: Augmentation, data: Examples) -> None:
    """Augment two examples as in training."""
    inputs, plan = _first(task, "train", data).inputs, [np.arange(min(2, len(data)))]
    if not isinstance(inputs, Tensor):
        raise _broken(task, "train()", "several inputs", "one tensor, which --augment changes")
    drawn = _tried(task, "augment.draw(generator, count)", lambda: augment.draw_for(plan, 0, 1, 0))
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
        lambda: augment.apply(inputs, torch.from_numpy(drawn)),
    )
    if _kind(changed) != _kind(inputs):
        raise _broken(task, "augment.apply(inputs, drawn)", _kind(changed), _kind(inputs))


def _step(task: Task, model: nn.Module, data: Examples, count: int) -> None:
    """A forward and backward pass in training."""
    if task.train_fn is not None:
        return
    batch = _first(task, "train", data, count)
    outputs = _outputs(task, model.train(), batch)
    _labels(task, "train", data, outputs)
    loss = _tried(task, "loss(outputs, targets)", lambda: task.loss_of(outputs, batch.targets))
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


def _evaluation(task: Task, model: nn.Module, data: Examples) -> None:
    """Loss, accuracy and metrics as the server computes them, on two examples."""
    if task.evaluate_fn is not None:
        return
    with torch.inference_mode():
        batch = _first(task, "test", data)
        whole = _outputs(task, model.eval(), batch)
        _labels(task, "test", data, whole)
        outputs, targets = predictions(whole), batch.targets
        if task.accuracy is share_correct and (
            not isinstance(targets, Tensor) or targets.is_floating_point()
        ):
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
        _tried(
            task, "loss(outputs, targets) on test()", lambda: float(task.loss_of(whole, targets))
        )
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


def _whole(task: Task, model: nn.Module, data: Examples) -> tuple[Tensor, Tensor]:
    """Return outputs and targets of the whole test set."""
    pairs = [(predictions(_outputs(task, model, b)), b.targets) for b in data.batches(250)]
    outputs, targets = zip(*pairs, strict=True)
    return torch.cat(outputs), torch.cat(targets)


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


def _outputs(task: Task, model: nn.Module, batch: Batch) -> Any:
    """Return what the model gives for a batch: a tensor of outputs, or an object with `.logits` or `.loss`."""
    kinds = ", ".join(map(_kind, tensors(batch.inputs)))
    outputs = _tried(task, f"model()(inputs {kinds})", lambda: task.outputs(model, batch))
    found = predictions(outputs)
    if task.loss not in (None, F.cross_entropy) or task.returns_loss(outputs):
        return outputs
    if not isinstance(found, Tensor) or not found.numel():
        raise _broken(task, "model()(inputs)", _kind(outputs), "a tensor of outputs")
    return outputs


def _labels(task: Task, split: str, data: Examples, outputs: Any) -> None:
    """Raise TaskError for labels without an output, with which the cross-entropy fails in whichever round first meets them."""
    if task.criterion is not F.cross_entropy or not isinstance(data, Data):
        return
    targets = data.targets
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or targets.ndim != 1:
        return
    if targets.is_floating_point():
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
