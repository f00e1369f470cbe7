"""The choices of a run for its machine: the engine, and the number of clients that are trained at once."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..config import RUN_FILE, RunConfig, largest_batch
from ..errors import ConfigError, RunFolderError
from ..layout import Layout
from ..local_optimizer import read as read_optimizer
from ..tasks import OBJECT
from ..tasks.base import Task
from ..tasks.data import Examples, LazyData
from ..training import devices
from ..training.batches import plan_batches
from ..training.engine import Engine, SequentialJobs, client_engine
from ..training.local_sgd import LocalSGD
from .batched import BatchedEngine, BatchedJobs, NotMapped, choose_engine, unbatched
from .multi_device import MultiDevice
from .processes import WorkerEngine
from .ray_engine import RayEngine

TRIED = 3  # batches, before the first round
HOME = "residuals"  # in [resolved]: the placement of clients on this machine, chosen anew by a resumed run
ENGINES = {
    "serial": "serial",
    "batched": "batched, {} clients at once",
    "processes": "processes, {} at once",
    "ray": "ray, {} actors",
}


@dataclass(frozen=True)
class Machine:
    """The choices for this machine, recorded in config.toml and kept by a resumed run."""

    device: str
    engine: str
    at_once: int  # clients

    @classmethod
    def stored(cls, values: Any, folder: Path) -> "Machine":
        """Return the machine in a run folder's config.toml. Raises RunFolderError if it is damaged."""
        kinds = {f.name: f.type for f in dataclasses.fields(cls)}
        stored = values if isinstance(values, dict) else {}
        found = {name: value for name, value in stored.items() if name != HOME}
        whole = {name: type(value) for name, value in found.items()} == kinds
        if not whole or found["engine"] not in ENGINES or found["at_once"] < 1:
            raise RunFolderError(
                f"[resolved] in {folder / RUN_FILE} is damaged; start a new run with another --out"
            )
        return cls(**found)

    @classmethod
    def chosen(
        cls, config: RunConfig, task: Task, data: Examples, model: nn.Module, device: torch.device
    ) -> "Machine":
        """Choose by a rule on task, model and device. Raises ConfigError for an engine that was asked for and is impossible."""
        if config.engine not in ("auto", "batched") and config.cohort_batch > 1:
            raise ConfigError(
                "--cohort-batch is for the batched engine; leave it out, or give --engine batched"
            )
        if config.engine == "processes":
            if device.type != "cpu":
                raise ConfigError(
                    "--engine processes is for the cores of a CPU; give --device cpu as well, or another engine"
                )
            return cls(devices.describe(device), "processes", torch.get_num_threads())
        if config.engine == "ray":
            return cls(
                devices.describe(device), "ray", 1
            )  # the number of actors, once they have started
        if why := not_together(config, task, data):
            if config.engine == "batched":
                raise ConfigError(
                    f"--engine batched cannot train {why}; give --engine {unbatched(device)}"
                )
            return cls.unbatched(device, config)
        engine, at_once = choose_engine(model, device, config.engine, largest_batch(config))
        if engine == "serial" and config.engine == "auto":
            return cls.unbatched(device, config)
        return cls(devices.describe(device), engine, config.cohort_batch or at_once)

    @classmethod
    def unbatched(cls, device: torch.device, config: RunConfig) -> "Machine":
        """Choose for a model that is not batched. Other processes can only load a task by its name."""
        engine = "serial" if config.task.startswith(OBJECT) else unbatched(device)
        return cls(
            devices.describe(device),
            engine,
            torch.get_num_threads() if engine == "processes" else 1,
        )

    def __str__(self) -> str:
        return ENGINES[self.engine].format(self.at_once)


def not_together(config: RunConfig, task: Task, data: Examples) -> str:
    """Return what keeps clients from being trained together in one batch, such as "with adamw"; "" if nothing does."""
    sgd = LocalSGD.from_config(config)
    obstacles = {
        "by a train_fn": task.train_fn is not None,
        "with an optimizer of the task's own": task.optimizer is not None,
        f"with --optimizer {config.optimizer}": not read_optimizer(config.optimizer).plain_sgd,
        "with --accumulate, --step-schedule or float16": not sgd.plain,
        "on data that is read batch by batch": isinstance(data, LazyData),
        "on several inputs": not data.plain,
    }
    return next((why for why, found in obstacles.items() if found), "")


def engine_on(
    devices: Sequence[torch.device],
    machine: Machine,
    config: RunConfig,
    task: Task,
    model: nn.Module,
    warn: Callable[[str], None],
) -> Engine:
    """Return the engine of a machine; it takes `model` over. Raises ConfigError for several devices unless the engine is batched."""
    if len(devices) > 1:
        if machine.engine != "batched":
            raise ConfigError(
                f"--device {config.device}: several devices are for the batched engine, and this run has {machine.engine}; "
                f"give --device {devices[0]}"
            )
        warnings: list[str] = []
        engines = [
            engine_on([device], machine, config, task, copy.deepcopy(model), warnings.append)
            for device in devices
        ]
        return MultiDevice(engines, warnings, warn)
    [device] = devices
    if machine.engine == "serial":
        return SequentialJobs(client_engine(task, model, Layout.of(model), device))
    if machine.engine == "batched":
        return BatchedJobs(
            BatchedEngine(task, model, Layout.of(model), device, machine.at_once, warn=warn)
        )
    if machine.engine == "ray":
        return RayEngine(config, device)
    # A resumed run may have another number of cores, on which the results do not depend.
    return WorkerEngine(
        config,
        task,
        model,
        torch.get_num_threads(),
        local_training=config.engine == "auto",
        warn=warn,
    )


def cannot_map(
    engine: Engine, weights: Tensor, data: Examples, sgd: LocalSGD, shard: np.ndarray
) -> NotMapped | None:
    """Train a client on the first batches of `shard`. Return why the model cannot be batched, None if it can."""
    engine = engine.engines[0] if isinstance(engine, MultiDevice) else engine
    if not isinstance(engine, BatchedJobs):
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
    except (Exception, SystemExit):  # of the user's model: the client will fail in its round
        pass
    return None
