"""Partitions of the training examples among the clients: `iid`, `classes:2`, `shards:2`, `dirichlet:0.1` and `natural`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from .. import seeds
from .. import spec as specs
from ..errors import ConfigError, SpecError
from .data import Examples


class Partitioner(Protocol):
    """The interface of partitioners, which assign every example to one client."""

    def owners(self, data: Examples, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the client (0 to clients − 1) of each example, as an array [N]. Raises SpecError if the partitioner does not suit the
        data.
        """


@dataclass(frozen=True)
class IID:
    """Assign examples to clients at random. The clients' numbers of examples differ by at most one."""

    def owners(self, data: Examples, clients: int, rng: np.random.Generator) -> np.ndarray:
        return rng.permutation(len(data)) % clients


@dataclass(frozen=True)
class Classes:
    """Give each client examples of N = `per_client` random classes, about equally many of each class.

    The examples are split into clients × N parts of similar size, each with examples of one class. The clients, in random order, take N
    parts each: one from each of the N classes that have the most parts left. If a class has too few examples for its parts, some clients
    get fewer than N classes. Raises SpecError if there are fewer than N classes, or more than clients × N.

    The partition is similar to that of Sattler et al. 2019. In their partition, a client takes classes with consecutive numbers, and the
    last clients take the remaining examples.
    """

    per_client: int = field(metadata={"example": 2})

    def __post_init__(self) -> None:
        specs.check_ranges(self, per_client=(1, math.inf))

    def owners(self, data: Examples, clients: int, rng: np.random.Generator) -> np.ndarray:
        labels = _classes(data)
        sizes = np.bincount(labels)
        count, per_client = len(sizes), self.per_client
        if per_client > count:
            raise SpecError(f"the data has only {count} classes; give at most classes:{count}")
        if clients * per_client < count:
            raise SpecError(
                f"--clients {clients} would leave out some of the {count} classes; "
                f"give at least classes:{-(-count // clients)} or --clients {-(-count // per_client)}"
            )
        parts = _parts_by_class(sizes, clients * per_client, clients)
        # Number of classes that each client gets.
        n_classes = np.full(clients, parts.sum() // clients)
        n_classes[: parts.sum() % clients] += 1
        clients_of: list[list[int]] = [[] for _ in sizes]  # clients that take a part of each class
        remaining = parts.copy()
        # A client takes from the classes with the most remaining parts, so that later clients find enough classes (Gale 1957, Ryser 1957).
        for client in rng.permutation(clients):
            taken = np.lexsort((rng.random(count), -remaining))[: n_classes[client]]
            remaining[taken] -= 1
            for label in taken:
                clients_of[label].append(client)
        owners = np.empty(len(labels), np.int64)
        for label, size in enumerate(sizes):
            examples = rng.permutation(np.flatnonzero(labels == label))
            owners[examples] = np.array(clients_of[label])[_slices(size, parts[label])]
        return owners


@dataclass(frozen=True)
class Shards:
    """Sort the examples by label, split them into clients × N shards of near-equal size, and draw N = `per_client` shards for each client.

    This is the partition of McMahan et al. 2017.
    """

    per_client: int = field(metadata={"example": 2})

    def __post_init__(self) -> None:
        specs.check_ranges(self, per_client=(1, math.inf))

    def owners(self, data: Examples, clients: int, rng: np.random.Generator) -> np.ndarray:
        labels, shards = _classes(data), clients * self.per_client
        if shards > len(labels):
            raise SpecError(
                f"--clients {clients} requires {shards} shards, but the data has {len(labels)} examples; "
                f"give at most shards:{len(labels) // clients}"
            )
        drawn = rng.permutation(shards) % clients
        owners = np.empty(len(labels), np.int64)
        owners[np.lexsort((rng.random(len(labels)), labels))] = drawn[_slices(len(labels), shards)]
        return owners


@dataclass(frozen=True)
class Dirichlet:
    """Divide each class among the clients by proportions drawn from Dir(alpha). A smaller alpha means more heterogeneous clients.

    Clients also differ in their numbers of examples, as in Yurochkin et al. 2019 and in Flower's DirichletPartitioner with
    self_balancing=False. Each client without examples gets a random example of a client that has at least two.
    """

    alpha: float = field(metadata={"example": 0.1})

    def __post_init__(self) -> None:
        if self.alpha <= 0:
            raise SpecError(
                f"alpha is {self.alpha:g}; give a number above 0, such as dirichlet:0.1"
            )

    def owners(self, data: Examples, clients: int, rng: np.random.Generator) -> np.ndarray:
        labels = _classes(data)
        owners = np.empty(len(labels), np.int64)
        for label, size in enumerate(np.bincount(labels)):
            # Without the random offset, rounding to whole examples would favour some clients.
            ends = np.floor(np.cumsum(self._proportions(clients, rng)) * size + rng.random())
            owners[rng.permutation(np.flatnonzero(labels == label))] = np.searchsorted(
                ends[:-1], np.arange(size), side="right"
            )
        empty = np.flatnonzero(np.bincount(owners, minlength=clients) == 0)
        spare = np.setdiff1d(np.arange(len(owners)), np.unique(owners, return_index=True)[1])
        owners[rng.choice(spare, len(empty), replace=False)] = empty
        return owners

    def _proportions(self, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Draw proportions [clients] from Dir(alpha), computed with logarithms to prevent underflow for a small alpha."""
        logs = (
            np.log(rng.standard_gamma(self.alpha + 1, clients))
            + np.log1p(-rng.random(clients)) / self.alpha
        )
        weights = np.exp(logs - logs.max())
        return weights / weights.sum()


@dataclass(frozen=True)
class Natural:
    """Assign all examples of a group to the same client. Group i in sorted order belongs to client i modulo the number of clients.

    `column` names the column with the group of each example, such as a user id. If `column` is None, the groups are in `Data.groups`. If
    the task gives the data of each client, each of these clients is a group.
    """

    column: str | None = None

    def owners(self, data: Examples, clients: int, rng: np.random.Generator) -> np.ndarray:
        column = data.column(self.column)
        if column is None:
            raise SpecError(
                "the task's data has no groups; name a column, such as natural:column=user_id, or give iid, classes:2 or dirichlet:0.1"
            )
        if len(column) != len(data):
            raise SpecError(
                f"the task's data has {len(data)} examples, but {len(column)} groups; give one group per example"
            )
        names, groups = np.unique(column, return_inverse=True)
        if clients > len(names):
            raise SpecError(
                f"--clients {clients} exceeds the {len(names)} groups of the data; give at most {len(names)}"
            )
        return groups % clients


PARTITIONERS: Mapping[str, type[Partitioner]] = {
    "iid": IID,
    "classes": Classes,
    "shards": Shards,
    "dirichlet": Dirichlet,
    "natural": Natural,
}


def parse_partitioner(text: str) -> Partitioner:
    """Return the partitioner that a text such as "classes:2" describes. Raises SpecError."""
    with specs.error_context(text, "--partition"):
        return specs.build(specs.parse_part(text, "partition"), PARTITIONERS, "partition")


def partition_advice(text: str, data: Examples, clients: int) -> str:
    """Return a warning if the task gives the data of each client, but the options divide the data differently; else an empty string."""
    n = data.n_clients
    if not n or (text == "natural" and clients == n):
        return ""
    if text != "natural":
        how = f"pooled and divided by --partition {text}"
    else:
        how = f"divided among {clients} clients"
    return f"the data of {n} clients is {how}; give --partition natural --clients {n} to keep each client's data"


def partition(
    spec: str, data: Examples, clients: int, seed: int, name: str = "the task"
) -> list[np.ndarray]:
    """Return the examples of each client, as increasing int64 indices into `data`. Each client has at least one example.

    `name` is the name of the data in error messages. Raises SpecError for an unknown partition and for a partition that does not suit the
    data, and ConfigError if there are more clients than examples.
    """
    partitioner = parse_partitioner(spec)
    if clients > len(data):
        raise ConfigError(
            f"--clients {clients} exceeds the {len(data)} examples of {name}; give at most {len(data)}"
        )
    with specs.error_context(spec, "--partition"):
        owners = partitioner.owners(data, clients, seeds.generator(seed, "partition"))
    return _examples_of(owners, clients)


def hold_out(
    shards: Sequence[np.ndarray], fraction: float, seed: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Split the examples of each client into training and held-out examples, and return both as increasing indices.

    Of a client's n examples, about `fraction` × n are held out for evaluation, at least 1 and at most n − 1 (none if n is 1). The random
    choice depends only on the seed and the position of the client in `shards`.
    """
    training, held_out = [], []
    for client, shard in enumerate(shards):
        count = min(max(1, int(fraction * len(shard) + 0.5)), max(0, len(shard) - 1))
        order = seeds.generator(seed, "holdout", index=client).permutation(len(shard))
        training.append(shard[np.sort(order[count:])])
        held_out.append(shard[np.sort(order[:count])])
    return training, held_out


def partition_test_data(
    spec: str, train: Examples, test: Examples, clients: int
) -> list[np.ndarray] | None:
    """Return the test examples of each client, as increasing indices, or None if the test data cannot be divided among the clients.

    Test data can be divided if the partition is `natural` and at least one test example is in a group of the training data. Test examples
    in other groups belong to no client.
    """
    partitioner = parse_partitioner(spec)
    if not isinstance(partitioner, Natural):
        return None
    try:
        test_groups = test.column(partitioner.column)
        train_groups = train.column(partitioner.column)
    except SpecError:
        return None
    if test_groups is None or train_groups is None or len(test_groups) != len(test):
        return None
    owner_of = {name: i % clients for i, name in enumerate(np.unique(train_groups).tolist())}
    owners = np.array([owner_of.get(name, clients) for name in test_groups.tolist()])
    if (owners == clients).all():
        return None
    return _examples_of(owners, clients + 1)[:clients]


def _examples_of(owners: np.ndarray, clients: int) -> list[np.ndarray]:
    """Return the indices of each client's examples, in increasing order. `owners` [N] is the client of each example."""
    ends = np.cumsum(np.bincount(owners, minlength=clients))
    return np.split(np.argsort(owners, kind="stable").astype(np.int64, copy=False), ends[:-1])


def _classes(data: Examples) -> np.ndarray:
    """Return the class of each example as an array [N]. Classes are numbered from 0. Raises SpecError if a target is not one integer."""
    targets = data.labels()
    if targets.ndim != 1 or targets.is_floating_point() or targets.is_complex():
        kind = f"{str(targets.dtype).removeprefix('torch.')} {list(targets.shape)}"
        raise SpecError(
            f"the targets are {kind}, but this partition needs one integer per example as its class; give iid or natural"
        )
    return torch.unique(targets, return_inverse=True)[1].cpu().numpy()


def _slices(size: int, count: int) -> np.ndarray:
    """Divide `size` items, in order, into `count` slices of similar size. Return the index of each item's slice (0 to count − 1)."""
    return np.arange(size) * count // size


def _parts_by_class(sizes: np.ndarray, total: int, max_parts: int) -> np.ndarray:
    """Return the number of parts into which the examples of each class are split.

    The `total` parts are divided among the classes in proportion to their sizes (Webster's method). A class has at least one part, at most
    `max_parts` parts, and at most as many parts as examples. Because of these limits, there may be fewer than `total` parts.
    """
    limits = np.minimum(sizes, max_parts)
    quotients = np.concatenate(
        [size / (np.arange(1, limit) + 0.5) for size, limit in zip(sizes, limits, strict=True)]
    )
    classes = np.repeat(np.arange(len(sizes)), limits - 1)
    chosen = np.argsort(-quotients, kind="stable")[: total - len(sizes)]
    return 1 + np.bincount(classes[chosen], minlength=len(sizes))
