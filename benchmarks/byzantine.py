"""Accuracy by number of Byzantine clients, for every strategy and attack.

    FEDCOMP_DATA=... python benchmarks/byzantine.py [--task digits mnist-logreg] [--clients 9 15] [--byzantine 0 1 2 3 4] [--attack ...]
                                                [--strategy ...] [--rounds N] [--seeds N] [--picture byzantine.svg]

All clients take part in every round. `mean` is uncompressed federated averaging. `vote` is signSGD with majority vote. `election` is a
majority vote in which several clients train on each data partition (`election:form=data`); its deterministic code tolerates the given
number of Byzantine clients. `bernoulli` is `election` with a random code, which assigns each partition to 3 clients on average. The robust
rules, such as `median` and `krum`, get uncompressed updates and know the number of Byzantine clients. "–" marks combinations that a
strategy refuses. The learning rate of the voting strategies was chosen without Byzantine clients. The last table shows the percentage
points of accuracy that each strategy loses to the worst attack; the deterministic code guarantees a loss of 0.
"""

import argparse
import itertools
import statistics
import tempfile
import warnings
from dataclasses import replace

from fedcomp import RunConfig, UserError
from fedcomp.sim import simulate

UNCOMPRESSED = {
    "uplink": "identity",
    "downlink": "identity",
    "memory": "none",
    "downlink_memory": "none",
}
# Learning rates of the voting strategies, by task.
VOTE_RATES = {"digits": 0.01, "mnist-logreg": 0.002}
# Learning rates of all other strategies, by task.
AVERAGE_RATES = {"digits": 0.5, "mnist-logreg": 0.2}
ROUNDS = {"digits": 40, "mnist-logreg": 60}
RULES = ("median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "centered-clipping")
STRATEGIES = ("mean", "vote", "election", "bernoulli", *RULES, "median+mix")
ATTACKS = ("inverted", "rescaled", "random-sign", "constant", "gaussian", "infinity", "label-flip", "alie", "ipm", "mimic", "low-margin",
           "code-aware")  # fmt: skip
PANELS_PER_ROW = 4
# Strategies with the allocation matrix that the attack `code-aware` needs.
CODED = ("election", "bernoulli")


def options(name: str, byzantine: int) -> dict[str, object]:
    """Return the options of a run whose strategy tolerates `byzantine` Byzantine clients."""
    expected = max(1, byzantine)
    if name == "mean":
        return {"strategy": "average", **UNCOMPRESSED}
    if name == "vote":
        return {"strategy": "vote"}
    if name == "election":
        return {"strategy": f"election:byzantine={expected}"}
    if name == "bernoulli":
        return {"strategy": f"election:code=bernoulli,byzantine={expected},redundancy=3"}
    rule, _, mix = name.partition("+")
    return {"strategy": f"{rule}:f={expected}" + ",mix=true" * bool(mix), **UNCOMPRESSED}


def accuracy(
    task: str, clients: int, name: str, attack: str, byzantine: int, rounds: int, seeds: range
) -> float | None:
    """Return the accuracy after the last round, averaged over seeds, or None if the strategy rejects the options."""
    lr = (VOTE_RATES if name in ("vote", *CODED) else AVERAGE_RATES)[task]
    config = RunConfig(task=task, clients=clients, participation=1.0, rounds=rounds, local_steps=1, lr=lr, eval_every=rounds,
                       checkpoint_every=rounds, partition="iid", attack=f"{attack}:{byzantine}" if byzantine else None)  # fmt: skip
    accuracies = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            try:
                accuracies.append(
                    simulate(
                        replace(config, **options(name, byzantine), seed=seed, out=f"{folder}/run")
                    ).accuracy
                )
            except UserError:
                return None
    return statistics.mean(accuracies)


def percent(accuracy: float | None) -> str:
    return f"{'–':>8}" if accuracy is None else f"{100 * accuracy:7.1f}%"


# maps (attack, strategy) to the accuracy for each number of Byzantine clients
Table = dict[tuple[str, str], list[float | None]]


def measure(task: str, clients: int, args: argparse.Namespace, rounds: int) -> Table:
    counts = [byzantine for byzantine in args.byzantine if 2 * byzantine < clients]
    print(
        f"{task}: {clients} clients, {rounds} rounds, seeds 0 to {args.seeds - 1}; accuracy by number of Byzantine clients\n"
    )
    print(f"{'':34}" + "".join(f"{byzantine:>8}" for byzantine in counts), flush=True)
    table: Table = {}
    honest = {
        name: accuracy(task, clients, name, "inverted", 0, rounds, range(args.seeds))
        for name in args.strategy
    }
    for attack, name in itertools.product(args.attack, args.strategy):
        if attack == "code-aware" and name not in CODED:
            continue
        row = [
            accuracy(task, clients, name, attack, n, rounds, range(args.seeds))
            if n
            else honest[name]
            for n in counts
        ]
        table[attack, name] = row
        print(f"{attack:16}{name:18}" + "".join(map(percent, row)), flush=True)
    print(
        f"\nmaximum loss of accuracy over these attacks, in percentage points, by number of Byzantine clients\n{'':34}"
        + "".join(f"{byzantine:>8}" for byzantine in counts)
    )
    for name in args.strategy:
        columns = zip(*(row for (_, other), row in table.items() if other == name), strict=True)
        lost = [
            max(
                (100 * (honest[name] - value) for value in column if value is not None),
                default=None,
            )
            for column in columns
        ]
        print(
            f"{name:34}"
            + "".join(f"{'–':>8}" if points is None else f"{points:8.1f}" for points in lost)
        )
    print(flush=True)
    return table


def draw(tables: dict[str, tuple[list[int], Table]], path: str) -> None:
    """Plot accuracy by number of Byzantine clients, with a panel for each attack and a line for each strategy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [
        (title, attack)
        for title, (_, table) in tables.items()
        for attack in dict.fromkeys(attack for attack, _ in table)
    ]
    names = list(dict.fromkeys(name for _, table in tables.values() for _, name in table))
    styles = dict(
        zip(names, itertools.cycle(itertools.product(("-", "--", ":"), ("o", "s", "^", "x", "D"))))
    )
    rows = -(-len(panels) // PANELS_PER_ROW)
    figure, axes = pyplot.subplots(
        rows,
        PANELS_PER_ROW,
        figsize=(3 * PANELS_PER_ROW, 2.6 * rows + 0.8),
        sharey=True,
        squeeze=False,
    )
    for panel, (title, attack) in itertools.zip_longest(axes.flat, panels, fillvalue=("", "")):
        panel.set_visible(bool(attack))
        if not attack:
            continue
        counts, table = tables[title]
        panel.set_title(f"{title}: {attack}" if len(tables) > 1 else attack, fontsize=9)
        panel.set_ylim(0, 1)
        panel.set_xticks(counts)
        panel.grid(alpha=0.3)
        for name in names:
            if (attack, name) in table:
                line, mark = styles[name]
                colour = f"C{names.index(name)}"
                shares = [float("nan") if value is None else value for value in table[attack, name]]
                panel.plot(
                    counts,
                    shares,
                    line,
                    color=colour,
                    marker=mark,
                    markersize=4,
                    linewidth=1.2,
                    label=name,
                )
    for panel in axes[:, 0]:
        panel.set_ylabel("accuracy", fontsize=9)
    for panel in axes[-1]:
        panel.set_xlabel("Byzantine clients", fontsize=9)
    handles = {
        label: handle
        for panel in axes.flat
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="lower center",
        ncols=min(6, len(handles)),
        fontsize=8,
        frameon=False,
    )
    figure.suptitle(", ".join(tables), fontsize=10)
    figure.tight_layout(rect=(0, 0.6 / figure.get_figheight(), 1, 1))
    figure.savefig(path)
    print(f"picture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", nargs="+", choices=list(ROUNDS), default=["digits"])
    parser.add_argument("--clients", nargs="+", type=int, default=[9])
    parser.add_argument("--byzantine", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--attack", nargs="+", choices=ATTACKS, default=ATTACKS)
    parser.add_argument("--strategy", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--picture", help="plot the accuracies into this image file, such as byzantine.svg"
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    tables = {}
    for task, clients in itertools.product(args.task, args.clients):
        table = measure(task, clients, args, args.rounds or ROUNDS[task])
        tables[f"{task}, {clients} clients"] = (
            [n for n in args.byzantine if 2 * n < clients],
            table,
        )
    if args.picture:
        draw(tables, args.picture)


if __name__ == "__main__":
    main()
