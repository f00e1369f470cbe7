"""Which examples a client's steps are made on: drawn from the run's seed, the round and the client alone."""

from collections.abc import Sequence

import numpy as np

from .. import seeds
from ..errors import DataError
from ..kernels import samples
from .local_sgd import LocalSGD

TOGETHER, AN_EXAMPLE = (
    20,
    1.5,
)  # so many clients, and so many more for each example of one, repay drawing for all of them at once
MOST = 40  # examples of one, whose draws take a time with their square
PIECE = 512  # clients whose draws are in memory at a time


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
    plans = _planned_together(sgd, shards, seed, rounds_and_whos)
    alone = [i for i in range(len(shards)) if i not in plans]
    drawn = seeds.generators(seed, "batches", [rounds_and_whos[i] for i in alone])
    plans |= {
        i: _planned(sgd, shards[i], generator, rounds_and_whos[i][1])
        for i, generator in zip(alone, drawn, strict=True)
    }
    return [plans[i] for i in range(len(shards))]


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


def _planned_together(
    sgd: LocalSGD,
    shards: Sequence[np.ndarray],
    seed: int,
    rounds_and_whos: Sequence[tuple[int, int]],
) -> dict[int, list[np.ndarray]]:
    """Of clients whose steps are a part of one pass, if they are many, by their places among all."""
    if sgd.epochs:
        return {}
    lengths = np.array([len(shard) for shard in shards])
    sizes = np.minimum(lengths, sgd.batch_size)
    plans = {}
    for size in np.unique(sizes[sizes > 0]).tolist():
        k = sgd.steps * size
        places = np.flatnonzero((sizes == size) & (lengths >= k))
        places = places[samples.serves(lengths[places], k)]
        if k > MOST or places.size < TOGETHER + AN_EXAMPLE * k:
            continue
        for piece in np.split(places, range(PIECE, places.size, PIECE)):
            words = seeds.words(seed, "batches", [rounds_and_whos[i] for i in piece], 2 * k - 1)
            drawn, fair = samples.draw(words, lengths[piece], k)
            steps = drawn.reshape(-1, sgd.steps, size)
            plans |= {
                i: list(shards[i][own])
                for i, own, same in zip(piece.tolist(), steps, fair.tolist(), strict=True)
                if same
            }
    return plans
