"""Train a model with two inputs, an image and a row of numbers, which are passed by keyword.

python examples/two_inputs.py
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fedcomp


class Network(nn.Module):
    """A network that maps images [B, 1, 8, 8] and rows of numbers [B, 2] to scores [B, 10]."""

    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten())
        self.table = nn.Linear(2, 8)
        self.head = nn.Linear(8 * 3 * 3 + 8, 10)

    def forward(self, image: Tensor, table: Tensor) -> Tensor:
        return self.head(torch.cat([self.image(image), self.table(table)], dim=1))


def data(images: Tensor, labels: Tensor) -> fedcomp.Data:
    table = torch.stack([images.mean((1, 2, 3)), images.std((1, 2, 3))], dim=1)
    return fedcomp.Data({"image": images, "table": table}, labels)


def main() -> None:
    digits = load_digits()
    images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    task = fedcomp.Task(
        "two-inputs", Network, data(images[360:], labels[360:]), data(images[:360], labels[:360])
    )
    run = fedcomp.simulate(
        task,
        clients=20,
        participation=0.5,
        rounds=60,
        local_steps=10,
        lr=0.2,
        uplink="qsgd:levels=4",
        progress=False,
    )
    print(f"accuracy {run.accuracy:.1%}, {run.metrics['uplink_bytes'].sum():,.0f} bytes up")


if __name__ == "__main__":
    main()
