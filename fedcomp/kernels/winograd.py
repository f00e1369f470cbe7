"""Maxima over patches of 2×2 of what a convolution gives, by fewer products.

Winograd: Arithmetic complexity of computations. SIAM 1980. Lavin, Gray: Fast algorithms for convolutional neural networks. CVPR 2016.

    Y = Aᵀ [(G g Gᵀ) ⊙ (Bᵀ d B)] A        d a tile of the inputs, g a kernel, Y the 2×2 outputs of the tile

With kernels of 5×5 a tile is 6×6, and a patch takes 36 products in place of 100. Rounding is about three times that of the plain sum.
Kernels of 3×3 would take 16 in place of 36, which does not make up for B and A.
"""

import numpy as np
import torch
from torch import Tensor

from .backend import LANES
from .parallel import starmap

FEWEST, LARGEST = (
    32,
    1 << 13,
)  # channels and kernels; their product, which has to stay near while a place of all tiles goes through it


def suits(weight: Tensor, patch: tuple[int, int]) -> bool:
    """Whether `outputs` is for a weight [k, c, i, j] and patches: channels fill whole vectors."""
    k, c, *size = weight.shape
    return (
        patch == (2, 2)
        and size == [5, 5]
        and not k % LANES
        and not c % LANES
        and min(c, k) >= FEWEST
        and c * k <= LARGEST
    )


def outputs(x: Tensor, weight: Tensor, bias: Tensor | None, examples: int) -> tuple[Tensor, Tensor]:
    """relu(max_pool2d(conv2d(x, weight, bias), 2)) of x [b, h, w, c], padded, and where the maxima were, as max_pool2d says: [b, k, i, j].

    `examples`: how many of them go to a thread.
    """
    from .winograd_loops import maxima, spread_weights

    (b, h, w, c), k = x.shape, len(weight)
    high, wide, kernels = (h - 4) // 2, (w - 4) // 2, torch.empty(6, 6, c * k, dtype=torch.float32)
    results = torch.empty(b, high, wide, k, dtype=torch.float32)
    places = torch.empty(b, high, wide, k, dtype=torch.int64)
    biases = np.zeros(k, np.float32) if bias is None else bias.detach().numpy()
    spread_weights(
        weight.detach().permute(2, 3, 1, 0).reshape(5, 5, c * k).contiguous().numpy(),
        kernels.numpy(),
    )

    def work(start: int) -> None:
        piece = slice(start, start + examples)
        maxima(
            x[piece].numpy(),
            kernels.view(36, c, k).numpy(),
            biases,
            results[piece].numpy(),
            places[piece].numpy(),
        )

    starmap(work, [(start,) for start in range(0, b, examples)])
    return results.permute(0, 3, 1, 2), places.permute(0, 3, 1, 2)
