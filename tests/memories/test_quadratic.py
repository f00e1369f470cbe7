"""Memories with a counterpart converge with learning-rate schedules and partial participation, on a quadratic whose minimum is known.

Client i has the loss ½ Σ_k a_ik (w_k − b_ik)², so its gradient does not vanish at the common minimum. A client's local training is one step
with the exact gradient.
"""

from dataclasses import replace

import torch
from federation import Federation

from fedcomp.strategies import StrategyConfig
from fedcomp.training.engine import ClientEngine, JobResult, SequentialJobs

CLIENTS, ROUNDS, RATE = 5, 60, 0.3  # after 600 rounds, both gaps are 1e-15, the limit of float32


class Quadratic(ClientEngine):
    """The engine of one client."""

    device = torch.device("cpu")

    def __init__(self, numel: int, client: int):
        draws = torch.Generator().manual_seed(client)
        self.a = 0.1 + 1.9 * torch.rand(numel, generator=draws, dtype=torch.float64)
        self.b = torch.randn(numel, generator=draws, dtype=torch.float64)

    def train_job(self, start, data, job, sgd, seed, out) -> JobResult:
        out.copy_(-sgd.lr * self.a * (start.double() - self.b))
        return JobResult(0.0)


def gap(memory: str, uplink: str, rounds: int = ROUNDS, **changes) -> float:
    """Return (f − f*) / (f₀ − f*) after a run."""
    rules = StrategyConfig(1.0, uplink, "identity", "none", memory=memory, lr=RATE, clients=CLIENTS)
    rules = replace(rules, rounds=rounds, horizon=rounds, seed=1, **changes)
    f = Federation(rules, clients=CLIENTS)
    parts = [Quadratic(f.layout.numel, client) for client in range(CLIENTS)]
    for member, part in zip(f.members, parts, strict=True):
        member.trainer.engine, member.sgd = (
            SequentialJobs(part),
            replace(member.sgd, lr=RATE, steps=1),
        )
    a, b = torch.stack([part.a for part in parts]), torch.stack([part.b for part in parts])
    best = (a * b).sum(0) / a.sum(0)
    for _ in f.loop.rounds(range(1, rounds + 1)):
        pass
    reached, initial = (
        (a.mean(0) * (w.double() - best) ** 2).sum().item() for w in (f.loop.model, f.initial)
    )
    return reached / initial


def test_ef21_converges_with_a_learning_rate_schedule():
    assert gap("ef21", "topk:density=20%", lr_schedule="cosine") < 1e-6


def test_diana_converges_with_a_schedule_and_partial_participation():
    assert gap("diana", "qsgd:levels=4", lr_schedule="cosine", participation=0.4) < 1e-3
