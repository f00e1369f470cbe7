"""Gradients of a stack of clients by torch.func: the loss of a client is a function of its row and its batch."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from ...tasks.base import Task
from .losses import Gradients, Parameters


def mapped_gradients(task: Task, model: nn.Module) -> Gradients:
    def loss(parameters: Parameters, inputs: Tensor, targets: Tensor) -> Tensor:
        return task.loss(functional_call(model, parameters, (inputs,)), targets)

    mapped = vmap(grad_and_value(loss))

    def gradients(
        parameters: Parameters, inputs: Tensor, targets: Tensor
    ) -> tuple[Sequence[Tensor], Tensor]:
        gradient, losses = mapped(parameters, inputs, targets)
        return [gradient[name] for name in parameters], losses

    return gradients
