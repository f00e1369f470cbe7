"""Which examples a client's steps are made on: drawn from the run's seed, the round and the client alone."""

from collections.abc import Sequence

import numpy as np

from .. import seeds
from ..errors import DataError
from .local_sgd import LocalSGD


def plan_batches(
    sgd: LocalSGD, shard: np.ndarray, seed: int, round: int, who: int
) -> list[np.ndarray]:
    """The batches of client `who` in a round, each an int64 array of positions from `shard` [s].

    A batch has b = min(batch_size, s) examples. The shard is walked in passes, shuffled anew for each. With `steps`, a pass
    gives ⌊s/b⌋ whole batches and leaves its tail out, so that all batches are of one size; with `epochs`, the tail is the
    last batch of its pass. Drawn from (seed, "batches", round, who) alone. Raises DataError for an empty shard.
    """
    return _planned(sgd, shard, seeds.generator(seed, "batches", round, who), who)


def plan_each(
    sgd: LocalSGD,
    shards: Sequence[np.ndarray],
    seed: int,
    rounds_and_whos: Sequence[tuple[int, int]],
) -> list[list[np.ndarray]]:
    """`plan_batches` of many clients."""
    drawn = seeds.generators(seed, "batches", rounds_and_whos)
    return [
        _planned(sgd, shard, generator, who)
        for shard, generator, (_, who) in zip(shards, drawn, rounds_and_whos, strict=True)
    ]


def _planned(
    sgd: LocalSGD, shard: np.ndarray, generator: np.random.Generator, who: int
) -> list[np.ndarray]:
    if not len(shard):
        raise DataError(
            f"client {who} has no examples; give fewer --clients or another --partition"
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
