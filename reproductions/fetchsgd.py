"""FetchSGD against FedAvg where clients are many, take part rarely and have one class each.

Rothchild, Panda, Ullah, Ivkin, Stoica, Braverman, Gonzalez, Arora: FetchSGD: Communication-efficient federated learning with sketching.
ICML 2020.
"""

import statistics

from .base import (
    IN_WORDS,
    Claim,
    Form,
    Judgement,
    Measured,
    Method,
    Reproduction,
    Results,
    ahead,
    differences,
    lrs,
    points,
    within,
)

PAPER = (
    "Rothchild, Panda, Ullah, Ivkin, Stoica, Braverman, Gonzalez, Arora: FetchSGD: Communication-efficient federated learning with "
    "sketching. ICML 2020"
)
WHOLE = {"uplink": "identity", "downlink": "identity", "memory": "none", "downlink_memory": "none"}
MOMENTUM = "sgd:momentum=0.9"  # of the server; FetchSGD has the same in its sketch
MARGIN = 0.02  # a share of accuracy


def methods(
    rounds: int, period: int, sketch: str, density: str, *rates: float
) -> dict[str, Method]:
    """FedAvg has as many local steps as the others, in a `period`-th of their rounds."""
    own = {
        "strategy": f"fetchsgd:density={density}",
        "uplink": sketch,
        "local_steps": 1,
        "rounds": rounds,
    }
    return {
        "uncompressed": Method(
            WHOLE | {"server_optimizer": MOMENTUM, "local_steps": 1, "rounds": rounds}, lrs(*rates)
        ),
        "fetchsgd": Method(own, lrs(*rates)),
        "fedavg": Method(
            WHOLE
            | {"server_optimizer": MOMENTUM, "local_steps": period, "rounds": rounds // period},
            lrs(*rates),
        ),
    }


def ratio(results: Results, measured: Measured) -> float:
    """Bytes both ways of the uncompressed run to those of another."""
    return sum(map(results["uncompressed"].bytes, ("uplink", "downlink"))) / sum(
        map(measured.bytes, ("uplink", "downlink"))
    )


def beats(results: Results) -> Judgement:
    mine, other = results["fetchsgd"], results["fedavg"]
    said = f"FetchSGD {mine} at ×{ratio(results, mine):.1f}, FedAvg {other} at ×{ratio(results, other):.1f}"
    return Judgement(said, ahead(mine, other) and ratio(results, mine) >= ratio(results, other))


def keeps(results: Results) -> Judgement:
    mine, whole = results["fetchsgd"], results["uncompressed"]
    lost = statistics.mean(differences(mine, whole))
    return Judgement(
        f"{points(lost)} points at ×{ratio(results, mine):.1f} (uncompressed {whole})",
        within(mine, whole, MARGIN),
    )


REPRODUCTION = Reproduction(
    name="fetchsgd",
    title="FetchSGD against FedAvg, clients of one class",
    paper=PAPER,
    setting="Digits, 280 clients of 5 or 6 images of one class, 10 a round, 600 local steps of 5 images: FetchSGD sends after each step "
    "a sketch of 3 rows of 8-bit cells, a tenth of the model, and moves 0.5 % of the coordinates; FedAvg sends the whole model "
    "after every 8 steps. All have momentum 0.9 on the server. The paper has 10,000 clients of five CIFAR-10 images of one class. "
    "Ratios are bytes both ways against the uncompressed run. Each method gets the best of four learning rates, a factor of about "
    "three apart.",
    full_setting="ResNet-18 with GroupNorm on CIFAR-10, cropped and flipped, 10,000 clients of five images of one class, 100 a round, "
    "2,400 local steps: FetchSGD sends a sketch of 5 rows, a twentieth of the model, and moves 0.5 % of it; FedAvg sends the "
    "whole model after every 10. All have momentum 0.9 on the server. Ratios are bytes both ways against the uncompressed "
    "run. Each method gets the best of four learning rates.",
    small=Form(
        {
            "task": "digits",
            "clients": 280,
            "participation": 10 / 280,
            "partition": "classes:1",
            "batch_size": 5,
        },
        methods(600, 8, "sketch:rows=3,ratio=10,cells=int8", "1/200", 0.003, 0.01, 0.03, 0.1),
    ),
    full=Form(
        {
            "task": "cifar10-resnet18",
            "clients": 10_000,
            "participation": 0.01,
            "partition": "classes:1",
            "batch_size": 5,
            "augment": True,
            "checkpoint_every": 100,
        },
        methods(2400, 10, "sketch:rows=5,ratio=20", "1/200", 0.001, 0.003, 0.01, 0.03),
        seeds=1,
    ),
    claims=(
        Claim(
            "At no less compression FetchSGD is ahead of FedAvg (at every seed).",
            "figures of accuracy against compression",
            IN_WORDS,
            beats,
        ),
        Claim(
            f"It keeps the accuracy of the uncompressed run (within {100 * MARGIN:g} points).",
            "the same",
            IN_WORDS,
            keeps,
        ),
    ),
    minutes=3.5,
)
