"""How clients share the training examples: `iid`, `classes:2`, `shards:2`, `dirichlet:0.1`, `natural`.

Every rule gives each example one owner, so that a partition is an exact cover, whatever is drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from .. import seeds
from .. import spec as specs
from ..errors import ConfigError
from .data import Examples


class Rule(Protocol):
    def owners(self, data: Examples, clients: int, rng: np.random.Generator) -> np.ndarray:
        """The client, 0..clients-1, of each example: [N]. Raises ConfigError where data and rule do not go together."""


@dataclass(frozen=True)
class IID:
    """At random; sizes differ by one at most."""

    def owners(self, data: Examples, clients: int, rng: np.random.Generator) -> np.ndarray:
        return rng.permutation(len(data)) % clients


@dataclass(frozen=True)
class Classes:
    """Every client holds examples of exactly N classes, at random which, and of each about as many.

    As in Sattler et al. 2019, whose clients take neighbouring classes and, late ones, what is left. Here each class is cut into a
    number of near-equal parts, by its size, so that all clients × N parts are about as large; a client then takes parts of those N
    classes that have most left. Sizes differ as far as whole parts of unequal classes do. Where examples
    run out, some clients hold fewer classes; where clients × N is less than the number of classes, that is an error.
    """

    per_client: int

    def __post_init__(self) -> None:
        if self.per_client < 1:
            raise ConfigError(
                f"--partition classes:{self.per_client} leaves clients without data; give classes:1 or more"
            )

    def owners(self, data: Examples, clients: int, rng: np.random.Generator) -> np.ndarray:
        labels = _labels(data, f"classes:{self.per_client}")
        sizes = np.bincount(labels)
        count, share = len(sizes), self.per_client
        if share > count:
            raise ConfigError(
                f"--partition classes:{share} asks for more than the {count} classes there are; give at most classes:{count}"
            )
        if clients * share < count:
            raise ConfigError(
                f"--partition classes:{share} with --clients {clients} would leave out some of the {count} classes; "
                f"give at least classes:{-(-count // clients)} or --clients {-(-count // share)}"
            )
        parts = _apportion(sizes, clients * share, clients)
        wanted = np.full(clients, parts.sum() // clients)
        wanted[: parts.sum() % clients] += 1
        holders: list[list[int]] = [[] for _ in sizes]
        left = parts.copy()
        for client in rng.permutation(
            clients
        ):  # most left first: this order never runs into a dead end (Gale 1957, Ryser 1957)
            taken = np.lexsort((rng.random(count), -left))[: wanted[client]]
            left[taken] -= 1
            for label in taken:
                holders[label].append(client)
        owners = np.empty(len(labels), np.int64)
        for label, size in enumerate(sizes):
            owners[rng.permutation(np.flatnonzero(labels == label))] = np.array(holders[label])[
                _slices(size, parts[label])
            ]
        return owners


@dataclass(frozen=True)
class Shards:
    """McMahan et al. 2017: sorted by label, cut into clients × N shards of near-equal size, N of them drawn for each client."""

    per_client: int

    def __post_init__(self) -> None:
        if self.per_client < 1:
            raise ConfigError(
                f"--partition shards:{self.per_client} leaves clients without data; give shards:1 or more"
            )

    def owners(self, data: Examples, clients: int, rng: np.random.Generator) -> np.ndarray:
        labels, shards = _labels(data, f"shards:{self.per_client}"), clients * self.per_client
        if shards > len(labels):
            raise ConfigError(
                f"--partition shards:{self.per_client} with --clients {clients} makes more shards than the {len(labels)} "
                f"examples; give at most shards:{len(labels) // clients}"
            )
        drawn = rng.permutation(shards) % clients
        owners = np.empty(len(labels), np.int64)
        owners[np.lexsort((rng.random(len(labels)), labels))] = drawn[_slices(len(labels), shards)]
        return owners


@dataclass(frozen=True)
class Dirichlet:
    """Each class is shared out by proportions over the clients drawn from Dir(alpha): the smaller, the more unlike are clients.

    As in Yurochkin et al. 2019 and Flower's DirichletPartitioner without balancing: sizes are unequal too. A client that
    comes away with nothing is given one example, drawn from those that leave their owner another.
    """

    alpha: float

    def __post_init__(self) -> None:
        if self.alpha <= 0:
            raise ConfigError(
                f"--partition dirichlet:{self.alpha:g} is no concentration; give more than 0, such as dirichlet:0.1"
            )

    def owners(self, data: Examples, clients: int, rng: np.random.Generator) -> np.ndarray:
        labels = _labels(data, f"dirichlet:{self.alpha:g}")
        owners = np.empty(len(labels), np.int64)
        for label, size in enumerate(np.bincount(labels)):
            ends = np.floor(
                np.cumsum(self._proportions(clients, rng)) * size + rng.random()
            )  # the draw: rounding favours no client
            owners[rng.permutation(np.flatnonzero(labels == label))] = np.searchsorted(
                ends[:-1], np.arange(size), side="right"
            )
        empty = np.flatnonzero(np.bincount(owners, minlength=clients) == 0)
        spare = np.setdiff1d(np.arange(len(owners)), np.unique(owners, return_index=True)[1])
        owners[rng.choice(spare, len(empty), replace=False)] = empty
        return owners

    def _proportions(self, clients: int, rng: np.random.Generator) -> np.ndarray:
        """A draw [clients] from Dir(alpha), by logarithms: a small alpha gives gammas below the least float."""
        logs = (
            np.log(rng.standard_gamma(self.alpha + 1, clients))
            + np.log1p(-rng.random(clients)) / self.alpha
        )
        shares = np.exp(logs - logs.max())
        return shares / shares.sum()


@dataclass(frozen=True)
class Natural:
    """By the data's own groups, in sorted order: a group for each client; with fewer clients, the g-th group goes to client g mod clients.

    `column` names the column that holds the group of each example, such as a user's id; None for the groups that the data has itself, as
    data given as a list or dict of clients has.
    """

    column: str | None = None

    def owners(self, data: Examples, clients: int, rng: np.random.Generator) -> np.ndarray:
        column = data.column(self.column)
        if column is None:
            raise ConfigError(
                "--partition natural needs data with groups, and this task's has none; name a column, such as "
                "natural:column=user_id, or give iid, classes:2 or dirichlet:0.1"
            )
        if len(column) != len(data):
            raise ConfigError(
                f"--partition natural needs a group for each of the {len(data)} examples, and the task's data has "
                f"{len(column)}; make groups as long as inputs"
            )
        names, groups = np.unique(column, return_inverse=True)
        if clients > len(names):
            raise ConfigError(
                f"--clients {clients} is more than the {len(names)} groups of --partition natural; give at most {len(names)}"
            )
        return groups % clients


RULES: Mapping[str, type[Rule]] = {
    "iid": IID,
    "classes": Classes,
    "shards": Shards,
    "dirichlet": Dirichlet,
    "natural": Natural,
}


def rule(text: str) -> Rule:
    """The rule that a spec string names. Raises SpecError or ConfigError."""
    with specs.error_context(text, "--partition"):
        return specs.build(specs.parse_part(text, "partition"), RULES, "partition")


def partition(
    spec: str, data: Examples, clients: int, seed: int, name: str = "the task"
) -> list[np.ndarray]:
    """The examples of each client, as increasing int64 indices into `data`: every example once, every client at least one.

    The same for the same arguments. `name` stands for the data in messages. Raises SpecError for an unknown rule, ConfigError where it
    does not go together with the data or the number of clients.
    """
    chosen = rule(spec)
    if clients < 1:
        raise ConfigError(f"--clients is {clients}; give at least 1")
    if clients > len(data):
        raise ConfigError(
            f"--clients {clients} is more than the {len(data)} examples of {name}; give at most {len(data)}"
        )
    owners = chosen.owners(data, clients, seeds.generator(seed, "partition"))
    ends = np.cumsum(np.bincount(owners, minlength=clients))
    return np.split(np.argsort(owners, kind="stable").astype(np.int64, copy=False), ends[:-1])


def hold_out(
    shards: Sequence[np.ndarray], share: float, seed: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Split the examples of each client into those that it trains on and those that it evaluates on, both increasing.

    `share` of n examples are held out, rounded, at least 1 and at most n − 1; of a single example, none. Drawn from (seed, "holdout",
    position of the client in `shards`).
    """
    kept, held = [], []
    drawn = seeds.generators(seed, "holdout", [(0, client) for client in range(len(shards))])
    for shard, generator in zip(shards, drawn, strict=True):
        count = min(max(1, int(share * len(shard) + 0.5)), max(0, len(shard) - 1))
        order = generator.permutation(len(shard))
        kept.append(shard[np.sort(order[count:])])
        held.append(shard[np.sort(order[:count])])
    return kept, held


