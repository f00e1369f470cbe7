"""Sparse ternary compression (STC) compared with FedAvg and signSGD on non-IID data: logistic regression on MNIST.

Sattler, Wiedemann, Müller, Samek: Robust and communication-efficient federated learning from non-i.i.d. data. IEEE TNNLS 2019.
"""

import statistics

from .base import (
    IN_WORDS,
    Choices,
    Claim,
    Experiment,
    Method,
    Options,
    Reproduction,
    Results,
    Verdict,
    differences,
    lrs,
    more_accurate,
    points,
)

PAPER = "Sattler et al.: Robust and communication-efficient federated learning from non-i.i.d. data. IEEE TNNLS 2019"
UNCOMPRESSED = {
    "uplink": "identity",
    "downlink": "identity",
    "memory": "none",
    "downlink_memory": "none",
}
NEUTRAL_OPTIONS = {"partition": "iid", "participation": 0.1, "batch_size": 20}
DIFFERENT = NEUTRAL_OPTIONS | {"partition": "classes:2"}
HARDER = {
    "two-classes": DIFFERENT,
    "single-examples": DIFFERENT | {"batch_size": 1},
    "few-clients": DIFFERENT | {"participation": 0.02},
}
RIVALS = ("fedavg", "signsgd")
MORE = "costs STC less accuracy than FedAvg and signSGD"


def methods(
    steps: int, period: int, density: str, rates: Choices, votes: Choices
) -> dict[str, Method]:
    """Return STC, FedAvg and signSGD in each setting, with the same number of local steps. FedAvg sends after every `period` steps."""
    found = {}
    for setting, options in {"alike": NEUTRAL_OPTIONS, **HARDER}.items():
        found |= {
            f"stc-{setting}": Method(options | stc(density, steps), rates),
            f"fedavg-{setting}": Method(options | fedavg(period, steps), rates),
            f"signsgd-{setting}": Method(
                options | {"strategy": "vote", "local_steps": 1, "rounds": steps}, votes
            ),
        }
    return found


def stc(density: str, steps: int) -> Options:
    link = f"stc:density={density}"
    return {"uplink": link, "downlink": link, "local_steps": 1, "rounds": steps}


def fedavg(period: int, steps: int) -> Options:
    return UNCOMPRESSED | {"local_steps": period, "rounds": steps // period}


def best(results: Results) -> Verdict:
    mine, *others = (results[f"{name}-two-classes"] for name in ("stc", *RIVALS))
    text = f"STC {mine}, FedAvg {others[0]}, signSGD {others[1]}"
    return Verdict(text, all(more_accurate(mine, other) for other in others))


def cost(results: Results, before: str, after: str) -> Verdict:
    """Judge whether STC loses less accuracy than FedAvg and signSGD if the setting changes from `before` to `after`."""
    lost = {
        name: statistics.mean(differences(results[f"{name}-{after}"], results[f"{name}-{before}"]))
        for name in ("stc", *RIVALS)
    }
    text = f"STC {points(lost['stc'])}, FedAvg {points(lost['fedavg'])}, signSGD {points(lost['signsgd'])} points"
    return Verdict(text, all(lost["stc"] > lost[name] for name in RIVALS))


REPRODUCTION = Reproduction(
    name="stc-mnist",
    title="STC against FedAvg and signSGD, logistic regression on MNIST",
    paper=PAPER,
    setting="10 of 100 clients take part in each round. Training takes 1,600 local steps, with batches of 20 examples. "
    "After each step, STC sends 1/100 of the coordinates in both directions, and signSGD one bit per coordinate. In "
    "the paper, STC sends 1/400, and training takes far more steps. "
    "FedAvg sends the whole model after every 400 steps. *Points* are changes of "
    "the accuracy in percentage points.",
    full_setting="10 of 100 clients take part in each round. Training takes 20,000 local steps, with batches of 20 "
    "examples. All pixels are standardised by one mean and one standard deviation. After each step, STC sends 1/400 "
    "of the coordinates in both directions, and signSGD one bit per coordinate. FedAvg sends the whole model after "
    "every 400 steps. We guessed the number of steps, which the paper does not state. Each method gets the best of "
    "three learning rates in each setting. For STC and FedAvg, one of them is the paper's 0.04.",
    small=Experiment(
        {"task": "mnist-logreg-global", "clients": 100},
        methods(1600, 400, "1/100", lrs(0.01, 0.04, 0.16), lrs(0.000125, 0.0005, 0.002)),
        seeds=2,
    ),
    full=Experiment(
        {"task": "mnist-logreg-global", "clients": 100},
        methods(20_000, 400, "1/400", lrs(0.01, 0.04, 0.16), lrs(0.0001, 0.0005, 0.002)),
        seeds=5,
    ),
    claims=(
        Claim(
            "With two classes per client, STC is more accurate than FedAvg and signSGD (at every seed).",
            "figures",
            IN_WORDS,
            best,
        ),
        Claim(
            f"Changing from IID data to two classes per client {MORE}.",
            "figures",
            IN_WORDS,
            lambda results: cost(results, "alike", "two-classes"),
        ),
        Claim(
            f"With two classes per client, reducing the batch size from 20 to 1 {MORE}.",
            "figures",
            IN_WORDS,
            lambda results: cost(results, "two-classes", "single-examples"),
        ),
        Claim(
            f"With two classes per client, reducing the participation from 10 % to 2 % {MORE}.",
            "figures",
            IN_WORDS,
            lambda results: cost(results, "two-classes", "few-clients"),
        ),
    ),
    minutes=8,
    needs="mnist",
)
