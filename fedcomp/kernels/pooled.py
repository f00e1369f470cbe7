"""Gradients of a convolution that is followed by max pooling and a ReLU.

In each pooling patch, at most one output of the convolution has a nonzero gradient: the maximum, if the ReLU is active there. The loops
process only these outputs, each of which belongs to one input patch and one convolution kernel.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .parallel import starmap

# Number of examples that a thread processes at a time. It is fixed, so that gradients are added in the same order for any number of
# threads.
EXAMPLES = 8
# torch is faster if a row of a convolution kernel has fewer than MIN_ROW weights, or the convolution fewer than MIN_WORK multiplications.
MIN_ROW, MIN_WORK = 32, 1 << 22


def is_faster(x: Tensor, weight: Tensor, padding: tuple[int, int], patch: tuple[int, int]) -> bool:
    """Return whether `gradients` supports inputs x [b, c, h, w] and weights [k, c, i, j], and is faster than torch.

    `padding`: rows and columns of zeros that the convolution adds at each edge of x. `patch`: rows and columns of a pooling patch.
    """
    (b, c, h, w), (_, _, rows, columns) = x.shape, weight.shape
    high, wide = h + 2 * padding[0] - rows + 1, w + 2 * padding[1] - columns + 1
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and all(t.is_contiguous(memory_format=torch.channels_last) for t in (x, weight))
        and c * columns >= MIN_ROW
        and high >= patch[0]
        and wide >= patch[1]
        and b * high * wide * weight.numel() >= MIN_WORK
    )


def gradients(
    x: Tensor,
    weight: Tensor,
    slopes: Tensor,
    places: Tensor,
    padding: tuple[int, int],
    inputs: bool,
) -> tuple[Tensor | None, Tensor]:
    """Return the gradients with respect to x [b, c, h, w] (None unless `inputs`) and `weight` [k, c, i, j], float32, channels last.

    `slopes` [b, k, oh, ow]: gradients of the pooled maxima, 0 where the ReLU is inactive. `places`, int64 [b, k, oh, ow]: indices of the
    maxima in a flattened channel of the convolution's output. The convolution has stride 1 and dilation 1.
    """
    from .pooled_loops import add_to_inputs, add_to_weights

    (b, c, h, w), (k, _, rows, columns), (pad_h, pad_w) = x.shape, weight.shape, padding
    last = F.pad(x.detach(), (pad_w, pad_w, pad_h, pad_h)).permute(0, 2, 3, 1)
    padded = last.contiguous().flatten(2).numpy()
    kernels = weight.permute(0, 2, 3, 1).reshape(k, rows, columns * c).numpy()
    flat = (t.permute(0, 2, 3, 1).reshape(b, -1, k) for t in (slopes, places))
    slope_arrays, place_arrays = (t.contiguous().numpy() for t in flat)
    batches = [slice(start, start + EXAMPLES) for start in range(0, b, EXAMPLES)]
    top, left = np.ogrid[: h + 2 * pad_h - rows + 1, : w + 2 * pad_w - columns + 1]
    offsets = (top * padded.shape[2] + left * c).ravel()
    weights = torch.zeros(len(batches), k, rows, columns * c, dtype=torch.float32)
    of_inputs = torch.zeros(padded.shape if inputs else 0, dtype=torch.float32)

    def work(i: int, batch: slice) -> None:
        own = slope_arrays[batch], place_arrays[batch]
        add_to_weights(padded[batch], *own, offsets, weights[i].numpy())
        if inputs:
            add_to_inputs(kernels, *own, offsets, of_inputs[batch].numpy())

    starmap(work, list(enumerate(batches)))
    of_weight = weights.sum(0).view(k, rows, columns, c).permute(0, 3, 1, 2)
    if not inputs:
        return None, of_weight
    planes = of_inputs.view(b, h + 2 * pad_h, -1, c)[:, pad_h : pad_h + h, pad_w : pad_w + w]
    return planes.permute(0, 3, 1, 2), of_weight