def shards_of_test(
    spec: str, train: Examples, test: Examples, clients: int
) -> list[np.ndarray] | None:
    """Return the test examples of each client, increasing, where the test data has the groups that `natural` partitions the training
    data by; None for other partitions and other test data. Groups without training examples belong to no client.
    """
    chosen = rule(spec)
    if not isinstance(chosen, Natural):
        return None
    try:
        mine, column = test.column(chosen.column), train.column(chosen.column)
    except ConfigError:
        return None
    if mine is None or column is None or len(mine) != len(test):
        return None
    position = {name: number for number, name in enumerate(np.unique(column).tolist())}
    owners = np.array([position.get(name, -1) for name in mine.tolist()])
    if (owners < 0).all():
        return None
    owners = np.where(owners < 0, clients, owners % clients)
    ends = np.cumsum(np.bincount(owners, minlength=clients + 1))
    return np.split(np.argsort(owners, kind="stable"), ends[:-1])[:clients]


def _labels(data: Examples, what: str) -> np.ndarray:
    """The class of each example as 0..classes-1: [N]."""
    targets = data.labels()
    if targets.ndim != 1 or targets.is_floating_point() or targets.is_complex():
        kind = f"{str(targets.dtype).removeprefix('torch.')} {list(targets.shape)}"
        raise ConfigError(
            f"--partition {what} needs one whole number per example as its class, and the targets are {kind}; "
            "give iid or natural"
        )
    return torch.unique(targets, return_inverse=True)[1].cpu().numpy()


def _slices(size: int, count: int) -> np.ndarray:
    """The number 0..count-1 of the slice that each of `size` positions falls in, slices near-equal and none empty: [size]."""
    return np.arange(size) * count // size


def _apportion(sizes: np.ndarray, total: int, most: int) -> np.ndarray:
    """`total` parts over classes by their sizes, each class at least one and at most `most` or its size (Webster's method): [classes].

    Sums to less than `total` where sizes allow no more.
    """
    limits = np.minimum(sizes, most)
    claims = np.concatenate(
        [size / (np.arange(1, limit) + 0.5) for size, limit in zip(sizes, limits, strict=True)]
    )
    owners = np.repeat(np.arange(len(sizes)), limits - 1)
    granted = np.argsort(-claims, kind="stable")[: total - len(sizes)]
    return 1 + np.bincount(owners[granted], minlength=len(sizes))
