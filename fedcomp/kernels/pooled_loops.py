"""Loops of kernels/pooled.py, compiled by numba.

`offsets`, int64: for each output of the convolution, the start of its input patch in a padded example. `places`, `slopes`: see `gradients`
in kernels/pooled.py. `line`: number of elements in a row of the padded inputs, with all channels.
"""

import numpy as np

from .loops import add_rows, compiled


@compiled(fastmath={"contract"})
def add_to_weights(x, slopes, places, offsets, weights):
    """Add the gradients of the weights to `weights` [k, i, j·c]. x [b, h, w·c]: padded inputs. `slopes`, `places`: [b, o, k]."""
    (examples, outputs, kernels), line = slopes.shape, x.shape[2]
    starts = np.empty((kernels, outputs), np.int64)
    factors, counts = np.empty(starts.shape, np.float32), np.empty(kernels, np.int64)
    for b in range(examples):
        counts[:] = 0
        for o in range(outputs):
            for k in range(kernels):
                n = counts[k]
                starts[k, n], factors[k, n] = offsets[places[b, o, k]], slopes[b, o, k]
                counts[k] += slopes[b, o, k] != 0
        flat = x[b].reshape(-1)
        # Kernel rows are the outer loop, so that rows of x stay in the cache.
        for i in range(weights.shape[1]):
            for k in range(kernels):
                add_rows(weights[k, i], flat[i * line :], starts[k], factors[k], counts[k])


@compiled(fastmath={"contract"})
def add_to_inputs(weights, slopes, places, offsets, x):
    """Add the gradients of the inputs to x [b, h, w·c]. `weights`: [k, i, j·c]. `slopes`, `places`: [b, o, k]."""
    examples, outputs, kernels = slopes.shape
    (_, rows, row), line = weights.shape, x.shape[2]
    flat, remaining = weights.reshape(-1), np.empty(kernels, np.int64)
    starts, factors = np.empty(kernels, np.int64), np.empty(kernels, np.float32)
    for b in range(examples):
        example = x[b].reshape(-1)
        for o in range(outputs):
            n_remaining = 0
            for k in range(kernels):
                remaining[n_remaining] = k
                n_remaining += slopes[b, o, k] != 0
            while n_remaining:  # kernels whose maxima are at the same place are processed together
                place, count, others = places[b, o, remaining[0]], 0, 0
                for n in range(n_remaining):
                    k = remaining[n]
                    starts[count], factors[count] = k * rows * row, slopes[b, o, k]
                    remaining[others] = k
                    same = places[b, o, k] == place
                    count += same
                    others += not same
                n_remaining = others
                for i in range(rows):
                    target = example[offsets[place] + i * line :][:row]
                    add_rows(target, flat[i * row :], starts, factors, count)
