"""Convex problems on which signSGD does not converge: gradients have the signs (1, −1) or (−1, 1), so steps do not change x₁ + x₂.

Similar problems are in Karimireddy, Rebjock, Stich, Jaggi: Error feedback fixes SignSGD and other gradient compression schemes. ICML 2019.
The problems minimize a function f of two coordinates x₁ and x₂. Steps start from x = (1, 1), and the minimum is 0 at (0, 0). With ε = 1/2:

    kink           f(x) = ε·|x₁ + x₂| + |x₁ − x₂|;  steps use subgradients of f
    least squares  f(x) = (⟨a,x⟩² + ⟨b,x⟩²)/2, a = (1, −1) + ε(1, 1), b = (−1, 1) + ε(1, 1);  each step uses the gradient of one random term

Step t has the learning rate γ/√t. Steps are encoded by the codec `sign` without error feedback, or by `efsign` with error feedback (the
memory `residual`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

EPSILON, STEPS = 0.5, 500
RATES = (0.03, 0.1, 0.3)  # values of the learning rate γ; the best value is used for each codec
SIGN, EFSIGN = ("sign", "none"), ("efsign", "residual")
# The function f of x, and the function that returns the gradient at x in step t.
Problem = tuple[Callable[["np.ndarray"], float], Callable[["np.ndarray", int], "np.ndarray"]]


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


def last_value(
    problem: Problem, compression: tuple[str, str], rate: float, steps: int = STEPS
) -> float:
    """Return the value of f after `steps` steps from (1, 1). `compression` names a codec and a memory."""
    import numpy as np
    import torch

    from fedcomp.codecs import codec
    from fedcomp.memories import memory

    f, gradient = problem
    x, step = np.ones(2), torch.zeros(2)
    sign_codec = codec(compression[0])
    client_memory = memory(compression[1], sign_codec, numel=2)
    for t in range(steps):
        length = rate / (t + 1) ** 0.5
        g = torch.tensor(gradient(x, t), dtype=torch.float32)
        # The codec `sign` sends no scale, so the weight is the learning rate.
        weight = length if compression == SIGN else 1.0
        frame = client_memory.propose(-g if compression == SIGN else -length * g, seed=t)
        client_memory.commit()
        sign_codec.accumulate(frame, into=step.zero_(), weight=weight)
        x = x + step.double().numpy()
    return float(f(x))


def best(problem: Problem, compression: tuple[str, str]) -> float:
    """Return the value of f after the last step with the best learning rate."""
    return min(last_value(problem, compression, rate) for rate in RATES)
