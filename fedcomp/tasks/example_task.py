"""A task of your own: predict on which of three spirals a point in the plane lies.

Replace the model and the data with your own. Run the task with:

    fedcomp sim --task my_task.py:task --rounds 100 --lr 0.1
"""

import torch
from torch import nn

from fedcomp import Data, Task

CLASSES = 3


def model() -> nn.Module:
    # fedcomp seeds torch's global generator, so that the server and all clients start with the same weights.
    return nn.Sequential(
        nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES)
    )


def spirals(count: int, seed: int) -> Data:
    # Return `count` random examples, one per row, that depend only on `seed`. The target is the number of the spiral.
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(CLASSES, (count,), generator=generator)
    radius = torch.rand(count, generator=generator).sqrt()
    angle = (
        4 * radius + arm * (2 * torch.pi / CLASSES) + 0.1 * torch.randn(count, generator=generator)
    )
    points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    return Data(inputs=3 * points, targets=arm)


task = Task(
    name="spirals",
    model=model,
    train=lambda: spirals(6000, seed=1),
    test=lambda: spirals(1000, seed=2),
    # Further arguments of Task:
    #
    #   loss      a function of outputs and targets that returns the mean over a batch; by default the cross-entropy
    #   accuracy  a function of outputs and targets that returns a fraction from 0 to 1, or None for no accuracy; by default the
    #             fraction of examples for which the target is the class with the largest output
    #   metrics   a dict from names to functions of the outputs and targets of the whole test set, each returning a number
    #   augment   a fedcomp.tasks.Augmentation, which changes training examples if --augment is given
)

# If your data is in a folder, define a function that returns the task. Its argument is the folder of --data, a pathlib.Path or None:
#
#   def task(folder):
#       return Task(name="mine", model=model, train=lambda: read(folder / "train.csv"), test=lambda: read(folder / "test.csv"))
