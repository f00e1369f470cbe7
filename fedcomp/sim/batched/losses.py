"""The losses of a stack of clients, and their gradients for the outputs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from ...tasks.base import Task

Parameters = dict[str, Tensor]  # name → [m, *shape]
# parameters, inputs, targets → gradients, losses [m]
Gradients = Callable[[Parameters, Tensor, Tensor], tuple[Sequence[Tensor], Tensor]]

IGNORED = -100  # the target that cross_entropy ignores


def losses_of(task: Task, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return each client's loss [m], and its gradient for the outputs [m, ...]. Losses of bfloat16 and float16 outputs are float32.

    If cross_entropy ignores every target of a client, the loss is NaN and the gradient zero, as in torch.
    """
    if outputs.dtype in (torch.bfloat16, torch.float16):
        losses, slope = losses_of(task, outputs.float(), targets)
        return losses, slope.to(outputs.dtype)
    if task.criterion is not F.cross_entropy or outputs.dim() != 3 or targets.dim() != 2:
        leaf = outputs.detach().requires_grad_()
        with torch.enable_grad():
            losses = vmap(task.criterion)(leaf, targets)
        return losses.detach(), torch.autograd.grad(losses, leaf, torch.ones_like(losses))[0]
    counted = targets != IGNORED
    target = targets.where(counted, 0).unsqueeze(-1)
    share = counted / counted.sum(1, keepdim=True).clamp(min=1)
    share = share.to(outputs.dtype).unsqueeze(-1)
    logs = outputs.log_softmax(-1)
    losses = -(logs.gather(-1, target) * share).sum((1, 2)) / counted.any(1)
    return losses, logs.exp_().mul_(share).scatter_add_(-1, target, -share)
