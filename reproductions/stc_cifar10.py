"""Sparse ternary compression (STC) compared with FedAvg and signSGD on non-IID data: VGG11* on CIFAR-10.

Sattler, Wiedemann, Müller, Samek: Robust and communication-efficient federated learning from non-i.i.d. data. IEEE TNNLS 2019.
"""

from .base import IN_WORDS, Claim, Experiment, Method, Reproduction, lrs
from .stc_mnist import MORE, PAPER, best, cost, fedavg, stc


def methods(steps: int, period: int, density: str, rate: float, vote: float) -> dict[str, Method]:
    found = {}
    for setting, split in (("alike", "iid"), ("two-classes", "classes:2")):
        own = {"partition": split}
        found |= {
            f"stc-{setting}": Method(own | stc(density, steps), lrs(rate)),
            f"fedavg-{setting}": Method(own | fedavg(period, steps), lrs(rate)),
            f"signsgd-{setting}": Method(
                own | {"strategy": "vote", "local_steps": 1, "rounds": steps}, lrs(vote)
            ),
        }
    return found


REPRODUCTION = Reproduction(
    name="stc-cifar10",
    title="STC against FedAvg and signSGD, VGG11* on CIFAR-10",
    paper=PAPER,
    setting="4 of 10 clients take part in each round. Training takes only 300 local steps, with batches of 20 "
    "examples, so accuracies are low. After each step, STC sends 1/25 of the coordinates in both directions, and "
    "signSGD one bit per coordinate. FedAvg sends the whole model after every 25 steps. The paper has 100 clients, a "
    "density of 1/400, 400 local steps per round for FedAvg, and far more steps.",
    full_setting="10 of 100 clients take part in each round. Training takes 20,000 local steps, with batches of 20 "
    "examples. STC and FedAvg have the paper's learning rate of 0.016, and signSGD has 0.0002. After each step, STC "
    "sends 1/400 of the coordinates in both directions, and signSGD one bit per coordinate. FedAvg sends the whole "
    "model after every 400 steps. We guessed the paper's number of steps and its learning rate for signSGD.",
    small=Experiment(
        {"task": "cifar10-vgg11s", "clients": 10, "participation": 0.4, "batch_size": 20},
        methods(300, 25, "1/25", 0.05, 0.0005),
        seeds=1,
    ),
    full=Experiment(
        {
            "task": "cifar10-vgg11s",
            "clients": 100,
            "participation": 0.1,
            "batch_size": 20,
            "checkpoint_every": 100,
        },
        methods(20_000, 400, "1/400", 0.016, 0.0002),
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
    ),
    minutes=9.5,  # estimated from the processor time of a few rounds
    needs="cifar10",
)
