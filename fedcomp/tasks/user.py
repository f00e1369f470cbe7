"""Loading of a user's own task, given as path/file.py:name.

The folder of the task file is put first on `sys.path`, as for a script, so that the task can import other modules in this folder. Each call
of `load` executes the task file again. The modules that the file imports are executed only once in a process. A second task file could
therefore get a module from the folder of the first. To prevent this, `load` raises TaskError if the second folder contains a module of the
same name.
"""

import hashlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import TaskError, nearest
from .base import Task, accepts, seeded_globals
from .user_errors import GIVE_FOLDER, task_errors

IMPORT_SEED = 0  # seed of the global random generators while a task file is imported

_TASK_FOLDERS: set[str] = set()  # folders of the task files that this process has loaded


def load(text: str, data: Path | None) -> Task:
    """Return the task that `text`, such as path/file.py:name, names. The file is executed with the same random seed every time.

    In the file, `name` is a Task, or a callable that returns a Task. If the callable takes an argument, it is called with the data folder.
    If the file's code raises an exception, TaskError is raised instead, unless the exception is a FedcompError.
    """
    file, _, name = text.rpartition(":")
    if text.endswith(".py"):
        file, name = text, ""
    elif not file or not name.isidentifier():
        raise TaskError(f"--task {text} does not name a task in the file; give path/file.py:name")
    path = Path(file).expanduser().absolute()
    try:
        exists = path.is_file()
    except PermissionError as error:
        raise TaskError(
            f"--task {text}: no permission to enter the folder of {path}; change its permissions"
        ) from error
    if not exists:
        raise TaskError(f"--task {text}: the file {path} does not exist; give path/file.py:name")
    with seeded_globals(IMPORT_SEED):
        module = _module(path, text)
        names = _names(module)
        if not name:
            give = " or ".join(f"{file}:{key}" for key in names or ["name"])
            raise TaskError(f"--task {text} does not name a task in the file; give {give}")
        if not hasattr(module, name):
            fix = nearest(name, names) if names else "define it there"
            raise TaskError(f"--task {text}: the file does not define '{name}'; {fix}")
        return as_task(getattr(module, name), data, text)


def as_task(value: Any, data: Path | None, text: str) -> Task:
    """Return `value` if it is a Task, else the Task that calling `value` returns. `text` names `value` in error messages.

    Raises TaskError if the call fails or does not return a Task.
    """
    task = value if isinstance(value, Task) else _call(value, data, text)
    if not isinstance(task, Task):
        raise TaskError(
            f"--task {text} is of type {type(task).__name__}; it must be a fedcomp Task or a function that returns one"
        )
    return task


def _module(path: Path, text: str) -> ModuleType:
    """Execute a task file and return it as a module. The module is added to `sys.modules`, where dataclasses look it up."""
    name = f"fedcomp_task_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TaskError(
            f"--task {text}: {path} is not a Python file; give a file whose name ends in .py"
        )
    _add_to_path(path.resolve(), text)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with task_errors(f"--task {text}: the import", "correct it"):
        spec.loader.exec_module(module)
    return module


def _add_to_path(path: Path, text: str) -> None:
    """Put the folder of a task file first on `sys.path`.

    Raises TaskError if the folder contains a module whose name another task file has imported from its own folder.
    """
    folder = str(path.parent)
    others = _TASK_FOLDERS - {folder}
    for name, module in list(sys.modules.items()):
        loaded = getattr(module, "__file__", None) or ""
        source = loaded.removesuffix(f"{os.sep}__init__.py")
        if os.path.dirname(source) not in others or module.__name__ != name:
            continue
        if Path(folder, f"{name}.py").is_file() or Path(folder, name).is_dir():
            raise TaskError(
                f"--task {text}: the module '{name}' in the task file's folder cannot be imported, because another task of this "
                f"process has imported '{name}' from {loaded}; rename one of the modules, or use another process"
            )
    _TASK_FOLDERS.add(folder)
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]


def _names(module: ModuleType) -> list[str]:
    """Return the names of the tasks in a module. If it has none, return the names of its functions, since one may return a task."""
    values = vars(module).items()
    functions = [
        key
        for key, value in values
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    return [key for key, value in values if isinstance(value, Task)] or functions


def _call(function: Any, data: Path | None, text: str) -> Any:
    """Call `function`, with the data folder if it takes an argument. Return a value that is not callable unchanged."""
    if not callable(function):
        return function
    takes_folder = accepts(function, 1)
    if not takes_folder and not accepts(function, 0):
        raise TaskError(
            f"--task {text} cannot be called with the data folder or without arguments; define it with one parameter or none"
        )
    fix = GIVE_FOLDER if takes_folder and data is None else "correct it"
    with task_errors(f"--task {text}: the call", fix):
        return function(data) if takes_folder else function()
