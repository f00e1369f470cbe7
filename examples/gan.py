"""A generative adversarial network that learns points on a circle: two models and two optimizers in one training loop.

python examples/gan.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import fedcomp

NOISE, RADIUS = 8, 2.0
OPTIONS = {"clients": 10, "participation": 1.0, "rounds": 30, "progress": False}


class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


def train(model: GAN, data: Dataset, round: fedcomp.LocalRound) -> dict[str, float]:
    g_optimizer = torch.optim.Adam(model.generator.parameters(), 2e-3, betas=(0.0, 0.9))
    d_optimizer = torch.optim.Adam(model.discriminator.parameters(), 2e-3, betas=(0.0, 0.9))
    for real, _ in DataLoader(data, batch_size=32, shuffle=True):
        real = real.to(round.device).requires_grad_()
        fake = model.generator(torch.randn(len(real), NOISE, device=round.device))
        real_scores = model.discriminator(real)
        fake_scores = model.discriminator(fake.detach())
        [slope] = torch.autograd.grad(real_scores.sum(), real, create_graph=True)
        penalty = slope.square().sum(1).mean()  # R1 penalty (Mescheder 2018) stabilizes training
        d_optimizer.zero_grad()
        (F.softplus(-real_scores).mean() + F.softplus(fake_scores).mean() + penalty).backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        (loss := F.softplus(-model.discriminator(fake)).mean()).backward()
        g_optimizer.step()
    return {"loss": loss.item(), "examples": len(data)}


def evaluate(model: GAN, data: Dataset) -> dict[str, float]:
    radius = model.generator(torch.randn(1000, NOISE)).norm(dim=1)
    return {"loss": (radius - RADIUS).abs().mean().item(), "radius": radius.mean().item()}


def points(count: int) -> tuple[Tensor, Tensor]:
    angle = 2 * torch.pi * torch.rand(count)
    return RADIUS * torch.stack([angle.cos(), angle.sin()], dim=1), torch.zeros(count)


task = fedcomp.Task("gan", GAN, points(2000), points(10), train_fn=train, evaluate_fn=evaluate)

if __name__ == "__main__":
    run = fedcomp.simulate(task, uplink="topk:density=20%", downlink="identity", **OPTIONS)
    first, last = run.metrics["loss"][[0, -1]]
    print(f"mean distance {first:.2f} → {last:.2f}, radius {run.metrics['radius'][-1]:.2f}")
