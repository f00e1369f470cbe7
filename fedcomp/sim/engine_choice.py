"""The choice of the training engine (serial, batched, processes or ray) by task, model and device."""

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
from ..training.engine import Engine, Job, SequentialJobs
from ..training.local_sgd import LocalSGD, plan_batches
from ..training.own_loop import client_engine
from .batched import BatchedEngine, NotBatchable
from .batched.gradients import RANDOM
from .multi_device import MultiDevice
from .processes import WorkerEngine, unbatched_engine
from .ray_engine import RayEngine

# Limit for the weights and activations of clients that a CPU trains together. It is about the size of the CPU's caches.
CPU_BYTES = 8 << 20
CPU_WEIGHTS_BYTES = 64 << 20  # limit for the weights of clients that a CPU trains together
# On a CPU, multilayer perceptrons of more parameters are trained one by one, because the weights of several clients do not fit into the
# caches. With 0.8 million parameters, training 16 clients together takes 1.2 to 1.7 times as long as training them one by one.
CPU_PERCEPTRON = 300_000
CUDA_MEMORY_FRACTION = 1 / 4  # fraction of a GPU's memory for clients that are trained together
# From this number of parameters, one process with all cores is faster than several processes (benchmarks/large_models.py).
LARGE_PARAMETERS = 32_000_000
MAP_POSITIONS = 256  # assumed height × width of a convolution's output
TRIAL_BATCHES = 3  # local steps of the trial that tests whether the batched engine supports a model
# In config.toml, the table [resolved] has the placement of clients' vectors (placement.py) under this key. A resumed run ignores the value
# and chooses the placement again.
PLACEMENT_KEY = "residuals"
ENGINES = {
    "serial": "serial",
    "batched": "batched, {} clients at once",
    "processes": "processes, {} at once",
    "ray": "ray, {} actors",
}


@dataclass(frozen=True)
class EngineChoice:
    """An engine and its device. The choice is stored in config.toml, so that a resumed run uses the same engine."""

    device: str  # description, such as "cpu (2 threads)"
    engine: str  # a key of ENGINES
    at_once: int  # number of clients that are trained at once

    @classmethod
    def read(cls, values: Any, folder: Path) -> "EngineChoice":
        """Return the choice from `values`, the table [resolved] of config.toml. Raises RunFolderError if a value is missing or wrong."""
        types = {f.name: f.type for f in dataclasses.fields(cls)}
        stored = values if isinstance(values, dict) else {}
        fields = {name: value for name, value in stored.items() if name != PLACEMENT_KEY}
        valid = {name: type(value) for name, value in fields.items()} == types
        if not valid or fields["engine"] not in ENGINES or fields["at_once"] < 1:
            raise RunFolderError(
                f"the table [resolved] in {folder / RUN_FILE} is damaged; start a new run with another --out"
            )
        return cls(**fields)

    @classmethod
    def choose(
        cls, config: RunConfig, task: Task, data: Examples, model: nn.Module, device: torch.device
    ) -> "EngineChoice":
        """Choose the engine for a run. Raises ConfigError if the engine that --engine names cannot be used."""
        if config.engine not in ("auto", "batched") and config.cohort_batch > 1:
            raise ConfigError(
                f"--cohort-batch {config.cohort_batch} has no effect with --engine {config.engine}; leave --cohort-batch out, or give "
                "--engine batched"
            )
        if config.engine == "processes":
            if device.type != "cpu":
                raise ConfigError(
                    f"--engine processes trains on a CPU, but the device of this run is {device}; give --device cpu, or another engine"
                )
            return cls(devices.describe(device), "processes", torch.get_num_threads())
        if config.engine in ("serial", "ray"):
            # The number of Ray actors is set later, after Ray has started.
            return cls(devices.describe(device), config.engine, 1)
        obstacle = batching_obstacle(config, task, data, model)
        if config.engine == "batched" and obstacle:
            raise ConfigError(
                f"--engine batched does not support {obstacle}; give --engine {unbatched_engine(device)}"
            )
        if config.engine == "auto" and unbatched_reason(config, task, data, model, device):
            return cls.unbatched(model, device, config)
        at_once = clients_at_once(model, device, largest_batch(config))
        if config.engine == "batched":
            at_once = max(at_once, 2)
        return cls(devices.describe(device), "batched", config.cohort_batch or at_once)

    @classmethod
    def unbatched(cls, model: nn.Module, device: torch.device, config: RunConfig) -> "EngineChoice":
        """Choose between the engines that train each client separately: serial and processes."""
        # Worker processes cannot load a task that is a Python object.
        is_serial = config.task.startswith(OBJECT) or _is_large(model)
        engine = "serial" if is_serial else unbatched_engine(device)
        at_once = torch.get_num_threads() if engine == "processes" else 1
        return cls(devices.describe(device), engine, at_once)

    def __str__(self) -> str:
        return ENGINES[self.engine].format(self.at_once)


def engine_reason(
    config: RunConfig, task: Task, data: Examples, model: nn.Module, device: torch.device
) -> str:
    """Return the reason for the choice of --engine auto, or "" if --engine names an engine."""
    if config.engine != "auto":
        return ""
    if reason := unbatched_reason(config, task, data, model, device):
        if device.type == "cpu" and _is_large(model):
            return (
                "one process with all cores is faster for models of 32 million parameters or more"
            )
        return reason
    if device.type == "cuda":
        return "the GPU's memory holds several clients"
    return "all weights are in Linear and Embedding layers"


