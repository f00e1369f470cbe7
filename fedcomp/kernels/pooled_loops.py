"""Loops of kernels/pooled.py, compiled by numba. `begins`, int64: where in an example, padded, line after line, the patch of a place is."""

import numpy as np

from .loops import add_rows, compiled


@compiled(fastmath={"contract"})
def add_to_weights(x, slopes, places, begins, weights):
    """Add to weights [k, i, j·c] what slopes [b, o, k] at `places` of the outputs tell of x [b, h, w·c], padded."""
    (examples, outputs, kernels), line = slopes.shape, x.shape[2]
    starts, factors, counts = (
        np.empty((kernels, outputs), np.int64),
        np.empty((kernels, outputs), np.float32),
        np.empty(kernels, np.int64),
    )
    for b in range(examples):
        counts[:] = 0
        for o in range(outputs):
            for k in range(kernels):
                n = counts[k]
                starts[k, n], factors[k, n] = begins[places[b, o, k]], slopes[b, o, k]
                counts[k] += slopes[b, o, k] != 0
        flat = x[b].reshape(-1)
        for i in range(
            weights.shape[1]
        ):  # the lines of an example that a row of all kernels meets stay near
            for k in range(kernels):
                add_rows(weights[k, i], flat[i * line :], starts[k], factors[k], counts[k])


@compiled(fastmath={"contract"})
def add_to_inputs(weights, slopes, places, begins, x):
    """Add to x [b, h, w·c], padded, what slopes [b, o, k] at `places` tell by weights [k, i, j·c]."""
    examples, outputs, kernels = slopes.shape
    (_, rows, row), line = weights.shape, x.shape[2]
    flat, left = weights.reshape(-1), np.empty(kernels, np.int64)
    starts, factors = np.empty(kernels, np.int64), np.empty(kernels, np.float32)
    for b in range(examples):
        example = x[b].reshape(-1)
        for o in range(outputs):
            waiting = 0
            for k in range(kernels):
                left[waiting] = k
                waiting += slopes[b, o, k] != 0
            while waiting:  # those whose maximum stood in one place
                place, count, kept = places[b, o, left[0]], 0, 0
                for n in range(waiting):
                    k = left[n]
                    starts[count], factors[count], left[kept] = k * rows * row, slopes[b, o, k], k
                    here = places[b, o, k] == place
                    count += here
                    kept += not here
                waiting = kept
                for i in range(rows):
                    add_rows(
                        example[begins[place] + i * line :][:row],
                        flat[i * row :],
                        starts,
                        factors,
                        count,
                    )
