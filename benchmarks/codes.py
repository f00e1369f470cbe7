"""What codes of an election are worth: how often the coded vote is right, by code, by where Byzantine voters sit, and by what they do.

    python benchmarks/codes.py [--voters 15] [--byzantine 6] [--redundancy 3] [--matrices 30]

Exact for each matrix up to 15 voters (fedcomp/strategies/correctness.py), beyond that to a standard error of 0.2 % or less; Bernoulli
matrices are drawn, and their mean and standard deviation shown. `worst` is the worst placement, found by a search for the first matrix
alone. Byzantine voters vote the opposite of what they should (`inverted`), or always against the truth (`wrong`).
"""

import argparse
import time

import numpy as np

from fedcomp.strategies import allocation_matrix
from fedcomp.strategies.correctness import ATTACKS, correctness, uncoded, warning

LEVELS = (0.55, 0.70, 0.85)


def line(name: str, cells: list[str]) -> None:
    print(f"{name:46}" + "".join(f"{cell:>16}" for cell in cells))


def drawn(matrices: list[np.ndarray], q: float, f: int, placement: str, attack: str) -> str:
    found = [correctness(G, q, f, placement, attack).probability for G in matrices]
    return f"{np.mean(found):.3f} ± {np.std(found):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--voters", type=int, default=15)
    parser.add_argument("--byzantine", type=int, default=6)
    parser.add_argument("--redundancy", type=float, default=3.0, help="of the Bernoulli code")
    parser.add_argument("--matrices", type=int, default=30, help="Bernoulli matrices")
    options = parser.parse_args()
    n, f, redundancy = options.voters, options.byzantine, options.redundancy
    bernoulli = [
        allocation_matrix("bernoulli", n, f, redundancy, seed) for seed in range(options.matrices)
    ]
    print(
        f"P(vote right), n = {n}, f = {f}; Bernoulli matrices: {options.matrices}, "
        f"redundancy {redundancy:g}, really {np.mean([G.sum() / n for G in bernoulli]):.2f}\n"
    )
    line("a partition's sign is right with probability", [f"{q:.2f}" for q in LEVELS])
    for attack in ATTACKS:
        line(f"uncoded, {attack}", [f"{uncoded(n, q, f, attack):.3f}" for q in LEVELS])
        for placement in ("random", "heaviest"):
            line(
                f"bernoulli, {attack}, {placement}",
                [drawn(bernoulli, q, f, placement, attack) for q in LEVELS],
            )
        worst = [correctness(bernoulli[0], q, f, "worst", attack).probability for q in LEVELS]
        line(f"the first of them, {attack}, worst", [f"{p:.3f}" for p in worst])
        if n % 2:
            G = allocation_matrix("deterministic", n, f)
            line(
                f"deterministic, {attack}, heaviest",
                [f"{correctness(G, q, f, 'heaviest', attack).probability:.3f}" for q in LEVELS],
            )
    print("\nWhat a run is told, and what it takes to find out:")
    for q in LEVELS:
        start = time.perf_counter()
        said = warning("bernoulli", n, f, q, redundancy)
        print(f"  q = {q:.2f}, {time.perf_counter() - start:.1f} s: {said}")


if __name__ == "__main__":
    main()
