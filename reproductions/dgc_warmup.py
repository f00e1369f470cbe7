"""Deep gradient compression (DGC): clients send 0.1 % of the gradient after a warm-up of the density and the learning rate.

Lin, Han, Mao, Wang, Dally: Deep gradient compression: reducing the communication bandwidth for distributed training. ICLR 2018.
"""

import statistics

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

PAPER = (
    "Lin et al.: Deep gradient compression: reducing the communication bandwidth for distributed training. "
    "ICLR 2018"
)
DENSE = {"uplink": "identity", "downlink": "identity", "downlink_memory": "none", "memory": "none"}
DGC = DENSE | {"uplink": "topk:density=0.1%", "memory": "dgc:momentum=0.9"}
SAME = 0.01  # largest loss of accuracy (a fraction) at which the accuracy counts as the same


def methods(short: int, long: int, warmup: int, *rates: float) -> dict[str, Method]:
    """Return the methods: DGC with and without warm-up for `short` rounds; momentum SGD and DGC with warm-up for `long` rounds."""
    warm = DGC | {"density_warmup": warmup, "lr_warmup": warmup}
    dense = DENSE | {"server_optimizer": "sgd:momentum=0.9"}
    return {
        "dgc-short": Method(DGC | {"rounds": short}, lrs(*rates)),
        "dgc-warm-up-short": Method(warm | {"rounds": short}, lrs(*rates)),
        "dgc-warm-up": Method(warm | {"rounds": long}, lrs(*rates)),
        "dense": Method(dense | {"rounds": long}, lrs(*rates)),
    }


def helps(results: Results) -> Verdict:
    warm, cold = results["dgc-warm-up-short"], results["dgc-short"]
    text = f"with the warm-up {warm}, without it {cold}: {points(statistics.mean(differences(warm, cold)))} points"
    return Verdict(text, more_accurate(warm, cold))


def keeps(results: Results) -> Verdict:
    mine, dense = results["dgc-warm-up"], results["dense"]
    ratio = dense.bytes("uplink") / mine.bytes("uplink")
    return Verdict(
        f"DGC {mine}, momentum SGD {dense}; ×{ratio:.0f} on the uplink, including the warm-up",
        within_margin(mine, dense, SAME),
    )


REPRODUCTION = Reproduction(
    name="dgc-warmup",
    title="deep gradient compression with and without a warm-up, and momentum SGD",
    paper=PAPER,
    setting="The data are scikit-learn's digits; the paper uses CIFAR-10, ImageNet and other data. 4 clients with IID "
    "data train one step in every round, with a batch of 16 examples and momentum 0.9. With DGC, they send 0.1 % of "
    "the coordinates, which is ten coordinates. In the warm-up, the first 20 rounds, this density falls from 25 % to "
    "0.1 %, and the learning rate grows to its final value. Claim 1 is tested after 100 rounds, and claim 2 after "
    "2,000. A ratio (×) is the uplink bytes of momentum SGD, divided by those of DGC.",
    full_setting="The model is ResNet-18 with GroupNorm on CIFAR-10, with random crops and flips. 4 clients with IID "
    "data train one step in every round, with a batch of 32 examples and momentum 0.9, and send 0.1 % of the "
    "coordinates. In the warm-up of four epochs, the density falls from 25 % to 0.1 % and the learning rate grows. "
    "Claim 1 is tested after 8,000 rounds, and claim 2 after 64,000. Each method gets the best of three learning "
    "rates.",
    small=Experiment(
        {
            "task": "digits",
            "clients": 4,
            "participation": 1.0,
            "local_steps": 1,
            "batch_size": 16,
            "partition": "iid",
        },
        methods(100, 2000, 20, 0.01, 0.03, 0.1),
    ),
    full=Experiment(
        {
            "task": "cifar10-resnet18",
            "clients": 4,
            "participation": 1.0,
            "local_steps": 1,
            "batch_size": 32,
            "partition": "iid",
            "augment": True,
            "weight_decay": 1e-4,
            "eval_every": 2000,
            "checkpoint_every": 500,
        },
        methods(8000, 64_000, 1564, 0.01, 0.03, 0.1),
        seeds=1,
    ),
    claims=(
        Claim(
            "Early in training, DGC with the warm-up is more accurate than DGC without it (at every seed).",
            "section on warm-up",
            IN_WORDS,
            helps,
        ),
        Claim(
            f"DGC with the warm-up keeps the accuracy of momentum SGD (within {100 * SAME:g} point).",
            "tables of results",
            IN_WORDS,
            keeps,
        ),
    ),
    minutes=4,
)
