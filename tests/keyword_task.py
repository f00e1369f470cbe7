"""A task with two named inputs and a frozen layer, like a base model with adapters, and the same task with its own training loop."""

from dataclasses import replace

import torch
from tiny_task import two_clouds
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fedcomp import Data, LocalRound, Task


class Network(nn.Module):
    """Inputs x [B, 1] and y [B, 1] → scores [B, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(2, 8).requires_grad_(False), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(self.base(torch.cat([x, y], dim=1)), 0.1, self.training)
        return self.head(hidden.relu())


def named_inputs(examples: int, seed: int) -> Data:
    data = two_clouds(examples, seed)
    return Data({"x": data.inputs[:, :1], "y": data.inputs[:, 1:]}, data.targets)


def train(model: nn.Module, data: torch.utils.data.Dataset, local_round: LocalRound) -> dict:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    if "optimizer" in local_round.state:
        optimizer.load_state_dict(local_round.state["optimizer"])
    total = 0.0
    for inputs, targets in DataLoader(data, local_round.batch_size, shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(**inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(targets)
    local_round.state["optimizer"] = optimizer.state_dict()
    return {"loss": total / len(data), "examples": len(data)}


task = Task("named inputs", Network, lambda: named_inputs(400, 1), lambda: named_inputs(200, 2))
own_loop = replace(task, name="own loop", train_fn=train)
