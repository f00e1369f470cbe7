"""Sparse binary compression with 1, 10 and 100 local steps.

Sattler, Wiedemann, Müller, Samek: Sparse binary compression: towards distributed deep learning with minimal communication. 2018.
"""

import statistics

from .base import (
    Claim,
    Form,
    Judgement,
    Method,
    Reproduction,
    Results,
    differences,
    lrs,
    points,
    within,
)

PAPER = "Sattler, Wiedemann, Müller, Samek: Sparse binary compression: towards distributed deep learning with minimal communication. 2018"
PERIODS = (1, 10, 100)  # local steps
DENSE = {"uplink": "identity", "downlink": "identity", "memory": "none", "downlink_memory": "none"}
SAME, POINT = 0.005, 0.01  # shares of accuracy
SOURCE = "abstract or text, ResNet-50 on ImageNet"


def methods(steps: int, density: str, *rates: float) -> dict[str, Method]:
    sent = {
        "uplink": f"sbc:density={density}",
        "downlink": "identity",
        "memory": "residual",
        "downlink_memory": "none",
    }
    found = {"dense-1": Method(DENSE | {"local_steps": 1, "rounds": steps}, lrs(*rates))}
    return found | {
        f"sbc-{period}": Method(
            sent | {"local_steps": period, "rounds": steps // period}, lrs(*rates)
        )
        for period in PERIODS
    }


def compressed(results: Results, name: str, ratio: float, margin: float) -> Judgement:
    mine, dense = results[name], results["dense-1"]
    ours = dense.bytes("uplink") / mine.bytes("uplink")
    lost = statistics.mean(differences(mine, dense))
    return Judgement(
        f"×{ours:,.0f} at {points(lost)} points ({mine}, dense {dense})",
        ours >= ratio and within(mine, dense, margin),
    )


REPRODUCTION = Reproduction(
    name="sbc",
    title="sparse binary compression with 1, 10 and 100 local steps",
    paper=PAPER,
    setting="Logistic regression on MNIST, 4 clients with equal shares, all in every round, 1,000 local steps of 20 examples, p = 1/200 "
    "up; the downlink is not compressed and not counted, as in the paper, which has ResNet-50 on ImageNet. Ratios are bytes up of "
    "plain SGD that sends after every step, headers included. Each method gets the best of three learning rates.",
    full_setting="ResNet-18 with GroupNorm on CIFAR-10, cropped and flipped, 4 clients with equal shares, all in every round, 40,000 "
    "local steps of 32 examples with momentum that is masked where it was sent, p = 1/100 up. Ratios are bytes up of plain "
    "SGD that sends after every step.",
    small=Form(
        {
            "task": "mnist-logreg",
            "clients": 4,
            "participation": 1.0,
            "partition": "iid",
            "batch_size": 20,
        },
        methods(1000, "1/200", 0.01, 0.03, 0.1),
    ),
    full=Form(
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
        methods(40_000, "1/100", 0.01, 0.03, 0.1),
        seeds=1,
    ),
    claims=(
        Claim(
            f"With 10 local steps a round: such a ratio at unchanged accuracy (within {100 * SAME:g} points).",
            SOURCE,
            "×3531",
            lambda results: compressed(results, "sbc-10", 3531, SAME),
        ),
        Claim(
            "With 100 local steps a round: such a ratio at 1 point less.",
            SOURCE,
            "×37,208",
            lambda results: compressed(results, "sbc-100", 37_208, POINT),
        ),
    ),
    minutes=2.5,
    needs="mnist",
)
