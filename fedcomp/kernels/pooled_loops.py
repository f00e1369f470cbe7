"""Loops of kernels/pooled.py, compiled by numba.

What is contiguous in memory is sliced, so that the loops are vectorised, and four products are added in one pass over a sum, which is then
read and written a quarter as often. Where fewer than four are left, slopes of 0 fill up.
"""

import numba
import numpy as np

from .loops import compiled

TOGETHER = 4
SUMS = {"reassoc", "contract", "nsz", "arcp"}  # not all of fast mathematics: with it a slope that is not a number would count as 0


@compiled(fastmath=SUMS)
def add_to_weights(x, slopes, places, width, channels, weights):
    """Add to weights [k, i, j·c] what slopes [b, o, k] at `places` of planes of this width tell of x [b, h, w·c], padded."""
    examples, outputs, kernels = slopes.shape
    row = weights.shape[2]
    chosen = np.empty(outputs + TOGETHER, np.int64)
    for b in range(examples):
        for k in range(kernels):
            count = 0
            for o in range(outputs):
                chosen[count] = o
                count += slopes[b, o, k] != 0
            for first in range(0, count, TOGETHER):
                s0, y0, x0 = _slope(slopes[b, :, k], places[b, :, k], chosen, first, count, width)
                s1, y1, x1 = _slope(slopes[b, :, k], places[b, :, k], chosen, first + 1, count, width)
                s2, y2, x2 = _slope(slopes[b, :, k], places[b, :, k], chosen, first + 2, count, width)
                s3, y3, x3 = _slope(slopes[b, :, k], places[b, :, k], chosen, first + 3, count, width)
                for i in range(weights.shape[1]):
                    g0, g1 = x[b, y0 + i, x0 * channels :][:row], x[b, y1 + i, x1 * channels :][:row]
                    g2, g3 = x[b, y2 + i, x2 * channels :][:row], x[b, y3 + i, x3 * channels :][:row]
                    total = weights[k, i]
                    for j in range(row):
                        total[j] += s0 * g0[j] + s1 * g1[j] + s2 * g2[j] + s3 * g3[j]


@compiled(fastmath=SUMS)
def add_to_inputs(weights, slopes, places, width, channels, x):
    """Add to x [b, h, w·c], padded, what slopes [b, o, k] at `places` tell by weights [k, i, j·c]."""
    examples, outputs, kernels = slopes.shape
    row = weights.shape[2]
    chosen, left = np.empty(kernels + TOGETHER, np.int64), np.empty(kernels, np.int64)
    for b in range(examples):
        for o in range(outputs):
            waiting = 0
            for k in range(kernels):
                left[waiting] = k
                waiting += slopes[b, o, k] != 0
            while waiting:
                place, count, kept = places[b, o, left[0]], 0, 0
                for n in range(waiting):
                    k = left[n]
                    if places[b, o, k] == place:
                        chosen[count] = k
                        count += 1
                    else:
                        left[kept] = k
                        kept += 1
                waiting = kept
                top, beside = divmod(place, width)
                for first in range(0, count, TOGETHER):
                    k0, k1 = chosen[first], chosen[min(first + 1, count - 1)]
                    k2, k3 = chosen[min(first + 2, count - 1)], chosen[min(first + 3, count - 1)]
                    s0, s1 = slopes[b, o, k0], slopes[b, o, k1] if first + 1 < count else np.float32(0)
                    s2 = slopes[b, o, k2] if first + 2 < count else np.float32(0)
                    s3 = slopes[b, o, k3] if first + 3 < count else np.float32(0)
                    for i in range(weights.shape[1]):
                        w0, w1, w2, w3 = weights[k0, i], weights[k1, i], weights[k2, i], weights[k3, i]
                        total = x[b, top + i, beside * channels :][:row]
                        for j in range(row):
                            total[j] += s0 * w0[j] + s1 * w1[j] + s2 * w2[j] + s3 * w3[j]


@numba.njit(nogil=True, inline="always")
def _slope(slopes, places, chosen, n, count, width):
    """The n-th of those chosen, and its row and column; 0 past the last."""
    o = chosen[min(n, count - 1)]
    top, beside = divmod(places[o], width)
    return (slopes[o] if n < count else np.float32(0)), top, beside
