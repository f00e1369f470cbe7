"""A generative adversarial network: two models and two optimizers in one training loop.

    python examples/gan.py

The clients' data are points on a circle. The generator learns to map noise to such points.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import fedcomp

NOISE, RADIUS = 8, 2.0


class GAN(nn.Module):
    """A generator [B, 8] → points [B, 2], and a discriminator [B, 2] → scores [B, 1]."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def draw(self, count: int) -> Tensor:
        return self.generator(torch.randn(count, NOISE, device=next(self.parameters()).device))


def train(model: GAN, data: Dataset, round: fedcomp.LocalRound) -> dict[str, float]:
    generator_optimizer = torch.optim.Adam(model.generator.parameters(), 2e-3, betas=(0.0, 0.9))
    discriminator_optimizer = torch.optim.Adam(
        model.discriminator.parameters(), 2e-3, betas=(0.0, 0.9)
    )
    losses = []
    for real, _ in DataLoader(data, batch_size=32, shuffle=True):
        fake = model.draw(len(real))
        real_scores = model.discriminator(real.requires_grad_())
        fake_scores = model.discriminator(fake.detach())
        [gradient] = torch.autograd.grad(real_scores.sum(), real, create_graph=True)
        penalty = gradient.square().sum(1).mean()  # R1, for stability: Mescheder et al. 2018
        discriminator_optimizer.zero_grad()
        (F.softplus(-real_scores).mean() + F.softplus(fake_scores).mean() + penalty).backward()
        discriminator_optimizer.step()
        loss = F.softplus(-model.discriminator(fake)).mean()
        generator_optimizer.zero_grad()
        loss.backward()
        generator_optimizer.step()
        losses.append(loss.item())
    return {"loss": sum(losses) / len(losses), "examples": len(data)}


def evaluate(model: GAN, data: Dataset) -> dict[str, float]:
    radius = model.draw(1000).norm(dim=1)
    return {"loss": (radius - RADIUS).abs().mean().item(), "radius": radius.mean().item()}


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    angle = 2 * torch.pi * torch.rand(count, generator=torch.Generator().manual_seed(seed))
    return RADIUS * torch.stack([angle.cos(), angle.sin()], dim=1), torch.zeros(count)


def main() -> None:
    task = fedcomp.Task(
        "gan", GAN, points(2000, 1), points(10, 2), train_fn=train, evaluate_fn=evaluate
    )
    run = fedcomp.simulate(
        task,
        clients=10,
        participation=1.0,
        rounds=60,
        uplink="topk:density=20%",
        downlink="identity",
        progress=False,
    )
    loss, radius = run.metrics["loss"], run.metrics["radius"]
    print(f"mean distance from the circle {loss[0]:.2f} → {loss[-1]:.2f}, radius {radius[-1]:.2f}")


if __name__ == "__main__":
    main()
