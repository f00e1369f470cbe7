"""Tasks by name: built in, or a user's own as path/file.py:name."""

from collections.abc import Callable
from pathlib import Path

from ..errors import TaskError, nearest
from . import cifar10, mnist, shakespeare, user
from .augment import Augmentation
from .base import Data, Task, initial_model, share_correct
from .digits import digits

__all__ = [
    "Augmentation",
    "Data",
    "OBJECT",
    "Task",
    "available_tasks",
    "initial_model",
    "load",
    "share_correct",
]

_BUILT_IN: dict[str, Callable[[Path | None], Task]] = {
    "cifar10-resnet18": cifar10.resnet18,
    "cifar10-vgg11s": cifar10.vgg11s,
    "digits": digits,
    "mnist-cnn": mnist.cnn,
    "mnist-logreg": mnist.logreg,
    "mnist-logreg-global": mnist.logreg_global,
    "shakespeare-lstm": shakespeare.lstm,
}


def available_tasks() -> dict[str, Callable[[Path | None], Task]]:
    """The built-in tasks: name → what makes the task, given the data folder or None."""
    return dict(_BUILT_IN)


OBJECT = "object:"  # in the options of a run whose task was an object, before its name


def load(name: str, data: Path | None = None) -> Task:
    """The task that `--task` names. Its data is read when it is asked for, and a missing folder is an error then.

    Raises TaskError on an unknown name or a file that gives no task, and for one that was an object of a Python program.
    """
    if name.startswith(OBJECT):
        raise TaskError(
            f"the task '{name.removeprefix(OBJECT)}' is an object of a Python program, where simulate(task, …) and "
            "run.model(task) take it; for other programs put it into a file, and give path/file.py:name"
        )
    if ":" in name or name.endswith(".py"):
        return user.load(name, data)
    if name not in _BUILT_IN:
        raise TaskError(
            f"unknown task '{name}'; {nearest(name, _BUILT_IN)}, or your own as path/file.py:name"
        )
    return _BUILT_IN[name](data)
