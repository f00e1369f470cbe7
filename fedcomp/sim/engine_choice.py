"""The engine of a run and the number of clients that are trained at once, chosen by task, model and device."""

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
from ..tasks.data import Data, Examples, LazyData
from ..training import devices
from ..training.engine import Engine, SequentialJobs
from ..training.local_sgd import LocalSGD, plan_batches
from ..training.serial_engine import client_engine
from .batched import (
    BatchedEngine,
    BatchedJobs,
    NotBatchable,
    choose_engine,
    serial_reason,
    unbatched_engine,
)
from .multi_device import MultiDevice
from .processes import WorkerEngine
from .ray_engine import RayEngine

TRIAL_BATCHES = 3  # trained before the first round
PLACEMENT_KEY = (
    "residuals"  # in [resolved]: the placement of clients; a resumed run chooses it again
)
ENGINES = {
    "serial": "serial",
    "batched": "batched, {} clients at once",
    "processes": "processes, {} at once",
    "ray": "ray, {} actors",
}


@dataclass(frozen=True)
class EngineChoice:
    """The choice of an engine, recorded in config.toml and reused by a resumed run."""

    device: str
    engine: str
    at_once: int  # clients

    @classmethod
    def read(cls, values: Any, folder: Path) -> "EngineChoice":
        """Return the choice in [resolved] of a run folder's config.toml. Raises RunFolderError if it is damaged."""
        types = {f.name: f.type for f in dataclasses.fields(cls)}
        stored = values if isinstance(values, dict) else {}
        fields = {name: value for name, value in stored.items() if name != PLACEMENT_KEY}
        valid = {name: type(value) for name, value in fields.items()} == types
        if not valid or fields["engine"] not in ENGINES or fields["at_once"] < 1:
            raise RunFolderError(
                f"[resolved] in {folder / RUN_FILE} is damaged; start a new run with another --out"
            )
        return cls(**fields)

    @classmethod
    def choose(
        cls, config: RunConfig, task: Task, data: Examples, model: nn.Module, device: torch.device
    ) -> "EngineChoice":
        """Choose by task, model and device. Raises ConfigError if the run cannot use the engine of --engine."""
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
            # `at_once` becomes the number of actors when they have started.
            return cls(devices.describe(device), "ray", 1)
        if obstacle := batching_obstacle(config, task, data):
            if config.engine == "batched":
                raise ConfigError(
                    f"--engine batched cannot train {obstacle}; give --engine {unbatched_engine(device)}"
                )
            return cls.unbatched(device, config)
        engine, at_once = choose_engine(model, device, config.engine, largest_batch(config))
        if engine == "serial" and config.engine == "auto":
            return cls.unbatched(device, config)
        return cls(devices.describe(device), engine, config.cohort_batch or at_once)

    @classmethod
    def unbatched(cls, device: torch.device, config: RunConfig) -> "EngineChoice":
        """Choose for a model that is not batched: serial for a task object, which other processes cannot load."""
        engine = "serial" if config.task.startswith(OBJECT) else unbatched_engine(device)
        return cls(
            devices.describe(device),
            engine,
            torch.get_num_threads() if engine == "processes" else 1,
        )

    def __str__(self) -> str:
        return ENGINES[self.engine].format(self.at_once)


def engine_reason(
    config: RunConfig, task: Task, data: Examples, model: nn.Module, device: torch.device
) -> str:
    """Return why --engine auto chooses its engine; "" if the engine was given."""
    if config.engine != "auto":
        return ""
    if obstacle := batching_obstacle(config, task, data):
        return f"clients cannot be batched {obstacle}"
    if reason := serial_reason(model, device, largest_batch(config)):
        return reason
    if device.type == "cuda":
        return "the GPU's memory holds several clients"
    return "all weights are in Linear and Embedding layers"


def batching_obstacle(config: RunConfig, task: Task, data: Examples) -> str:
    """Return the reason why clients cannot be trained in one batch, such as "with --optimizer adamw"; "" if they can."""
    sgd = LocalSGD.from_config(config)
    obstacles = {
        "by a train_fn": task.train_fn is not None,
        "with an optimizer of the task's own": task.optimizer is not None,
        f"with --optimizer {config.optimizer}": not read_optimizer(config.optimizer).is_plain_sgd,
        "with --accumulate, --step-schedule or float16": not sgd.uses_descend,
        "on data that is read batch by batch": isinstance(data, LazyData),
        "on several inputs": not data.has_single_input,
    }
    return next((obstacle for obstacle, applies in obstacles.items() if applies), "")


def make_engine(
    devices: Sequence[torch.device],
    choice: EngineChoice,
    config: RunConfig,
    task: Task,
    model: nn.Module,
    warn: Callable[[str], None],
) -> Engine:
    """Return the chosen engine, which takes ownership of `model`. Raises ConfigError for several devices unless it is batched."""
    if len(devices) > 1:
        if choice.engine != "batched":
            raise ConfigError(
                f"--device {config.device}: only the batched engine supports several devices, but this run uses "
                f"{choice.engine}; give --device {devices[0]}"
            )
        warnings: list[str] = []
        engines = [
            make_engine([device], choice, config, task, copy.deepcopy(model), warnings.append)
            for device in devices
        ]
        return MultiDevice(engines, warnings, warn)
    [device] = devices
    if choice.engine == "serial":
        return SequentialJobs(client_engine(task, model, Layout.of(model), device))
    if choice.engine == "batched":
        return BatchedJobs(
            BatchedEngine(task, model, Layout.of(model), device, choice.at_once, warn=warn)
        )
    if choice.engine == "ray":
        return RayEngine(config, device)
    # Not choice.at_once: a resumed run may have another number of cores. Results do not depend on it.
    return WorkerEngine(
        config,
        task,
        model,
        torch.get_num_threads(),
        local_training=config.engine == "auto",
        warn=warn,
    )


def batching_error(
    engine: Engine, weights: Tensor, data: Examples, sgd: LocalSGD, shard: np.ndarray
) -> NotBatchable | None:
    """Train a client on the first batches of `shard`. Return the error of a model that cannot be batched, None if it can."""
    engine = engine.engines[0] if isinstance(engine, MultiDevice) else engine
    if not isinstance(engine, BatchedJobs) or not isinstance(data, Data):
        return None
    try:
        engine.engine.train(
            weights,
            data,
            [plan_batches(sgd, shard, 0, 0, 0)[:TRIAL_BATCHES]],
            dataclasses.replace(sgd, augment=False),
        )
    except NotBatchable as error:
        return error
    except (Exception, SystemExit):  # from the user's model; the client will fail in its round
        pass
    return None
