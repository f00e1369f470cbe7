"""Use your own model and data, here a small convolutional network on images, with compressed uplink and downlink.

    python examples/own_model.py

Replace the class `Network` and the arrays `train` and `test` with your own.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fedcomp


class Network(nn.Module):
    """A convolutional network that maps images [B, 1, 8, 8] to scores [B, 10]."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    images = (images - images.mean()).reshape(-1, 1, 8, 8) / images.std()
    task = fedcomp.Task(
        "own-digits",
        model=Network,
        train=(images[360:], labels[360:]),
        test=(images[:360], labels[:360]),
    )

    print(f"{'uplink':<22}{'accuracy':>9}{'up':>12}{'dense':>12}")
    for uplink in ("identity", "stc:density=1%", "topk:density=5%,values=fp16"):
        run = fedcomp.simulate(
            task,
            clients=30,
            participation=0.2,
            rounds=15,
            partition="dirichlet:0.5",
            lr=0.1,
            uplink=uplink,
            downlink="fp16",
            progress=False,
        )
        sent, dense = run.metrics["uplink_bytes"].sum(), run.metrics["dense_uplink_bytes"].sum()
        print(f"{uplink:<28}{run.accuracy:>7.1%}{sent:>10,.0f} B{dense:>10,.0f} B")

    model = run.model()  # a Network with the weights of the last run
    prediction = model(torch.tensor(images[:1], dtype=torch.float32)).argmax().item()
    print(f"test image 1: label {labels[0]}, predicted {prediction}; the run is in {run.folder}")


if __name__ == "__main__":
    main()
