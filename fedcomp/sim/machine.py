"""What a run decides for the machine that it is on: the engine, and how much it does at once."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..config import RUN_FILE, RunConfig, data_folder, largest_batch
from ..errors import ConfigError, RunFolderError
from ..layout import Layout
from ..tasks import OBJECT
from ..tasks.base import Data, Task
from ..training import devices
from ..training.batches import plan_batches
from ..training.engine import Engine, OneByOne, one_at_a_time
from ..training.local_sgd import LocalSGD
from .batched import BatchedEngine, NotMapped, choose_engine, unbatched
from .batched.room import CudaMeter, Meter, fitting
from .engines import Together
from .multi_device import Later, MultiDevice
from .processes import possible
from .ray_engine import RayEngine
from .workers import WorkerEngine

TRIED = 3  # batches, before the first round
HOME = "residuals"  # in [resolved]: the placement of clients on this machine, chosen anew by a resumed run
SAID = {
    "serial": "serial",
    "batched": "batched, {} clients at once",
    "processes": "processes, {} at once",
    "ray": "ray, {} actors",
}


@dataclass(frozen=True)
class Machine:
    """What was decided for this machine; recorded in config.toml, kept by a resumed run."""

    device: str
    engine: str
    at_once: int  # clients

    @classmethod
    def stored(cls, values: Any, folder: Path) -> "Machine":
        """Of a run folder's config.toml. Raises RunFolderError unless it is what was written there."""
        kinds = {f.name: f.type for f in dataclasses.fields(cls)}
        values = (
            {name: value for name, value in values.items() if name != HOME}
            if isinstance(values, dict)
            else values
        )
        whole = (
            isinstance(values, dict)
            and {name: type(value) for name, value in values.items()} == kinds
        )
        if not whole or values["engine"] not in SAID or values["at_once"] < 1:
            raise RunFolderError(
                f"[resolved] in {folder / RUN_FILE} is damaged; start a new run with another --out"
            )
        return cls(**values)

    @classmethod
    def chosen(cls, config: RunConfig, model: nn.Module, device: torch.device) -> "Machine":
        """By a rule on model and device. Raises ConfigError for an engine that was asked for and cannot be."""
        if config.engine not in ("auto", "batched") and config.cohort_batch > 1:
            raise ConfigError(
                "--cohort-batch is for the batched engine; leave it out, or give --engine batched"
            )
        if config.engine == "processes":
            return cls._processes(config, device)
        if config.engine == "ray":
            return cls(
                devices.name(device), "ray", 1
            )  # as many as there are actors, once they have begun
        engine, at_once = choose_engine(model, device, config.engine, largest_batch(config))
        if engine == "serial" and config.engine == "auto":
            return cls.unbatched(device, config)
        return cls(devices.name(device), engine, config.cohort_batch or at_once)

    @classmethod
    def unbatched(cls, device: torch.device, config: RunConfig) -> "Machine":
        """For a model that is not batched. Other processes load the task by its name."""
        engine = "serial" if config.task.startswith(OBJECT) else unbatched(device)
        return cls(
            devices.name(device), engine, torch.get_num_threads() if engine == "processes" else 1
        )

    @classmethod
    def _processes(cls, config: RunConfig, device: torch.device) -> "Machine":
        if device.type != "cpu":
            raise ConfigError(
                "--engine processes is for the cores of a CPU; give --device cpu as well, or another engine"
            )
        if lacks := possible():
            raise ConfigError(f"--engine processes needs {lacks}; give --engine serial")
        return cls(devices.name(device), "processes", torch.get_num_threads())

    def __str__(self) -> str:
        return SAID[self.engine].format(self.at_once)


def engine_of(
    machine: Machine,
    config: RunConfig,
    task: Task,
    model: nn.Module,
    layout: Layout,
    device: torch.device,
    warn: Callable[[str], None],
    instead: Callable[[NotMapped], Engine] | None = None,
) -> Engine:
    """The engine of a machine; it takes `model` over. `instead`: what a batched one makes when it meets what cannot be mapped."""
    if machine.engine == "serial":
        return OneByOne(one_at_a_time(task, model, layout, device))
    if machine.engine == "batched":
        return Together(
            BatchedEngine(task, model, layout, device, machine.at_once, warn=warn), instead
        )
    if machine.engine == "ray":
        return RayEngine(config, device)
    if lacks := possible():
        raise ConfigError(
            f"this run's clients are trained in worker processes, which need {lacks}; start a new one with --engine serial"
        )
    # A core less or more than where the run began changes nothing but the time that it takes.
    return WorkerEngine(
        task,
        model,
        layout,
        config.task,
        data_folder(config),
        config.seed,
        torch.get_num_threads(),
        helps=config.engine == "auto",
        warn=warn,
    )


def engine_on(
    devices: Sequence[torch.device],
    machine: Machine,
    config: RunConfig,
    task: Task,
    model: nn.Module,
    layout: Layout,
    warn: Callable[[str], None],
    instead: Callable[[NotMapped], Engine] | None = None,
) -> Engine:
    """`engine_of` on one device, or on several at once, where there is none `instead`.

    Raises ConfigError where several are asked for what is not batched.
    """
    if len(devices) == 1:
        return engine_of(machine, config, task, model, layout, devices[0], warn, instead)
    if machine.engine != "batched":
        raise ConfigError(
            f"--device {config.device}: several devices are for the batched engine, and this run has {machine.engine}; "
            f"give --device {devices[0]}"
        )
    models, later = [model, *(copy.deepcopy(model) for _ in devices[1:])], Later(warn)
    engines = [
        engine_of(machine, config, task, each, layout, device, later.say)
        for each, device in zip(models, devices, strict=True)
    ]
    return MultiDevice(engines, later.hear)


def measured(
    machine: Machine,
    config: RunConfig,
    engine: Engine,
    weights: Tensor,
    data: Data,
    meter: Meter | None = None,
) -> Machine:
    """With as many clients at once as the device was measured to have room for, where nobody chose a number."""
    engines = engine.engines if isinstance(engine, MultiDevice) else [engine]
    first = engines[0]
    if meter is None and first.device.type == "cuda":
        meter = CudaMeter(first.device)
    if meter is None or not isinstance(first, Together) or config.cohort_batch:
        return machine
    sgd = dataclasses.replace(LocalSGD.from_config(config), batch_size=largest_batch(config))
    at_once = fitting(first.engine, weights.to(first.device), data, sgd, meter)
    for each in engines:
        each.engine.at_once = at_once
    return dataclasses.replace(machine, at_once=at_once)


def cannot_map(
    engine: Engine, weights: Tensor, data: Data, sgd: LocalSGD, shard: np.ndarray
) -> NotMapped | None:
    """Why the model cannot be batched, as a client with the examples of `shard` shows in its first steps; None where it can be."""
    engine = engine.engines[0] if isinstance(engine, MultiDevice) else engine
    if not isinstance(engine, Together):
        return None
    try:
        engine.engine.train(
            weights,
            data,
            [plan_batches(sgd, shard, 0, 0, 0)[:TRIED]],
            dataclasses.replace(sgd, augment=False),
        )
    except NotMapped as error:
        return error
    except (
        Exception,
        SystemExit,
    ):  # of the user's model on these examples: a client's failure, in its round
        return None
    return None
