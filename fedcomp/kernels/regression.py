"""Steps of softmax regression for a stack of clients, each on one thread.

    p_j = softmax(W x_j + b);  W ← W − η/|B| Σ_j (p_j − onehot(y_j)) x_jᵀ;  b likewise

Examples are read where they lie: a step writes down neither a batch nor a gradient, and between the first step and the last no thread
waits for another. What comes out for a client does not depend on who is trained with it, nor on the number of threads.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .parallel import starmap

WORK = 100_000  # products in the gradient of one batch from which the loops are worth while


def suits(inputs: Tensor, targets: Tensor, outputs: int, width: int, examples: int) -> bool:
    """Whether `descend` is for batches of so many of these examples [N, width], N ≥ 1, with targets [N], and so many outputs."""
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
        and examples * width * outputs >= WORK
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
    """Steps of SGD on the mean cross-entropy, in place, for the clients of stack [m, n], contiguous. Returns the losses before them [m, s].

    A client's weights [outputs, i] and biases [outputs] begin at these columns. Its batches, of `sizes` [s] examples, are one after the
    other in positions [m, Σ sizes] of inputs [N, i] and targets [N]; these are 0 to outputs − 1, which is not checked. Raises IndexError
    for positions outside.
    """
    from .regression_loops import descend_each

    if positions.numel() and not 0 <= positions.min() <= positions.max() < len(inputs):
        raise IndexError(
            f"positions {positions.min()}..{positions.max()} do not fit {len(inputs)} examples"
        )
    losses = torch.empty(len(stack), len(sizes), dtype=torch.float32)
    examples, classes, chosen, vectors, found = (
        t.detach().numpy() for t in (inputs.flatten(1), targets, positions, stack, losses)
    )
    each, rate, column = np.array(sizes), np.float32(lr), -1 if biases is None else biases

    def work(first: int, last: int) -> None:
        mine = slice(first, last)
        descend_each(
            examples,
            classes,
            chosen[mine],
            each,
            rate,
            vectors[mine],
            weights,
            column,
            outputs,
            found[mine],
        )

    parts = min(len(stack), 4 * torch.get_num_threads())
    edges = [len(stack) * i // parts for i in range(parts + 1)]
    starmap(work, list(zip(edges, edges[1:], strict=False)))
    return losses
