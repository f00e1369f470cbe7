"""Augmentation: examples changed at random while clients train on them.

What is drawn depends on (seed, round, client) alone and is drawn on the CPU, so that a client trains on the same examples in every
engine and on every device. Each example is changed by numbers of its own, so that those of many clients are changed at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .. import seeds

PADDING = 4  # pixels on each side


@dataclass(frozen=True)
class Augmentation:
    """How a task's examples are changed.

    `draw(generator, count)` gives the numbers for so many examples, an array [count, ...]. `apply(inputs, drawn)` makes of inputs [b, ...]
    and the numbers for each, a tensor [b, ...] on their device, new inputs of the same shape and dtype, and changes neither.
    """

    draw: Callable[[np.random.Generator, int], np.ndarray]
    apply: Callable[[Tensor, Tensor], Tensor]

    def draw_for(
        self, batches: Sequence[np.ndarray], seed: int, round: int, client: int
    ) -> np.ndarray:
        """The numbers for the examples of client `client` in a round, batch after batch: [examples, ...]."""
        return self.draw(seeds.generator(seed, "augment", round, client), sum(map(len, batches)))


def _shifts_and_flips(generator: np.random.Generator, count: int) -> np.ndarray:
    """For each image the row and the column at which it is cut out, 0..8, and whether it is flipped: int64 [count, 3]."""
    return generator.integers([0, 0, 0], [2 * PADDING + 1, 2 * PADDING + 1, 2], (count, 3))


def _cropped_and_flipped(images: Tensor, drawn: Tensor) -> Tensor:
    """Images [b, c, h, w] cut out of themselves with a margin of zeros, then flipped from left to right: one gather."""
    channels, height, width = images.shape[1:]
    row, column, flip = drawn.unsqueeze(-1).unbind(1)  # [b, 1] each
    rows = row + torch.arange(height, device=images.device)
    across = torch.arange(width, device=images.device)
    columns = column + torch.where(flip == 1, width - 1 - across, across)
    places = rows.unsqueeze(-1) * (width + 2 * PADDING) + columns.unsqueeze(1)
    margined = F.pad(images, (PADDING,) * 4).flatten(2)
    return margined.gather(2, places.flatten(1).unsqueeze(1).expand(-1, channels, -1)).view(
        images.shape
    )


# He et al. 2016, section 4.2. Of standardised images, zero is the mean colour; theirs is too, since the mean is subtracted before.
CROP_AND_FLIP = Augmentation(_shifts_and_flips, _cropped_and_flipped)
