"""Averages of several updates each, to put before a robust rule: they differ less than the updates do.

Nearest-neighbour mixing. Allouah, Farhadkhani, Guerraoui, Gupta, Pinot, Stephan: Fixing by mixing: A recipe for optimal Byzantine ML under
heterogeneity. AISTATS 2023, algorithm 2.

    yᵢ = the mean of the m − f vectors that are nearest to xᵢ, itself included;  m > 2f

Bucketing. Karimireddy, He, Jaggi: Byzantine-robust learning on heterogeneous datasets via bucketing. ICLR 2022, algorithm 1.

    y_j = the mean of the j-th s of the vectors, in an order drawn anew in every round;  k = ⌈m / s⌉, of which the last may have fewer

Both are linear: y = A x with A [k, m]. f Byzantine clients spoil f buckets at most, so a rule after buckets needs enough of them. Of
equally distant vectors, that of the smaller client id counts as nearer. With both, vectors are put into buckets first, and the buckets
are mixed.
"""

import numpy as np

from .. import seeds


def buckets(vectors: int, size: int, seed: int, round: int) -> np.ndarray:
    """Return A [⌈vectors / size⌉, vectors], whose rows are means of up to `size` vectors each."""
    order = seeds.generator(seed, "buckets", round).permutation(vectors)
    found = np.zeros((-(-vectors // size), vectors))
    for j, row in enumerate(found):
        members = order[j * size : (j + 1) * size]
        row[members] = 1 / len(members)
    return found


def nearest(distances: np.ndarray, f: int) -> np.ndarray:
    """Return A [m, m], whose row i is the mean of the m − f vectors nearest to vector i, by (squared) distances [m, m]."""
    m = len(distances)
    found = np.zeros((m, m))
    for i, row in enumerate(distances):
        own = np.where(np.arange(m) == i, -1.0, row)  # nothing is nearer than itself
        found[i, np.argsort(own, kind="stable")[: m - f]] = 1 / (m - f)
    return found
