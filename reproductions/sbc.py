"""Sparse binary compression (SBC) with 10 and 100 local steps per round.

Sattler, Wiedemann, Müller, Samek: Sparse binary compression: towards distributed deep learning with minimal communication. 2018.
"""

import statistics

from .base import (
    Claim,
    Experiment,
    Method,
    Reproduction,
    Results,
    Verdict,
    differences,
    lrs,
    points,
    within_margin,
)

PAPER = "Sattler et al.: Sparse binary compression: towards distributed deep learning with minimal communication. 2018"
DENSE = {"uplink": "identity", "downlink": "identity", "memory": "none", "downlink_memory": "none"}
SAME, POINT = 0.005, 0.01  # largest losses of accuracy (fractions) that claims 1 and 2 allow
SOURCE = "abstract or text, ResNet-50 on ImageNet"


def methods(steps: int, more_steps: int, density: str, *rates: float) -> dict[str, Method]:
    """Return the methods: SBC with 10 local steps per round (`steps` in all) or 100 (`more_steps` in all), and plain SGD for both."""
    sent = {
        "uplink": f"sbc:density={density}",
        "downlink": "identity",
        "memory": "residual",
        "downlink_memory": "none",
    }
    found = {}
    for period, total, name in ((10, steps, "dense"), (100, more_steps, "dense-long")):
        found[name] = Method(DENSE | {"local_steps": 1, "rounds": total}, lrs(*rates))
        found[f"sbc-{period}"] = Method(
            sent | {"local_steps": period, "rounds": total // period}, lrs(*rates)
        )
    return found


def compressed(results: Results, name: str, base: str, ratio: float, margin: float) -> Verdict:
    mine, dense = results[name], results[base]
    ours = dense.bytes("uplink") / mine.bytes("uplink")
    lost = statistics.mean(differences(mine, dense))
    return Verdict(
        f"×{ours:,.0f} at {points(lost)} points ({mine}, dense {dense})",
        ours >= ratio and within_margin(mine, dense, margin),
    )


REPRODUCTION = Reproduction(
    name="sbc",
    title="sparse binary compression with 10 and 100 local steps per round, and plain SGD",
    paper=PAPER,
    setting="The task is logistic regression on MNIST; the paper trains ResNet-50 on ImageNet. 4 clients with IID data "
    "take part in every round, with batches of 20 examples. With SBC, they send 1/200 of the coordinates after 10 or "
    "100 steps. With plain SGD (*dense*), they send all coordinates after every step. Claim 1 is tested after 1,000 "
    "steps, and claim 2 after 10,000. As in the paper, the downlink is neither compressed nor counted. A ratio (×) is "
    "the uplink bytes of plain SGD, divided by those of SBC. *Points* are the accuracy of SBC minus that of plain "
    "SGD, in percentage points. All methods use the learning rate 0.1.",
    full_setting="The model is ResNet-18 with GroupNorm on CIFAR-10, with random crops and flips. 4 clients with IID "
    "data take part in every round, with batches of 32 examples, momentum 0.9 and momentum factor masking, and send "
    "1/100 of the coordinates. Claim 1 is tested after 40,000 steps, and claim 2 after 80,000. A ratio is the uplink "
    "bytes of plain SGD, which sends after every step, divided by those of the method.",
    small=Experiment(
        {
            "task": "mnist-logreg",
            "clients": 4,
            "participation": 1.0,
            "partition": "iid",
            "batch_size": 20,
        },
        methods(1000, 10_000, "1/200", 0.1),
    ),
    full=Experiment(
        {
            "task": "cifar10-resnet18",
            "clients": 4,
            "participation": 1.0,
            "partition": "iid",
            "batch_size": 32,
            "augment": True,
            "momentum": 0.9,
            "keep_momentum": True,
            "weight_decay": 5e-4,
            "checkpoint_every": 100,
        },
        methods(40_000, 80_000, "1/100", 0.01, 0.03, 0.1),
        seeds=1,
    ),
    claims=(
        Claim(
            f"With 10 local steps per round, SBC reaches the paper's ratio and keeps the accuracy "
            f"(within {100 * SAME:g} percentage points).",
            SOURCE,
            "×3531",
            lambda results: compressed(results, "sbc-10", "dense", 3531, SAME),
        ),
        Claim(
            "With 100 local steps per round, SBC reaches the paper's ratio and loses at most 1 percentage point of accuracy.",
            SOURCE,
            "×37,208",
            lambda results: compressed(results, "sbc-100", "dense-long", 37_208, POINT),
        ),
    ),
    minutes=4,
    needs="mnist",
)
