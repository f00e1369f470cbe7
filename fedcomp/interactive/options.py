"""Convert options that are given as Python objects to the types of RunConfig."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import spec
from ..codecs import Codec
from ..config import RunConfig, inherited_options, option_type, suggestion
from ..errors import ConfigError
from ..tasks import OBJECT, Task

LIST_OPTIONS = {"device", "bandwidths"}  # one run may have several values of these options


def run_config(task: str | Task | None, options: Mapping[str, Any]) -> RunConfig:
    """Return the options of a run. None means the default, or the value of the resumed run.

    Raises ConfigError for unknown options, with the closest name, and for invalid values.
    """
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
    """Return a value in the type of its field. RunConfig raises ConfigError for values of other types."""
    if isinstance(value, list | tuple):
        if name not in LIST_OPTIONS:
            raise ConfigError(
                f"{name} has {len(value)} values, but a run has one; call simulate once for each"
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
