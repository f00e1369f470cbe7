"""Election coding: a majority vote against Byzantine clients.

Sohn, Han, Choi, Moon: Election coding for distributed learning: protecting signSGD against Byzantine attacks. NeurIPS 2020.
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
    more_accurate,
    points,
)

PAPER = "Sohn et al.: Election coding for distributed learning: protecting signSGD against Byzantine attacks. NeurIPS 2020"
REDUNDANCIES = {
    (5, 1): 3.8,
    (9, 2): 6.778,
    (15, 3): 10.733,
}  # the paper's redundancy of the deterministic code, for (n voters, b Byzantine voters)
ROUNDING = 0.0005  # largest rounding error of the redundancies in the paper
MARGIN = 0.01  # a loss of accuracy (a fraction) up to this counts as none
CODES = {
    "vote": {"strategy": "vote"},
    "election": {"strategy": "election:byzantine=3"},
    "bernoulli": {"strategy": "election:code=bernoulli,byzantine=3,redundancy=3"},
}


def methods(byzantine: int) -> dict[str, Method]:
    """Return the methods of the comparison: each code, with and without Byzantine clients that invert their updates."""
    attack = {"attack": f"inverted:{byzantine}"}
    return {
        f"{name}-{state}": Method(options | attacked)
        for name, options in CODES.items()
        for state, attacked in (("honest", {}), ("attacked", attack))
    }


def redundancy(results: Results) -> Verdict:
    from fedcomp.strategies import allocation_matrix

    ours = {
        key: float(allocation_matrix("deterministic", *key).sum() / key[0]) for key in REDUNDANCIES
    }
    text = ", ".join(f"{value:.3f} at {key}" for key, value in ours.items())
    return Verdict(
        text, all(abs(ours[key] - value) <= ROUNDING for key, value in REDUNDANCIES.items())
    )


def unchanged(results: Results) -> Verdict:
    """Judge whether training with and without Byzantine clients gives model files with the same bytes at every seed."""
    pairs = zip(results["election-honest"].runs, results["election-attacked"].runs, strict=True)
    same = [
        (a.folder / "model.safetensors").read_bytes()
        == (b.folder / "model.safetensors").read_bytes()
        for a, b in pairs
    ]
    accuracy = f"{results['election-attacked']} with Byzantine clients, {results['election-honest']} without"
    return Verdict(
        f"{accuracy}; bit for bit the same model at {sum(same)} of {len(same)} seeds", all(same)
    )


def vote_suffers(results: Results) -> Verdict:
    lost = statistics.mean(differences(results["vote-attacked"], results["vote-honest"]))
    text = f"{points(lost)} points ({results['vote-attacked']} with Byzantine clients, {results['vote-honest']} without)"
    return Verdict(
        text, more_accurate(results["vote-honest"], results["vote-attacked"]) and lost < -MARGIN
    )


def bernoulli_helps(results: Results) -> Verdict:
    from fedcomp.strategies.codes import allocation_matrix, mean_redundancy

    mine, vote = results["bernoulli-attacked"], results["vote-attacked"]
    drawn = [
        mean_redundancy(allocation_matrix("bernoulli", 9, 3, 3, run.options.get("seed", 0)))
        for run in mine.runs
    ]
    return Verdict(
        f"{mine} against {vote} without a code, both with Byzantine clients; "
        f"mean redundancy of the drawn codes {statistics.mean(drawn):.2f}",
        more_accurate(mine, vote),
    )


REPRODUCTION = Reproduction(
    name="election",
    title="election coding against a plain majority vote, a third of the voters Byzantine",
    paper=PAPER,
    setting="The data are scikit-learn's digits; the paper trains ResNet-18 on CIFAR-10. n = 9 clients with IID data "
    "take part in each of 60 rounds of one step, with the learning rate 0.01. b = 3 of them are Byzantine and invert "
    "the signs that they send. A code gives each voter the partitions of the data on which it votes, and its "
    "*redundancy* is the mean number of partitions per voter. In the table, *3.8 at (5, 1)* means a redundancy of 3.8 "
    "with n = 5 and b = 1. A Bernoulli code is random; it is drawn again if a voter has no partition, or if a "
    "partition has no voter.",
    full_setting="The model is ResNet-18 with GroupNorm on CIFAR-10. n = 9 clients with IID data take part in each of "
    "20,000 rounds of one step with a batch of 14 examples. The learning rate is 1e-4, as in the paper. b = 3 of the "
    "clients are Byzantine and invert the signs that they send. The server has no momentum, unlike the paper's "
    "server.",
    small=Experiment(
        {
            "task": "digits",
            "clients": 9,
            "participation": 1.0,
            "rounds": 60,
            "local_steps": 1,
            "partition": "iid",
            "lr": 0.01,
        },
        methods(3),
    ),
    full=Experiment(
        {
            "task": "cifar10-resnet18",
            "clients": 9,
            "participation": 1.0,
            "rounds": 20_000,
            "local_steps": 1,
            "batch_size": 14,
            "partition": "iid",
            "lr": 1e-4,
            "weight_decay": 1e-4,
            "augment": True,
            "checkpoint_every": 200,
        },
        methods(3),
        seeds=1,
    ),
    claims=(
        Claim(
            "With n voters and b Byzantine voters, the deterministic code has the same redundancy as in the paper.",
            "deterministic code, r = (n + 2b + 1)/2 − s/n",
            ", ".join(f"{value:g} at {key}" for key, value in REDUNDANCIES.items()),
            redundancy,
        ),
        Claim(
            "With the deterministic code, training with b Byzantine clients gives the same model as without Byzantine clients.",
            "theorem on the deterministic code",
            IN_WORDS,
            unchanged,
        ),
        Claim(
            f"Without a code, b Byzantine clients reduce the accuracy of signSGD (at every seed, by more than "
            f"{100 * MARGIN:g} point on average).",
            "figures",
            IN_WORDS,
            vote_suffers,
        ),
        Claim(
            "Under attack, a vote with a random Bernoulli code of redundancy 3 is more accurate than without a code (at every seed).",
            "figures",
            IN_WORDS,
            bernoulli_helps,
        ),
    ),
    minutes=0.5,
)
