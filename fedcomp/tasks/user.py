"""A user's own task, named as path/file.py:name.

The folder of the file is first on `sys.path`, as for a script, so that the task can import its neighbours. Python imports a module
once in a process: a task file is run again whenever it is loaded, its neighbours are not. Of two task files in one process whose folders
hold different modules of one name, the second cannot import its own, and `load` refuses it.
"""

import hashlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import FedcompError, TaskError, nearest
from .base import Task, seeded_globals
from .user_errors import SEE_TRACEBACK, describe, out_of_memory

DRAWN_WITH = (
    0  # seed of what a file draws as it is imported, so that every process of a run has the same
)

_FOLDERS: set[str] = set()  # of the task files that this process has loaded


def load(text: str, data: Path | None) -> Task:
    """The task that `path/file.py:name` stands for. Runs the file, in which the global generators are seeded alike every time.

    `name` is a Task, or a callable that makes one: with the data folder if it takes an argument, else without. Raises TaskError; an
    error of fedcomp's own passes through.
    """
    where, _, name = text.rpartition(":")
    if not where or not name.isidentifier():
        raise TaskError(f"--task {text} names no task in the file; write path/file.py:name")
    path = Path(where).expanduser().absolute()
    try:
        there = path.is_file()
    except PermissionError as error:
        raise TaskError(
            f"--task {text}: the folder of {path} cannot be entered; change its permissions"
        ) from error
    if not there:
        raise TaskError(f"--task {text}: there is no file {path}; write path/file.py:name")
    with seeded_globals(DRAWN_WITH):
        return task_of(_named(_module(path, text), name, text), data, text)


def task_of(found: Any, data: Path | None, text: str) -> Task:
    """Return `found` if it is a Task, else the task that it returns when called. `text` names it in errors. Raises like `load`."""
    task = found if isinstance(found, Task) else _call(found, data, text)
    if not isinstance(task, Task):
        raise TaskError(
            f"--task {text} gives {_a(task)}; it must be a fedcomp Task or a function that returns one"
        )
    return task


def _module(path: Path, text: str) -> ModuleType:
    """The file as a module, run afresh. It is known to `sys.modules`, where dataclasses look for theirs."""
    name = f"fedcomp_task_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TaskError(
            f"--task {text}: {path} is not a Python file; give one whose name ends in .py"
        )
    _import_neighbours_of(path.resolve(), text)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (FedcompError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise _failed(text, "the import", error) from error
    return module


def _import_neighbours_of(path: Path, text: str) -> None:
    """Put the folder of a task file first on `sys.path`. Raises TaskError where another task's module hides one of its modules."""
    folder = str(path.parent)
    others = _FOLDERS - {folder}
    for name, module in list(sys.modules.items()) if others else ():
        if "." in name or not (loaded := getattr(module, "__file__", None)):
            continue
        home = os.path.dirname(os.path.dirname(loaded) if hasattr(module, "__path__") else loaded)
        if home not in others or module.__name__ != name:
            continue
        if Path(folder, f"{name}.py").is_file() or Path(folder, name).is_dir():
            raise TaskError(
                f"--task {text}: another task of this process has imported '{name}' from {loaded}, which hides the module of this "
                "name beside the task file; rename one of them, or use another process"
            )
    _FOLDERS.add(folder)
    sys.path[:] = [folder, *(place for place in sys.path if place != folder)]


def _failed(text: str, what: str, error: BaseException) -> FedcompError:
    return out_of_memory(error) or TaskError(
        f"--task {text}: {what} failed: {describe(error)}; correct it, or {SEE_TRACEBACK}"
    )


def _named(module: ModuleType, name: str, text: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:
        known = [
            key
            for key, value in vars(module).items()
            if isinstance(value, Task) or _defined_in(value, module)
        ]
        raise TaskError(
            f"--task {text}: the file has no '{name}'; {nearest(name, known) if known else 'define it there'}"
        ) from None


def _defined_in(value: Any, module: ModuleType) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__


def _call(make: Any, data: Path | None, text: str) -> Any:
    if not callable(make):
        return make
    try:
        signature = inspect.signature(make)
        arguments = next(given for given in ((data,), ()) if _takes(signature, given))
    except (ValueError, StopIteration):
        raise TaskError(
            f"--task {text} cannot be called without arguments or with the data folder alone; "
            "let it take no argument or one"
        ) from None
    try:
        return make(*arguments)
    except (FedcompError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise _failed(text, "the call", error) from error


def _takes(signature: inspect.Signature, arguments: tuple[Any, ...]) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _a(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
