"""`fedcomp.simulate`: run a simulation from Python, with options that may be Python objects."""

import dataclasses
import os
from collections.abc import Mapping
from inspect import Signature
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
import torch

from .. import spec
from ..callbacks import Callback
from ..codecs import Codec
from ..config import RunConfig, inherited_options, option_type, suggestion
from ..errors import ConfigError
from ..run_display import RunDisplay
from ..runs import Run, load
from ..sim import simulate as run_of
from ..tasks import OBJECT, Task
from .displays import open_display

LIST_OPTIONS = {"device", "bandwidths"}  # options that accept a list of values
# Each run seeds the global random generators of torch and numpy. All threads share these generators, so runs must not overlap.
_RUN_LOCK = RLock()


def _unlock_in_child() -> None:
    """Replace the lock after a fork, since a thread that holds the lock does not exist in the child process."""
    global _RUN_LOCK
    _RUN_LOCK = RLock()


os.register_at_fork(after_in_child=_unlock_in_child)


def simulate(
    task: str | Task | None = None, *, progress: bool | Callback | None = None, **options: Any
) -> Run:
    """Run a simulation, or continue the run in the folder `out` if `resume=True`. Return the finished run.

        run = fedcomp.simulate("digits", clients=50, rounds=10, uplink="stc:density=1%", out="runs/first")
        run = fedcomp.simulate(out="runs/first", resume=True, rounds=20)  # ten more rounds

    `task` is a Task, the name of a built-in task, or path/file.py:name. If `task` is None, the task is digits, or the task of the resumed
    run. A run with a Task trains in this process: the engines `processes` and `ray` are refused.

    `options` are the fields of RunConfig, which are also the options of `fedcomp sim`: `local_steps` is `--local-steps`. The value of an
    option is a Python object (number, codec, Path, torch.device), or a string as on the command line, such as "1/400". None means the
    default, or the value of the resumed run. If `task` is a Task, `optimizer` may also be a function that returns a torch optimizer for a
    model's parameters, as `Task.optimizer` does. Without `out`, the run folder is a new folder in `runs`.

    `progress` is None for a display that suits the terminal, log or notebook, False for no display, or a Callback.

    The function may be called in a running event loop and in any thread. Calls from several threads run one after the other, because a run
    seeds the global random generators of torch and numpy. Raises UserError for invalid options, and for a new run whose folder `out` is not
    empty. Raises other subclasses of FedcompError if the run fails. The message of a KeyboardInterrupt says how to continue the run.
    """
    if callable(task) and not isinstance(task, Task):
        raise ConfigError("task is a function; give the Task that it returns, or path/file.py:name")
    task_object = task if isinstance(task, Task) else None
    if callable(options.get("optimizer")):
        if task_object is None:
            raise ConfigError(
                "optimizer is a function, but task is not a Task; give a Task, or a name as optimizer, such as 'adamw'"
            )
        task_object = dataclasses.replace(task_object, optimizer=options.pop("optimizer"))
    config = run_config(task, options)
    with _RUN_LOCK, open_display(progress) as (callback, display):
        try:
            run_of(config, callback, task_object)
        except KeyboardInterrupt:
            display.on_interrupt(message := _interrupt_message(display, task_object))
            raise KeyboardInterrupt(message) from None
    return dataclasses.replace(load(display.header.out), task=task_object)


def run_config(task: str | Task | None, options: Mapping[str, Any]) -> RunConfig:
    """Return the options of a run. Raises ConfigError for invalid values and unknown options."""
    known = {f.name for f in dataclasses.fields(RunConfig)} - {"task"}
    if unknown := [name for name in options if name not in known]:
        raise ConfigError(
            f"simulate has no option '{unknown[0]}'; "
            + suggestion(unknown[0], known, otherwise="see help(fedcomp.simulate)")
        )
    values = {name: _converted(name, value) for name, value in options.items() if value is not None}
    if isinstance(task, Task):
        values["task"] = OBJECT + task.name
    elif task is not None:
        values["task"] = os.fspath(task) if isinstance(task, Path) else task
    if "local_steps" in values and values.get("local_epochs"):
        raise ConfigError("local_steps and local_epochs exclude each other; give one of them")
    if values.get("resume") and "out" in values:
        values = inherited_options(values["out"]) | values
    return RunConfig(**values)


def _converted(name: str, value: Any) -> Any:
    """Convert an option's value to the type of its RunConfig field. Return a value of another type as it is; RunConfig refuses it."""
    if isinstance(value, list | tuple):
        if name not in LIST_OPTIONS:
            raise ConfigError(
                f"{name} has {len(value)} values, but a run takes only one; call simulate once for each value"
            )
        return ",".join(str(_converted(name, item)) for item in value)
    kind = option_type(name)
    if isinstance(value, np.generic) or isinstance(value, torch.Tensor) and value.ndim == 0:
        value = value.item()
    if isinstance(value, Path):
        return os.fspath(value)
    if isinstance(value, Codec | torch.device):
        return str(value)
    if kind is str and type(value) in (int, float):
        return f"{value:.17g}" if isinstance(value, float) else str(value)
    if kind is not str and isinstance(value, str):
        return spec.convert(value, kind, name)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _interrupt_message(display: RunDisplay, task: Task | None) -> str:
    if not display.has_started:
        return "interrupted before the run began"
    arguments = f"{'task, ' if task else ''}out={display.header.out!r}, resume=True"
    return f"interrupted {display.reached}; continue with: fedcomp.simulate({arguments})"


def _signature() -> Signature:
    """Return the signature of `simulate` with every option as a parameter, for help() and code completion."""
    task, progress, _ = Signature.from_callable(simulate).parameters.values()
    fields = Signature.from_callable(RunConfig).parameters.values()
    options = [p.replace(kind=p.KEYWORD_ONLY) for p in fields if p.name != "task"]
    return Signature([task, progress, *options], return_annotation=Run)


vars(simulate)["__signature__"] = _signature()
