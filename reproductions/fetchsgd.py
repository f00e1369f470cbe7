"""FetchSGD compared with FedAvg: many clients rarely take part, and each client has examples of one class.

Rothchild, Panda, Ullah, Ivkin, Stoica, Braverman, Gonzalez, Arora: FetchSGD: Communication-efficient federated learning with sketching.
ICML 2020.
"""

import statistics

from .base import (
    IN_WORDS,
    Claim,
    Experiment,
    Method,
    MethodResult,
    Reproduction,
    Results,
    Verdict,
    differences,
    lrs,
    more_accurate,
    points,
    within_margin,
)

PAPER = (
    "Rothchild et al.: FetchSGD: Communication-efficient federated learning with "
    "sketching. ICML 2020"
)
UNCOMPRESSED = {
    "uplink": "identity",
    "downlink": "identity",
    "memory": "none",
    "downlink_memory": "none",
}
# Momentum of the server; FetchSGD has the same momentum in its sketch.
MOMENTUM = "sgd:momentum=0.9"
MARGIN = 0.02  # largest loss of accuracy (a fraction) at which the accuracy counts as kept


def methods(
    rounds: int, period: int, sketch: str, density: str, *rates: float
) -> dict[str, Method]:
    """Return the methods of the comparison. FedAvg has as many local steps as FetchSGD, but sends only after every `period` steps."""
    own = {
        "strategy": f"fetchsgd:density={density}",
        "uplink": sketch,
        "local_steps": 1,
        "rounds": rounds,
    }
    return {
        "uncompressed": Method(
            UNCOMPRESSED | {"server_optimizer": MOMENTUM, "local_steps": 1, "rounds": rounds},
            lrs(*rates),
        ),
        "fetchsgd": Method(own, lrs(*rates)),
        "fedavg": Method(
            UNCOMPRESSED
            | {"server_optimizer": MOMENTUM, "local_steps": period, "rounds": rounds // period},
            lrs(*rates),
        ),
    }


def ratio(results: Results, measured: MethodResult) -> float:
    """Return the bytes of the uncompressed run in both directions, divided by those of the method `measured`."""
    return sum(map(results["uncompressed"].bytes, ("uplink", "downlink"))) / sum(
        map(measured.bytes, ("uplink", "downlink"))
    )


def beats(results: Results) -> Verdict:
    mine, other = results["fetchsgd"], results["fedavg"]
    text = f"FetchSGD {mine} at ×{ratio(results, mine):.1f}, FedAvg {other} at ×{ratio(results, other):.1f}"
    return Verdict(
        text, more_accurate(mine, other) and ratio(results, mine) >= ratio(results, other)
    )


def keeps(results: Results) -> Verdict:
    mine, whole = results["fetchsgd"], results["uncompressed"]
    lost = statistics.mean(differences(mine, whole))
    return Verdict(
        f"{points(lost)} points at ×{ratio(results, mine):.1f} (uncompressed {whole})",
        within_margin(mine, whole, MARGIN),
    )


REPRODUCTION = Reproduction(
    name="fetchsgd",
    title="FetchSGD against FedAvg, with one class per client",
    paper=PAPER,
    setting="The data are scikit-learn's digits. 280 clients have 5 or 6 images of one class, and 10 clients take part "
    "in a round (the paper: 10,000 clients with five CIFAR-10 images). Training takes 600 local steps of 5 images. "
    "After each step, FetchSGD clients send a sketch with 8-bit cells, whose size in bytes is a tenth of the "
    "model's, and the server changes only the 0.5 % of the coordinates with the largest estimates. "
    "FedAvg sends the whole model after every 8 steps. All methods have "
    "momentum 0.9 on the server. A ratio (×) is the bytes of the uncompressed run in both directions, divided by "
    "those of the method.",
    full_setting="The model is ResNet-18 with GroupNorm on CIFAR-10, with random crops and flips. 10,000 clients have "
    "five images of one class, and 100 clients take part in a round. Training takes 2,400 local steps. After each "
    "step, FetchSGD clients send a sketch of 5 rows, a twentieth of the model's size in bytes, and the server changes "
    "0.5 % of the coordinates. FedAvg sends the whole model after every 10 steps. All methods have momentum 0.9 on "
    "the server. A ratio is the bytes of the uncompressed run in both directions, divided by those of the method. "
    "Each method gets the best of four learning rates.",
    small=Experiment(
        {
            "task": "digits",
            "clients": 280,
            "participation": 10 / 280,
            "partition": "classes:1",
            "batch_size": 5,
        },
        methods(600, 8, "sketch:rows=3,ratio=10,cells=int8", "1/200", 0.003, 0.01, 0.03, 0.1),
    ),
    full=Experiment(
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
            "At the same or a higher compression, FetchSGD is more accurate than FedAvg (at every seed).",
            "figures of accuracy against compression",
            IN_WORDS,
            beats,
        ),
        Claim(
            f"FetchSGD keeps the accuracy of the uncompressed run (within {100 * MARGIN:g} percentage points).",
            "figures of accuracy against compression",
            IN_WORDS,
            keeps,
        ),
    ),
    minutes=3.5,
)
