"""A task of your own: which of three intertwined spirals does a point in the plane belong to?

Replace model and data by yours. Run it with:

    fedcomp sim --task my_task.py:task --rounds 100 --lr 0.1
"""

import torch
from torch import nn

from fedcomp.tasks import Data, Task

CLASSES = 3


def model() -> nn.Module:
    # Drawn from torch's global generator: fedcomp seeds it, so that server and clients begin with the same weights.
    return nn.Sequential(
        nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES)
    )


def spirals(count: int, seed: int) -> Data:
    # Each row of inputs is an example. The same seed gives the same data on every machine.
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(CLASSES, (count,), generator=generator)
    along = torch.rand(count, generator=generator).sqrt()
    angle = (
        4 * along + arm * (2 * torch.pi / CLASSES) + 0.1 * torch.randn(count, generator=generator)
    )
    points = along[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    return Data(inputs=3 * points, targets=arm)


task = Task(
    name="spirals",
    model=model,
    train=lambda: spirals(6000, seed=1),
    test=lambda: spirals(1000, seed=2),
    # loss=   mean over a batch, cross-entropy if not given
    # accuracy=   a share from 0 to 1, of the largest outputs that are the targets if not given; None if there is none
    # metrics=   further measures, {name: function of the outputs and targets of the whole test set}
    # augment=   how --augment changes the examples that clients train on; a fedcomp.tasks.Augmentation
)

# If your data lies in a folder, make the task in a function: it is given what --data names, as a pathlib.Path, or None.
#
# def task(folder):
#     return Task(name="mine", model=model, train=lambda: read(folder / "train.csv"), test=lambda: read(folder / "test.csv"))
