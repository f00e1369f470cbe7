"""Initial weights of a run, from a safetensors file."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ..config import RunConfig, expand_home
from ..errors import ConfigError
from ..strategies import RoundStrategy
from ..tasks import Task, initial_model
from .broadcasts import Broadcasts
from .run_folder import CHECKPOINT, RunFolder


def load_weights(path: Path, model: nn.Module) -> None:
    """Load the tensors of a safetensors file into a model. Frozen parameters and buffers may be missing from the file.

    Raises ValueError if the file cannot be read or does not fit the model. Callers must put the path in front of the message, which begins
    with a verb.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot be read ({error})") from error
    for name, parameter in model.named_parameters():
        if name not in tensors and parameter.requires_grad and parameter.numel():
            raise ValueError(f"has no tensor '{name}', a parameter of the model")
    own = model.state_dict()
    for name, tensor in tensors.items():
        if name not in own:
            raise ValueError(f"has a tensor '{name}' that the model lacks")
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"has a tensor '{name}' of shape {list(tensor.shape)}, but the model's tensor has the shape {list(own[name].shape)}"
            )
    model.load_state_dict(tensors, strict=False)


def start_from(
    config: RunConfig,
    folder: RunFolder,
    task: Task,
    strategy: RoundStrategy,
    broadcasts: Broadcasts,
) -> None:
    """Replace the initial weights by those in the file --init, if it is given. Do nothing if the run continues from a checkpoint.

    Only trainable parameters are taken from the file. Raises ConfigError if the file does not fit the model, or if a frozen parameter has
    another value in the file than in the model.
    """
    if config.init is None or (folder.resumed and (folder.path / CHECKPOINT).exists()):
        return
    model = initial_model(task, config.seed)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    try:
        load_weights(expand_home(config.init, "--init"), model)
    except ValueError as error:
        raise ConfigError(
            f"--init {config.init} {error}; give the weights of a model of this task"
        ) from error
    for name, before in frozen.items():
        if not torch.equal(model.get_parameter(name), before):
            raise ConfigError(
                f"--init {config.init} and the model have different values for '{name}'; this parameter is frozen and not sent to "
                "clients, so load its values in model() of the task"
            )
    weights = strategy.model_layout.gather(model)
    broadcasts.start_from(strategy.client_algorithm.initial_global_state(weights))
