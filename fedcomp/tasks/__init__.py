"""Tasks by name: built in, of another package, or a user's own as path/file.py:name."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..errors import TaskError, nearest
from ..plugins import PluginRegistry
from . import user
from .augment import Augmentation
from .base import Task, initial_model, share_correct
from .data import Data, LazyData

__all__ = [
    "Augmentation",
    "Data",
    "LazyData",
    "OBJECT",
    "Task",
    "available_tasks",
    "initial_model",
    "load",
    "share_correct",
]

_TASKS: PluginRegistry[Task | Callable[..., Task]] = PluginRegistry(
    __name__, "fedcomp.tasks", lambda value: callable(value) or isinstance(value, Task)
)


def available_tasks() -> dict[str, Callable[[Path | None], Task]]:
    """Return the tasks that have a name, those of other packages included: name → function from the data folder, or None, to the Task."""
    return {name: partial(load, name) for name in _TASKS}


OBJECT = "object:"  # in the options of a run whose task was an object, before its name


def load(name: str, data: Path | None = None) -> Task:
    """Return the task that `--task` names. Its data is read when it is asked for, and a missing folder is an error then.

    Raises TaskError on an unknown name or a file that gives no task, and for one that was an object of a Python program.
    """
    if name.startswith(OBJECT):
        raise TaskError(
            f"the task '{name.removeprefix(OBJECT)}' is an object of a Python program, where simulate(task, …) and "
            "run.model(task) take it; for other programs put it into a file, and give path/file.py:name"
        )
    if ":" in name or name.endswith(".py"):
        return user.load(name, data)
    if name not in _TASKS:
        raise TaskError(
            f"unknown task '{name}'; {nearest(name, _TASKS)}, or your own as path/file.py:name"
        )
    return user.task_of(_TASKS[name], data, name)
