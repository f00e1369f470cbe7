"""SGD for softmax regression, for many clients at the same time. Each client is processed by one thread.

A step with learning rate η on a batch B of examples (x_j, y_j) computes, where Σ_j is the sum over the batch:

    p_j = softmax(W x_j + b);
    W ← W − η/|B| Σ_j (p_j − onehot(y_j)) x_jᵀ;
    b ← b − η/|B| Σ_j (p_j − onehot(y_j)).

A step reads the examples in place, without copying a batch or storing a gradient. Threads synchronize only after the last step. The result
of a client does not depend on the other clients or on the number of threads.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .parallel import starmap

# torch is faster if the gradient of a batch needs fewer multiplications than this.
MIN_WORK = 100_000


def is_faster(inputs: Tensor, targets: Tensor, outputs: int, width: int, examples: int) -> bool:
    """Return whether `descend` supports these inputs [N, width] and targets [N], and is faster than torch.

    `outputs`: number of classes. `examples`: number of examples in a batch.
    """
    return (
        inputs.device.type == "cpu"
        and inputs.dtype == torch.float32
        and inputs.is_contiguous()
        and not inputs.is_neg()
        and targets.dtype == torch.int64
        and targets.dim() == 1
        and targets.is_contiguous()
        and len(targets) == len(inputs) > 0
        and inputs[0].numel() == width
        and examples * width * outputs >= MIN_WORK
        and bool(targets.min() >= 0)
        and bool(targets.max() < outputs)
    )


def descend(
    stack: Tensor,
    weights: int,
    biases: int | None,
    outputs: int,
    inputs: Tensor,
    targets: Tensor,
    positions: Tensor,
    sizes: Sequence[int],
    lr: float,
) -> Tensor:
    """Run s steps of SGD on the mean cross-entropy for each of m clients, in place. Return the losses before each step, [m, s].

    `stack` [m, n], contiguous: one client per row. In each row, the weights [outputs, i] start at column `weights`, and the biases at
    column `biases`. `positions` [m, Σ sizes]: the examples of each client, as indices into inputs [N, i] and targets [N]. `sizes` [s]: the
    number of examples in the batch of each step. Targets must be in 0..outputs−1, which is not checked. Raises IndexError for positions out
    of range.
    """
    from .regression_loops import descend_each

    if positions.numel() and not 0 <= positions.min() <= positions.max() < len(inputs):
        raise IndexError(
            f"positions {positions.min()}..{positions.max()} are out of range for {len(inputs)} examples"
        )
    losses = torch.empty(len(stack), len(sizes), dtype=torch.float32)
    tensors = inputs.flatten(1), targets, positions, stack, losses
    examples, classes, chosen, vectors, out = (t.detach().numpy() for t in tensors)
    each, rate, column = np.array(sizes), np.float32(lr), -1 if biases is None else biases

    def work(first: int, last: int) -> None:
        at = slice(first, last)
        own = chosen[at], each, rate, vectors[at], weights, column, outputs, out[at]
        descend_each(examples, classes, *own)

    parts = min(len(stack), 4 * torch.get_num_threads())
    edges = [len(stack) * i // parts for i in range(parts + 1)]
    starmap(work, list(zip(edges, edges[1:], strict=False)))
    return losses
