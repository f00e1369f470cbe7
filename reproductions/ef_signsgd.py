"""EF-signSGD: with error feedback, signSGD also converges on problems on which plain signSGD does not converge.

Karimireddy, Rebjock, Stich, Jaggi: Error feedback fixes SignSGD and other gradient compression schemes. ICML 2019.
"""

import statistics

from . import counterexamples
from .base import (
    IN_WORDS,
    Claim,
    Experiment,
    Method,
    Reproduction,
    Results,
    Verdict,
    differences,
    lrs,
    more_accurate,
    points,
    within_margin,
)

PAPER = "Karimireddy et al.: Error feedback fixes SignSGD and other gradient compression schemes. ICML 2019"
UNCOMPRESSED = {
    "uplink": "identity",
    "downlink": "identity",
    "memory": "none",
    "downlink_memory": "none",
}
UNREPAIRED = {
    "uplink": "efsign",
    "downlink": "identity",
    "memory": "none",
    "downlink_memory": "none",
}
REPAIRED = UNREPAIRED | {"memory": "residual"}
CLOSE = 0.01  # largest loss of accuracy (a fraction) that counts as close
# A convex problem is stuck if f ends at or above its initial value of 1, and solved if f ends at or below 0.01.
STUCK, SOLVED = 1.0, 0.01


def methods(
    batches: dict[str, int], steps: tuple[float, ...], votes: tuple[float, ...]
) -> dict[str, Method]:
    """Return the methods for each batch size: SGD, signSGD, and scaled signs with and without error feedback."""
    found = {}
    for name, size in batches.items():
        batch = {"batch_size": size}
        found |= {
            f"sgd-{name}": Method(UNCOMPRESSED | batch, lrs(*steps)),
            f"signsgd-{name}": Method({"strategy": "vote"} | batch, lrs(*votes)),
            f"scaled-signsgd-{name}": Method(UNREPAIRED | batch, lrs(*steps)),
            f"ef-signsgd-{name}": Method(REPAIRED | batch, lrs(*steps)),
        }
    return found


def fails(results: Results) -> Verdict:
    found = {
        name: counterexamples.best(problem(), counterexamples.SIGN)
        for name, problem in counterexamples.PROBLEMS.items()
    }
    return Verdict(_values(found), all(value >= STUCK for value in found.values()))


def repaired(results: Results) -> Verdict:
    found = {
        name: counterexamples.best(problem(), counterexamples.EFSIGN)
        for name, problem in counterexamples.PROBLEMS.items()
    }
    return Verdict(_values(found), all(value <= SOLVED for value in found.values()))


def _values(found: dict[str, float]) -> str:
    return "f from 1 to " + ", ".join(f"{value:.4f} ({name})" for name, value in found.items())


def close(results: Results) -> Verdict:
    ef, sgd = results["ef-signsgd-large"], results["sgd-large"]
    return Verdict(f"EF-signSGD {ef}, SGD {sgd}", within_margin(ef, sgd, CLOSE))


def better(results: Results) -> Verdict:
    ef, sign, scaled = (
        results[f"{name}-large"] for name in ("ef-signsgd", "signsgd", "scaled-signsgd")
    )
    return Verdict(
        f"EF-signSGD {ef}, signSGD {sign}, scaled signs without memory {scaled}",
        more_accurate(ef, sign) and more_accurate(ef, scaled),
    )


def small_batches(results: Results) -> Verdict:
    lost = {}
    for name in ("ef-signsgd", "signsgd"):
        lost[name] = statistics.mean(differences(results[f"{name}-small"], results["sgd-small"]))
    text = f"against SGD with the small batch: EF-signSGD {points(lost['ef-signsgd'])}, signSGD {points(lost['signsgd'])} points"
    return Verdict(text, lost["ef-signsgd"] >= -CLOSE and lost["ef-signsgd"] > lost["signsgd"])


REPRODUCTION = Reproduction(
    name="ef-signsgd",
    title="signs with error feedback against signSGD and SGD",
    paper=PAPER,
    setting="Claims 1 and 2 are tested on two convex problems with two coordinates, *kink* and *least squares*. Their "
    "function f is 1 at the start, and 0 at the minimum. Claims 3 to 5 are tested by logistic regression on MNIST "
    "(the paper: ResNet-18 and VGG on CIFAR). 2 clients with IID data take part in each of 400 "
    "rounds of one step. The large batch of a client has 32 examples, and the small batch 2. signSGD is a majority "
    "vote of the clients' signs. *Scaled signs without memory* is EF-signSGD without error feedback.",
    full_setting="Claims 1 and 2 are tested on two convex problems with two coordinates, and claims 3 to 5 by "
    "ResNet-18 with GroupNorm on CIFAR-10, with random crops and flips. 2 clients with IID data take part in each of "
    "40,000 rounds of one step. The large batch of a client has 64 examples, and the small batch 4.",
    small=Experiment(
        {
            "task": "mnist-logreg",
            "clients": 2,
            "participation": 1.0,
            "rounds": 400,
            "local_steps": 1,
            "partition": "iid",
        },
        methods(
            {"large": 32, "small": 2},
            (0.02, 0.05, 0.1, 0.2, 0.5),
            (0.0001, 0.0003, 0.001, 0.003, 0.01),
        ),
    ),
    full=Experiment(
        {
            "task": "cifar10-resnet18",
            "clients": 2,
            "participation": 1.0,
            "rounds": 40_000,
            "local_steps": 1,
            "partition": "iid",
            "augment": True,
            "weight_decay": 5e-4,
            "eval_every": 1000,
            "checkpoint_every": 1000,
        },
        methods(
            {"large": 64, "small": 4},
            (0.02, 0.05, 0.1, 0.2, 0.5),
            (0.00003, 0.0001, 0.0003, 0.001, 0.003),
        ),
    ),
    claims=(
        Claim(
            "There are simple convex problems on which signSGD does not converge.",
            "section on counterexamples",
            IN_WORDS,
            fails,
        ),
        Claim(
            "With error feedback, signSGD converges on these problems.",
            "theorems on convergence",
            IN_WORDS,
            repaired,
        ),
        Claim(
            f"EF-signSGD ends close to SGD (within {100 * CLOSE:g} point).",
            "experiments",
            IN_WORDS,
            close,
        ),
        Claim(
            "With the large batch, EF-signSGD is more accurate than signSGD and scaled signs without memory (at every seed).",
            "experiments",
            IN_WORDS,
            better,
        ),
        Claim(
            f"EF-signSGD is robust to small batches (within {100 * CLOSE:g} point of SGD), and more robust than signSGD.",
            "experiments",
            IN_WORDS,
            small_batches,
        ),
    ),
    minutes=3,
    needs="mnist",
)
