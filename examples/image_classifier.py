"""Train an image classifier with BatchNorm and dropout on clients with different class distributions.

    python examples/image_classifier.py

The running statistics of BatchNorm are not averaged over clients. Before each evaluation, the server computes these statistics from
training examples.
"""

from sklearn.datasets import load_digits
from torch import nn

import fedcomp


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(16 * 4 * 4, 10),
    )


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 1, 8, 8)
    task = fedcomp.Task(
        "digits-cnn", model, train=(images[360:], labels[360:]), test=(images[:360], labels[:360])
    )
    run = fedcomp.simulate(
        task,
        clients=20,
        participation=0.5,
        rounds=60,
        partition="dirichlet:0.5",
        local_steps=10,
        optimizer="adamw:lr=3e-3",
        uplink="stc:density=5%",
        progress=False,
    )
    print(f"accuracy {run.accuracy:.1%}, {run.metrics['uplink_bytes'].sum():,.0f} bytes up")


if __name__ == "__main__":
    main()
