"""The model, the data and the local training of the example app."""

import torch
from torch import Tensor, nn

from fedcomp.tasks import load
from fedcomp.tasks.partition import partition

DIGITS = load("digits")
BATCH_SIZE, STEPS = 20, 20


def model() -> nn.Module:
    torch.manual_seed(0)
    return DIGITS.model()


def training_data(client: int, clients: int) -> tuple[Tensor, Tensor]:
    """Return the training examples of one client."""
    data = DIGITS.train()
    indices = partition("iid", data, clients, 0)[client]
    return data.inputs[indices], data.targets[indices]


def train(net: nn.Module, inputs: Tensor, targets: Tensor, lr: float, seed: int) -> float:
    """Train the model for STEPS steps of SGD, and return the mean loss."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    total = 0.0
    for _ in range(STEPS):
        batch = torch.randint(len(targets), (BATCH_SIZE,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs[batch]), targets[batch])
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / STEPS


def accuracy(net: nn.Module) -> float:
    """Return the fraction of the test examples that are classified correctly."""
    data = DIGITS.test()
    with torch.no_grad():
        return (net(data.inputs).argmax(1) == data.targets).float().mean().item()
