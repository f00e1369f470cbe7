"""The batches of a client in a round, and their augmentation, drawn from the run's seed, the round and the client alone."""

from collections.abc import Sequence

import numpy as np

from .. import seeds
from ..errors import DataError
from ..tasks.base import Task
from .local_sgd import LocalSGD


def plan_batches(
    sgd: LocalSGD, shard: np.ndarray, seed: int, round: int, client: int
) -> list[np.ndarray]:
    """Return the batches of a client in a round: for each step an int64 array of positions in the data.

    `shard` [s] holds the positions of the client's examples. Each batch has b = min(batch_size, s) of them. The shard is shuffled
    before each pass over it. With `steps`, a pass has ⌊s/b⌋ batches and omits the remaining examples, so that all batches have the same
    size. With `epochs`, the remaining examples are the last batch of the pass. Raises DataError if the shard is empty.
    """
    return _plan(sgd, shard, seeds.generator(seed, "batches", round, client), client)


def plan_all_batches(
    sgd: LocalSGD,
    shards: Sequence[np.ndarray],
    seed: int,
    rounds_and_clients: Sequence[tuple[int, int]],
) -> list[list[np.ndarray]]:
    """Return `plan_batches` for each client; faster than one call for each."""
    generators = seeds.generators(seed, "batches", rounds_and_clients)
    return [
        _plan(sgd, shard, generator, client)
        for shard, generator, (_, client) in zip(
            shards, generators, rounds_and_clients, strict=True
        )
    ]


def plan_augmentation(
    task: Task, sgd: LocalSGD, batches: Sequence[np.ndarray], seed: int, round: int, client: int
) -> np.ndarray | None:
    """Return the random numbers of augmentation for the examples of all batches, [examples, ...], or None without augmentation.

    They depend on the seed, the round and the client only.
    """
    if not sgd.augment or task.augment is None:
        return None
    return task.augment.draw_for(batches, seed, round, client)


def _plan(
    sgd: LocalSGD, shard: np.ndarray, generator: np.random.Generator, client: int
) -> list[np.ndarray]:
    if not len(shard):
        raise DataError(
            f"client {client} has no examples; give fewer --clients or another --partition"
        )
    size, batches = min(sgd.batch_size, len(shard)), []
    for _ in range(sgd.epochs):
        batches += np.split(shard[generator.permutation(len(shard))], range(size, len(shard), size))
    while not sgd.epochs and len(batches) < sgd.steps:
        whole = min(sgd.steps - len(batches), len(shard) // size)
        batches += list(
            shard[generator.choice(len(shard), whole * size, replace=False)].reshape(whole, size)
        )
    return batches
