"""Construction of a client's torch optimizer, from the task or from --optimizer."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ConfigError, FedcompError, TaskError
from ..local_optimizer import read as read_optimizer
from ..tasks.base import Task
from ..tasks.user_errors import SEE_TRACEBACK, describe
from .local_sgd import LocalSGD


def make_optimizer(task: Task, parameters: Sequence[Tensor], sgd: LocalSGD) -> Optimizer:
    """Return the task's own optimizer if it has one, else the optimizer of --optimizer.

    The learning rate of the task's optimizer is multiplied by `sgd.lr_multiple`, the server's factor for this round. For --optimizer, this
    is not necessary, because `sgd.lr` includes the factor.
    """
    if task.optimizer is None:
        chosen = read_optimizer(sgd.optimizer)
        return chosen.make(parameters, sgd.lr, sgd.momentum, sgd.weight_decay)
    optimizer = task.optimizer(parameters)
    if not isinstance(optimizer, Optimizer):
        raise TaskError(
            f"task '{task.name}': optimizer(parameters): got {type(optimizer).__name__}; expected a torch.optim.Optimizer"
        )
    for group in optimizer.param_groups:
        group["lr"] *= sgd.lr_multiple
    return optimizer


def check_optimizer(task: Task, model: nn.Module, sgd: LocalSGD) -> None:
    """Raise ConfigError or TaskError if the clients' optimizer cannot be made, for example because of a negative weight decay.

    Also raise ConfigError if --optimizer-state has no effect on the optimizer.
    """
    if task.train_fn is not None:
        return
    if task.optimizer is None and sgd.uses_descend:
        if sgd.optimizer_state == "kept":
            raise ConfigError(
                f"--optimizer-state kept has no effect with --optimizer {sgd.optimizer}; give --momentum 0.9 --keep-momentum instead"
            )
        return
    parameters = [p for p in model.parameters() if p.requires_grad and p.numel()]
    try:
        make_optimizer(task, parameters, sgd)
    except FedcompError:
        raise
    except Exception as error:
        if task.optimizer is None:
            raise ConfigError(
                f"--optimizer {sgd.optimizer}: {error}; give other options, or another optimizer"
            ) from error
        raise TaskError(
            f"task '{task.name}': optimizer(parameters) failed: {describe(error)}; correct it, or {SEE_TRACEBACK}"
        ) from error
