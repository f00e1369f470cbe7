"""Convex problems of two coordinates whose gradients all have the signs (1, −1) or (−1, 1): steps along signs never move x₁ + x₂.

Of the kind that Karimireddy, Rebjock, Stich, Jaggi: Error feedback fixes SignSGD and other gradient compression schemes. ICML 2019 give.
With ε = 1/2, from (1, 1), with the least value 0 at (0, 0):

    kink           f(x) = ε·|x₁ + x₂| + |x₁ − x₂|, whole subgradients
    least squares  f(x) = (⟨a,x⟩² + ⟨b,x⟩²)/2 with a = (1, −1) + ε(1, 1), b = (−1, 1) + ε(1, 1), the gradient of one of both terms a step

Steps have the length γ/√t. What is sent is what the codecs and memories of a federation send: `sign` alone against `efsign` with
`residual`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

EPSILON, STEPS = 0.5, 500
RATES = (0.03, 0.1, 0.3)  # γ, of which each side gets its best
SIGN, EFSIGN = ("sign", "none"), ("efsign", "residual")
Problem = tuple[
    Callable[["np.ndarray"], float], Callable[["np.ndarray", int], "np.ndarray"]
]  # f(x), and its gradient in step t


def kink() -> Problem:
    import numpy as np

    def side(value: float) -> float:
        return 1.0 if value >= 0 else -1.0

    def gradient(x: np.ndarray, t: int) -> np.ndarray:
        return EPSILON * side(x[0] + x[1]) * np.array([1.0, 1.0]) + side(x[0] - x[1]) * np.array(
            [1.0, -1.0]
        )

    return lambda x: EPSILON * abs(x[0] + x[1]) + abs(x[0] - x[1]), gradient


def least_squares() -> Problem:
    import numpy as np

    from fedcomp import seeds

    rows = np.array([[1.0, -1.0], [-1.0, 1.0]]) + EPSILON
    drawn = seeds.generator(0, "terms of least squares").integers(2, size=STEPS)

    def gradient(x: np.ndarray, t: int) -> np.ndarray:
        row = rows[drawn[t]]
        return row @ x * row

    return lambda x: float(((rows @ x) ** 2).sum() / 2), gradient


PROBLEMS: dict[str, Callable[[], Problem]] = {"kink": kink, "least squares": least_squares}


def last_value(problem: Problem, sent: tuple[str, str], rate: float, steps: int = STEPS) -> float:
    """f after `steps` steps from (1, 1), each sent by a codec and a memory."""
    import numpy as np
    import torch

    from fedcomp.codecs import codec
    from fedcomp.memories import memory

    f, gradient = problem
    x, step = np.ones(2), torch.zeros(2)
    made = codec(sent[0])
    kept = memory(sent[1], made, numel=2)
    for t in range(steps):
        length = rate / (t + 1) ** 0.5
        g = torch.tensor(gradient(x, t), dtype=torch.float32)
        scale = length if sent == SIGN else 1.0  # signs alone have no length
        frame = kept.propose(-g if sent == SIGN else -length * g, seed=t)
        kept.commit()
        made.accumulate(frame, into=step.zero_(), weight=scale)
        x = x + step.double().numpy()
    return float(f(x))


def best(problem: Problem, sent: tuple[str, str]) -> float:
    """The lowest last value over the rates."""
    return min(last_value(problem, sent, rate) for rate in RATES)
