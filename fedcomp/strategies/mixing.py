"""Averages of groups of updates before a robust rule. They differ less than the updates.

Nearest-neighbour mixing. Allouah, Farhadkhani, Guerraoui, Gupta, Pinot, Stephan: Fixing by mixing: A recipe for optimal Byzantine ML under
heterogeneity. AISTATS 2023, algorithm 2.

    yᵢ = the mean of the m − f vectors nearest to xᵢ, including xᵢ;  m > 2f

Bucketing. Karimireddy, He, Jaggi: Byzantine-robust learning on heterogeneous datasets via bucketing. ICLR 2022, algorithm 1.

    y_j = the mean of the j-th bucket of s vectors, in a random order for each round;  k = ⌈m / s⌉ buckets, the last may have fewer

Both are linear: y = A x with A [k, m]. f Byzantine clients affect at most f buckets. Ties of distances are broken by the smaller client id.
With both options, the buckets are mixed.
"""

import numpy as np

from .. import seeds


def buckets(vectors: int, size: int, seed: int, round: int) -> np.ndarray:
    """Return A [⌈vectors / size⌉, vectors]. Each row is the mean of up to `size` vectors."""
    order = seeds.generator(seed, "buckets", round).permutation(vectors)
    matrix = np.zeros((-(-vectors // size), vectors))
    for j, row in enumerate(matrix):
        members = order[j * size : (j + 1) * size]
        row[members] = 1 / len(members)
    return matrix


def nearest(distances: np.ndarray, f: int) -> np.ndarray:
    """Return A [m, m]. Row i is the mean of the m − f vectors nearest to vector i, given (squared) distances [m, m]."""
    m = len(distances)
    matrix = np.zeros((m, m))
    for i, row in enumerate(distances):
        row = np.where(np.arange(m) == i, -1.0, row)  # vector i is the nearest to itself
        matrix[i, np.argsort(row, kind="stable")[: m - f]] = 1 / (m - f)
    return matrix
