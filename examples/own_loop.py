"""Use your own training loop, here with mixed precision and a learning rate that warms up within each round.

    python examples/own_loop.py

fedcomp calls `train` for each client of a round, and sends the change of the model's trainable parameters to the server.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import fedcomp


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))


def train(model: nn.Module, data: Dataset, round: fedcomp.LocalRound) -> dict[str, float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if "optimizer" in round.state:  # saved by this client in its previous round
        optimizer.load_state_dict(round.state["optimizer"])
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    total, correct = 0.0, 0
    for images, labels in DataLoader(data, batch_size=16, shuffle=True):
        with torch.autocast(round.device.type, torch.bfloat16):
            scores = model(images)
            loss = F.cross_entropy(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warm_up.step()
        total += loss.item() * len(labels)
        correct += (scores.argmax(1) == labels).sum().item()
    round.state["optimizer"] = optimizer.state_dict()
    return {"loss": total / len(data), "examples": len(data), "train_accuracy": correct / len(data)}


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    task = fedcomp.Task(
        "own-loop",
        model,
        train=(images[360:] / 16, labels[360:]),
        test=(images[:360] / 16, labels[:360]),
        train_fn=train,
    )
    run = fedcomp.simulate(
        task, clients=20, participation=0.5, rounds=40, uplink="topk:density=10%", progress=False
    )
    print(f"accuracy {run.accuracy:.1%}, {run.metrics['uplink_bytes'].sum():,.0f} bytes up")


if __name__ == "__main__":
    main()
