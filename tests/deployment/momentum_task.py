"""Two clouds of points with a training loop that keeps momentum. torch.optim would import torch's compiler, which takes over a second."""

import torch
from tiny_task import model, two_clouds
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from fedcomp import LocalRound, Task


def train(model: torch.nn.Module, data: Dataset, local_round: LocalRound) -> dict:
    parameters = [*model.parameters()]
    momenta = local_round.state.get("momenta", [torch.zeros_like(p) for p in parameters])
    total = 0.0
    for inputs, targets in DataLoader(data, local_round.batch_size, shuffle=True):
        loss = F.cross_entropy(model(inputs), targets)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, momentum, gradient in zip(parameters, momenta, gradients, strict=True):
                parameter -= 0.02 * momentum.mul_(0.9).add_(gradient)
        total += loss.item() * len(targets)
    local_round.state["momenta"] = momenta
    return {"loss": total / len(data), "examples": len(data)}


task = Task(
    "two clouds with momentum",
    model,
    lambda: two_clouds(400, 1),
    lambda: two_clouds(200, 2),
    train_fn=train,
)
