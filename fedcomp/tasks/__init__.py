"""Lookup of tasks by name.

A name is that of a built-in task, that of a plugin's task (fedcomp/plugins.py), or path/file.py:name for a task in a user's own file.
"""

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
    __name__,
    "fedcomp.tasks",
    lambda value: isinstance(value, Task) or (callable(value) and not isinstance(value, type)),
)


def available_tasks() -> dict[str, Callable[[Path | None], Task]]:
    """Return the registered tasks by name, as functions that take the data folder or None and return the Task."""
    return {name: partial(load, name) for name in _TASKS}


# If a program passes a Task object instead of a name, the run's option --task is this prefix followed by the name of the Task.
OBJECT = "object:"


def load(name: str, data: str | Path | None = None) -> Task:
    """Return the task that `--task` names. Its data is read on first use, so a missing data folder raises an error only then.

    Raises TaskError for an unknown name, for a file that does not define the task, and for a name with the prefix OBJECT.
    """
    if name.startswith(OBJECT):
        raise TaskError(
            f"the task '{name.removeprefix(OBJECT)}' is an object of a Python program; pass it to simulate(task, …) or "
            "run.model(task), or put it into a file and give path/file.py:name"
        )
    folder = None if data is None else Path(data)
    if ":" in name or name.endswith(".py"):
        return user.load(name, folder)
    if name not in _TASKS:
        raise TaskError(
            f"--task {name}: unknown task '{name}'; {nearest(name, _TASKS)}, or give your own as path/file.py:name"
        )
    return user.as_task(_TASKS[name], folder, name)
