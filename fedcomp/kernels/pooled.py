"""Gradients of a convolution whose outputs go through a maximum over patches and a ReLU.

Of each patch of outputs one has a gradient, if the ReLU let it pass: with patches of 2×2 less than a quarter of them all. Only these are
gone through, each with one patch of the inputs and one kernel, in place of products with all the zeros. The sums are those of the dense
gradient in another order.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .parallel import starmap

EXAMPLES = 8  # that one thread takes; their gradients are added up in one order, whatever the number of threads
ROW = 32  # floats in a row of a kernel from which the loops are worth while
WORK = 1 << 22  # products of a dense gradient from which they are


def suits(x: Tensor, weight: Tensor, padding: tuple[int, int], patch: tuple[int, int]) -> bool:
    """Whether `gradients` is for inputs x [b, c, h, w] and a weight [k, c, i, j]."""
    (b, c, h, w), (_, _, rows, columns) = x.shape, weight.shape
    high, wide = h + 2 * padding[0] - rows + 1, w + 2 * padding[1] - columns + 1
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and all(t.is_contiguous(memory_format=torch.channels_last) for t in (x, weight))
        and c * columns >= ROW
        and high >= patch[0]
        and wide >= patch[1]
        and b * high * wide * weight.numel() >= WORK
    )


def gradients(
    x: Tensor,
    weight: Tensor,
    slopes: Tensor,
    places: Tensor,
    padding: tuple[int, int],
    inputs: bool,
) -> tuple[Tensor | None, Tensor]:
    """The gradients of x [b, c, h, w], if `inputs`, and of weight [k, c, i, j], both channels last, float32 on the CPU.

    `slopes` [b, k, oh, ow] are those of the maxima, 0 where the ReLU was, and `places`, int64 of the same shape, where these were in a
    plane of the convolution's outputs. Stride and dilation are 1.
    """
    from .pooled_loops import add_to_inputs, add_to_weights

    (b, c, h, w), (k, _, rows, columns), (above, beside) = x.shape, weight.shape, padding
    padded = _padded(x, padding).flatten(2).numpy()
    kernels = weight.permute(0, 2, 3, 1).reshape(k, rows, columns * c).numpy()
    slopes, places = (
        t.permute(0, 2, 3, 1).reshape(b, -1, k).contiguous().numpy() for t in (slopes, places)
    )
    pieces = [slice(start, start + EXAMPLES) for start in range(0, b, EXAMPLES)]
    tops, besides = np.ogrid[: h + 2 * above - rows + 1, : w + 2 * beside - columns + 1]
    begins = (tops * padded.shape[2] + besides * c).ravel()
    weights = torch.zeros(len(pieces), k, rows, columns * c, dtype=torch.float32)
    found = torch.zeros(padded.shape if inputs else 0, dtype=torch.float32)

    def work(i: int, piece: slice) -> None:
        add_to_weights(padded[piece], slopes[piece], places[piece], begins, weights[i].numpy())
        if inputs:
            add_to_inputs(kernels, slopes[piece], places[piece], begins, found[piece].numpy())

    starmap(work, list(enumerate(pieces)))
    of_weight = weights.sum(0).view(k, rows, columns, c).permute(0, 3, 1, 2)
    if not inputs:
        return None, of_weight
    return found.view(b, h + 2 * above, -1, c)[:, above : above + h, beside : beside + w].permute(
        0, 3, 1, 2
    ), of_weight


def _padded(x: Tensor, padding: tuple[int, int]) -> Tensor:
    """x [b, c, h, w] with zeros around it: [b, h, w, c], contiguous."""
    above, beside = padding
    return F.pad(x.detach(), (beside, beside, above, above)).permute(0, 2, 3, 1).contiguous()