def unbatched_reason(
    config: RunConfig, task: Task, data: Examples, model: nn.Module, device: torch.device
) -> str:
    """Return the reason why --engine auto does not choose the batched engine, or "" if it chooses this engine.

    On CUDA, the batched engine is chosen if two clients fit into a quarter of the memory. On a CPU, it is chosen if all parameters are in
    nn.Linear and nn.Embedding layers, except for large multilayer perceptrons.
    """
    if obstacle := batching_obstacle(config, task, data, model):
        return f"the batched engine does not support {obstacle}"
    if device.type == "cuda":
        several = clients_at_once(model, device, largest_batch(config)) > 1
        return "" if several else "two clients do not fit into a quarter of the GPU's memory"
    if not _is_dense(model):
        return "on a CPU, the batched engine is used only for Linear and Embedding layers"
    slower = "on a CPU, the batched engine is slower for large models of Linear layers"
    return slower if _is_large_perceptron(model) else ""


def batching_obstacle(config: RunConfig, task: Task, data: Examples, model: nn.Module) -> str:
    """Return an option or part of the task, such as "--optimizer adamw", that the batched engine does not support, or "" if none."""
    sgd = LocalSGD.from_config(config)
    obstacles = {
        "a train_fn": task.train_fn is not None,
        "the task's own optimizer": task.optimizer is not None,
        f"--optimizer {config.optimizer}": not read_optimizer(config.optimizer).is_plain_sgd,
        "--accumulate, --step-schedule or float16": not sgd.uses_descend,
        "data that is read batch by batch": isinstance(data, LazyData),
        "several model inputs": isinstance(data, Data) and not isinstance(data.inputs, Tensor),
    }
    applying = (obstacle for obstacle, applies in obstacles.items() if applies)
    return next(applying, "") or next(filter(None, map(_obstacle, model.modules())), "")


def make_engine(
    devices: Sequence[torch.device],
    choice: EngineChoice,
    config: RunConfig,
    task: Task,
    model: nn.Module,
    warn: Callable[[str], None],
) -> Engine:
    """Create the chosen engine, which takes ownership of `model`. Raises ConfigError if `devices` are several and the engine needs one."""
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
        layout = Layout.of(model)
        return BatchedEngine(task, model, layout, device, choice.at_once, warn=warn)
    if choice.engine == "ray":
        return RayEngine(config, device)
    # Ignore choice.at_once, since a resumed run may have another number of cores. The results do not depend on the number of workers.
    count, is_auto = torch.get_num_threads(), config.engine == "auto"
    return WorkerEngine(config, task, model, count, local_training=is_auto, warn=warn)


def batching_error(
    engine: Engine, weights: Tensor, data: Examples, sgd: LocalSGD, shard: np.ndarray
) -> NotBatchable | None:
    """Train one client on a few batches of `shard` as a trial. Return the error if the model cannot be batched, else None."""
    engine = engine.engines[0] if isinstance(engine, MultiDevice) else engine
    if not isinstance(engine, BatchedEngine) or not isinstance(data, Data):
        return None
    job = Job(0, 0, plan_batches(sgd, shard, 0, 0, 0)[:TRIAL_BATCHES])
    try:
        engine.train_together(weights, data, [job], dataclasses.replace(sgd, augment=False), 0)
    except NotBatchable as error:
        return error
    except (Exception, SystemExit):  # not a batching error; the first round will report it
        pass
    return None


def _is_large(model: nn.Module) -> bool:
    return sum(p.numel() for p in model.parameters()) >= LARGE_PARAMETERS


def _is_dense(model: nn.Module) -> bool:
    return all(
        isinstance(m, nn.Linear | nn.Embedding)
        for m in model.modules()
        if list(m.parameters(recurse=False))
    )


def _is_large_perceptron(model: nn.Module) -> bool:
    """Return whether a model has several Linear layers, no Embedding, and more than CPU_PERCEPTRON parameters."""
    layers = [m for m in model.modules() if list(m.parameters(recurse=False))]
    linear = len(layers) > 1 and all(isinstance(m, nn.Linear) for m in layers)
    return linear and sum(p.numel() for p in model.parameters()) > CPU_PERCEPTRON


def _obstacle(module: nn.Module) -> str:
    """Return a description of a layer that the batched engine does not support, or "" if it supports the layer."""
    name = type(module).__name__
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return f"the recurrent layer {name}"
    rate = getattr(module, "dropout", 0.0)
    if isinstance(module, RANDOM) or (isinstance(rate, float) and rate > 0):
        return f"{name}, which draws random numbers"
    if getattr(module, "running_mean", None) is not None:
        return f"{name}, which keeps running statistics"
    if isinstance(module, nn.Embedding) and (module.sparse or module.max_norm is not None):
        return f"an {name} that has sparse gradients or max_norm"
    return ""


def clients_at_once(model: nn.Module, device: torch.device, batch_size: int) -> int:
    """Estimate how many clients fit into a quarter of a GPU's memory, or into a CPU's caches."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    widths = sum(sum(p.shape[:2]) * (MAP_POSITIONS if p.dim() > 2 else 1) for p in weights)
    weights_bytes = 4 * sum(p.numel() for p in model.parameters())
    # Training one client needs four vectors of the model's size, and the activations of all layers in float32.
    client_bytes = 4 * weights_bytes + 4 * batch_size * widths
    if device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        return max(1, int(total_bytes * CUDA_MEMORY_FRACTION / client_bytes))
    at_once = max(1, int(CPU_BYTES / client_bytes))
    if not _is_dense(model):
        return at_once
    # With few clients at once, the batched engine is not faster than the serial engine. Therefore train up to 16 clients at once even if
    # they exceed CPU_BYTES, as long as their weights alone do not exceed CPU_WEIGHTS_BYTES.
    return max(at_once, min(16, CPU_WEIGHTS_BYTES // max(1, weights_bytes)))
