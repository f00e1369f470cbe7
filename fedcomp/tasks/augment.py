"""Augmentation: random changes of training examples.

The random numbers depend only on the run's seed, the round and the client, and are drawn on the CPU. A client therefore trains on the same
examples with every training engine, on a CPU or a GPU. Each example has its own random numbers, so that a training engine can augment the
examples of many clients in one call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .. import seeds

PADDING = 4  # zero pixels on each side of an image


@dataclass(frozen=True)
class Augmentation:
    """Random changes of a task's training examples.

    `draw(generator, count)` returns the random numbers for `count` examples, an array [count, ...]. `apply(inputs, drawn)` returns the
    augmented inputs, with the shape and dtype of `inputs` [batch, ...]. `drawn` [batch, ...] has the random numbers of these examples, on
    the device of `inputs`. `apply` must not change its arguments in place.
    """

    draw: Callable[[np.random.Generator, int], np.ndarray]
    apply: Callable[[Tensor, Tensor], Tensor]

    def draw_for(
        self, batches: Sequence[np.ndarray], seed: int, round: int, client: int
    ) -> np.ndarray:
        """Return the random numbers [examples, ...] for all examples of a client in a round, in the order of `batches`."""
        return self.draw(seeds.generator(seed, "augment", round, client), sum(map(len, batches)))


def _draw_crops_and_flips(generator: np.random.Generator, count: int) -> np.ndarray:
    """Return an int64 array [count, 3]: for each image, first row and column of the crop (0 to 8), and 1 to flip the image, else 0."""
    return generator.integers([0, 0, 0], [2 * PADDING + 1, 2 * PADDING + 1, 2], (count, 3))


def _crop_and_flip(images: Tensor, drawn: Tensor) -> Tensor:
    """Pad images [batch, channels, height, width] with zeros, crop each image to [height, width], and flip some images horizontally."""
    channels, height, width = images.shape[1:]
    row, column, flip = drawn.unsqueeze(-1).unbind(1)  # [batch, 1] each
    rows = row + torch.arange(height, device=images.device)
    offsets = torch.arange(width, device=images.device)
    columns = column + torch.where(flip == 1, width - 1 - offsets, offsets)
    positions = rows.unsqueeze(-1) * (width + 2 * PADDING) + columns.unsqueeze(1)
    padded = F.pad(images, (PADDING,) * 4).flatten(2)
    return padded.gather(2, positions.flatten(1).unsqueeze(1).expand(-1, channels, -1)).view(
        images.shape
    )


# The augmentation of He et al. 2016, section 4.2. As in the paper, the padding has the mean colour, which is 0 for standardised images.
CROP_AND_FLIP = Augmentation(_draw_crops_and_flips, _crop_and_flip)
