"""Ten classes of points in 64 dimensions, of which each client has mostly three, and a network of 300,000 weights."""

import torch
from torch import nn

CLASSES, INPUTS = 10, 64
CENTRES = torch.randn(CLASSES, INPUTS, generator=torch.Generator().manual_seed(1)) / 2


def points(
    examples: int, seed: int, favoured: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    likely = torch.ones(CLASSES)
    if favoured is not None:
        likely[[(favoured + i) % CLASSES for i in range(3)]] = 8.0
    targets = torch.multinomial(likely, examples, replacement=True, generator=generator)
    return CENTRES[targets] + torch.randn(examples, INPUTS, generator=generator), targets


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm1d(INPUTS), nn.Linear(INPUTS, 4000), nn.ReLU(), nn.Linear(4000, CLASSES)
    )


def train(net: nn.Module, partition: int, round: int) -> tuple[float, int]:
    """Train for one pass over a client's points. Return the mean loss and the number of points."""
    inputs, targets = points(256, 100 + partition, favoured=3 * partition)
    order = torch.randperm(
        len(targets), generator=torch.Generator().manual_seed(1000 * partition + round)
    )
    net.train()
    total = 0.0
    # Without torch.optim, which imports torch's compiler for a second or two.
    for batch in order.split(32):
        net.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs[batch]), targets[batch])
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.05 * parameter.grad
        total += loss.item() * len(batch)
    return total / len(targets), len(targets)


def test(net: nn.Module) -> tuple[float, float]:
    """Return loss and accuracy on points that no client has."""
    inputs, targets = points(2000, 2)
    net.eval()
    with torch.no_grad():
        scores = net(inputs)
    return nn.functional.cross_entropy(scores, targets).item(), (
        scores.argmax(1) == targets
    ).float().mean().item()
