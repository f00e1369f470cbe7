"""The losses of a stack of clients, and their gradients with respect to the outputs."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from ...tasks.base import Task
from ...training.local_sgd import Tensors

Parameters = dict[str, Tensor]  # name → [m, *shape]
# parameters, inputs, targets → gradients, losses [m]
Gradients = Callable[[Parameters, Tensor, Tensor], tuple[Tensors, Tensor]]

IGNORED = -100  # the target that cross_entropy ignores


def losses_of(task: Task, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return each client's loss [m], and its gradient with respect to the outputs [m, ...].

    Losses of bfloat16 and float16 outputs are float32. If cross_entropy ignores every target of a client, the loss is NaN and the
    gradient zero, as in torch.
    """
    if outputs.dtype in (torch.bfloat16, torch.float16):
        losses, gradient = losses_of(task, outputs.float(), targets)
        return losses, gradient.to(outputs.dtype)
    if task.criterion is not F.cross_entropy or outputs.dim() != 3 or targets.dim() != 2:
        leaf = outputs.detach().requires_grad_()
        with torch.enable_grad():
            losses = vmap(task.criterion)(leaf, targets)
        return losses.detach(), torch.autograd.grad(losses, leaf, torch.ones_like(losses))[0]
    counted = targets != IGNORED
    target = targets.where(counted, 0).unsqueeze(-1)
    weight = counted / counted.sum(1, keepdim=True).clamp(min=1)  # of an example in the mean
    weight = weight.to(outputs.dtype).unsqueeze(-1)
    logs = outputs.log_softmax(-1)
    losses = -(logs.gather(-1, target) * weight).sum((1, 2)) / counted.any(1)
    return losses, logs.exp_().mul_(weight).scatter_add_(-1, target, -weight)
