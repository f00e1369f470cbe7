"""Loops of kernels/regression.py, compiled by numba."""

import numpy as np
from numpy import float32, uint64

from .loops import add_rows, compiled


@compiled(fastmath={"contract", "nsz", "reassoc"})  # with these flags, numba can vectorize sums
def multiply(source, starts, weights, out):
    """Set out[j, o] to the dot product of weights[o] and the row that starts at source[starts[j]]."""
    (outputs, width), last = weights.shape, starts.size - 1
    for j0 in range(0, starts.size, 4):
        j1, j2, j3 = min(j0 + 1, last), min(j0 + 2, last), min(j0 + 3, last)
        a, b = source[starts[j0] :][:width], source[starts[j1] :][:width]
        c, d = source[starts[j2] :][:width], source[starts[j3] :][:width]
        for o in range(outputs):
            row = weights[o]
            sum_a = sum_b = sum_c = sum_d = float32(0)
            for k in range(uint64(width)):
                sum_a += a[k] * row[k]
                sum_b += b[k] * row[k]
                sum_c += c[k] * row[k]
                sum_d += d[k] * row[k]
            out[j0, o], out[j1, o], out[j2, o], out[j3, o] = sum_a, sum_b, sum_c, sum_d


@compiled(fastmath={"contract"})
def descend(inputs, targets, positions, sizes, lr, weights, biases, losses):
    """Run a client's SGD steps: inputs [N, i], targets [N], positions [Σ sizes], sizes [s], weights [o, i], biases [o or 0], losses [s]."""
    outputs, width = weights.shape
    source, largest = inputs.reshape(-1), sizes.max()
    starts, scores = np.empty(largest, np.int64), np.empty((largest, outputs), np.float32)
    slopes, begin = np.empty((outputs, largest), np.float32), 0
    for step in range(sizes.size):
        count = sizes[step]
        chosen, begin, total = positions[begin : begin + count], begin + count, 0.0
        for j in range(count):
            starts[j] = chosen[j] * width
        multiply(source, starts[:count], weights, scores)
        for j in range(count):
            own, target = scores[j], targets[chosen[j]]
            for o in range(biases.size):
                own[o] += biases[o]
            largest_score, mass = own.max(), float32(0)
            for o in range(outputs):
                slopes[o, j] = np.exp(own[o] - largest_score)
                mass += slopes[o, j]
            total += (largest_score - own[target]) + np.log(mass)
            for o in range(outputs):
                slopes[o, j] = (slopes[o, j] / mass - float32(o == target)) * (-lr / float32(count))
        losses[step] = total / count
        for o in range(outputs):
            add_rows(weights[o], source, starts, slopes[o], count)
            if biases.size:
                biases[o] += slopes[o, :count].sum()


@compiled(fastmath={"contract"})
def descend_each(inputs, targets, positions, sizes, lr, stack, weights, biases, outputs, losses):
    """Run `descend` for each of m clients: positions [m, Σ sizes], losses [m, s], stack [m, n].

    `weights`, `biases`: columns of `stack` at which the weights and the biases (-1 = none) start.
    """
    width = inputs.shape[1]
    for client in range(stack.shape[0]):
        own = stack[client]
        bias = own[biases : biases + outputs] if biases >= 0 else own[:0]
        weight = own[weights : weights + outputs * width].reshape(outputs, width)
        descend(inputs, targets, positions[client], sizes, lr, weight, bias, losses[client])
