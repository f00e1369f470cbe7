"""Train a regression model, which is evaluated by its loss and the mean absolute error instead of an accuracy.

python examples/regression.py
"""

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.nn import functional as F

import fedcomp

TEST_PATIENTS = 100


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().mean()


def main() -> None:
    inputs, progression = load_diabetes(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(inputs))
    train, test = order[TEST_PATIENTS:], order[:TEST_PATIENTS]
    inputs = inputs / inputs[train].std(0)
    scale = progression[train].std()
    targets = ((progression - progression[train].mean()) / scale)[:, None]  # [N, 1]

    task = fedcomp.Task(
        "diabetes",
        model,
        (inputs[train], targets[train]),
        (inputs[test], targets[test]),
        loss=F.mse_loss,
        accuracy=None,
        metrics={"absolute_error": absolute_error},
    )
    options = {"clients": 20, "participation": 0.3, "rounds": 40, "eval_every": 10}
    run = fedcomp.simulate(task, lr=0.02, uplink="stc:density=5%", progress=False, **options)

    print(f"{'round':>5}{'loss':>8}{'error':>8}{'up so far':>11}")
    sent = run.metrics["uplink_bytes"].cumsum()
    for i in np.flatnonzero(~np.isnan(run.metrics["loss"])):
        number, loss = run.metrics["round"][i], run.metrics["loss"][i]
        error = scale * run.metrics["absolute_error"][i]
        print(f"{number:>5.0f}{loss:>8.3f}{error:>8.1f}{sent[i]:>9,.0f} B")
    with torch.no_grad():
        first = run.model()(torch.tensor(inputs[test[:1]], dtype=torch.float32)).item()
    first = first * scale + progression[train].mean()
    print(f"first test patient: {progression[test[0]]:.0f} measured, {first:.0f} predicted")


if __name__ == "__main__":
    main()
