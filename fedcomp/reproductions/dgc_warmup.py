"""Deep gradient compression: 0.1 % of the gradient after a warm-up of the density.

Lin, Han, Mao, Wang, Dally: Deep gradient compression: reducing the communication bandwidth for distributed training. ICLR 2018.
"""

import statistics

from .base import (
    IN_WORDS,
    Claim,
    Form,
    Judgement,
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
    "Lin, Han, Mao, Wang, Dally: Deep gradient compression: reducing the communication bandwidth for distributed training. "
    "ICLR 2018"
)
DENSE = {"uplink": "identity", "downlink": "identity", "downlink_memory": "none", "memory": "none"}
DGC = DENSE | {"uplink": "topk:density=0.1%", "memory": "dgc:momentum=0.9"}
SAME = 0.01  # a share of accuracy


def methods(warmup: int, *rates: float) -> dict[str, Method]:
    return {
        "dense": Method(DENSE | {"server_optimizer": "sgd:momentum=0.9"}, lrs(*rates)),
        "dgc": Method(DGC, lrs(*rates)),
        "dgc-warm-up": Method(DGC | {"density_warmup": warmup}, lrs(*rates)),
    }


def helps(results: Results) -> Judgement:
    warm, cold = results["dgc-warm-up"], results["dgc"]
    said = f"with {warm}, without {cold}: {points(statistics.mean(differences(warm, cold)))} points"
    return Judgement(said, ahead(warm, cold))


def keeps(results: Results) -> Judgement:
    mine, dense = results["dgc-warm-up"], results["dense"]
    ratio = dense.bytes("uplink") / mine.bytes("uplink")
    return Judgement(
        f"DGC {mine}, momentum SGD {dense}; ×{ratio:.0f} up, the warm-up with it",
        within(mine, dense, SAME),
    )


REPRODUCTION = Reproduction(
    name="dgc-warmup",
    title="deep gradient compression with and without a warm-up of the density, and momentum SGD",
    paper=PAPER,
    setting="Digits, 4 clients with equal shares, all in each of 400 rounds of one step of 16 examples, momentum 0.9, 0.1 % of the "
    "coordinates up, which are ten of so small a model; the density falls from 25 % in the first 20 rounds, about an epoch. The "
    "paper warms up over four epochs of many more, on CIFAR-10, ImageNet and others. Each method gets the best of four learning "
    "rates.",
    full_setting="ResNet-18 with GroupNorm on CIFAR-10, cropped and flipped, 4 clients with equal shares, all in each of 64,000 rounds of "
    "one step of 32 examples, momentum 0.9, 0.1 % of the coordinates up; the density falls from 25 % in the first four "
    "epochs. Each method gets the best of four learning rates.",
    small=Form(
        {
            "task": "digits",
            "clients": 4,
            "participation": 1.0,
            "rounds": 400,
            "local_steps": 1,
            "batch_size": 16,
            "partition": "iid",
        },
        methods(20, 0.003, 0.01, 0.03, 0.1),
    ),
    full=Form(
        {
            "task": "cifar10-resnet18",
            "clients": 4,
            "participation": 1.0,
            "rounds": 64_000,
            "local_steps": 1,
            "batch_size": 32,
            "partition": "iid",
            "augment": True,
            "weight_decay": 1e-4,
            "eval_every": 2000,
            "checkpoint_every": 500,
        },
        methods(1564, 0.003, 0.01, 0.03, 0.1),
        seeds=1,
    ),
    claims=(
        Claim(
            "The warm-up helps: DGC ends ahead of DGC that sends 0.1 % from the first round (at every seed).",
            "section on warm-up",
            IN_WORDS,
            helps,
        ),
        Claim(
            f"DGC with it keeps the accuracy of momentum SGD (within {100 * SAME:g} point).",
            "tables of results",
            IN_WORDS,
            keeps,
        ),
    ),
    minutes=1.5,
)
