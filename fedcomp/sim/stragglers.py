"""Virtual time: how long clients work for a round. Some are always slow, and all are slow now and then."""

from collections.abc import Callable, Sequence

import numpy as np

from .. import seeds
from ..messages import Assignment
from ..strategies.client_algorithm import ClientAlgorithm
from ..training.local_sgd import LocalSGD

SLOWEST = 4.0  # times as slow as the fastest, for good
SWING = 0.5  # of a client's time, up or down, from round to round


def pace(seed: int) -> Callable[[int, int], float]:
    """Seconds for (round, client), drawn from the seed; the fastest take about one."""

    def seconds(round: int, client: int) -> float:
        lasting = seeds.generator(seed, "speed", 0, client).uniform(1.0, SLOWEST)
        return lasting * seeds.generator(seed, "pace", round, client).uniform(
            1.0 - SWING, 1.0 + SWING
        )

    return seconds


def steps_by(
    algorithm: ClientAlgorithm, sgd: LocalSGD, shards: Sequence[np.ndarray]
) -> Callable[[Assignment], int]:
    """How many local steps an assignment takes: of the client's own data, or of all parts that it is to train on."""

    def steps(a: Assignment) -> int:
        if a.phase != algorithm.phases[0]:
            return 0
        told = sgd.as_told(1.0, a.steps, a.batch_size)
        parts = [
            sum(len(shards[client]) for client in part.clients) for part in algorithm.partitions(a)
        ]
        return sum(
            told.epochs * -(-examples // told.batch_size) or told.steps
            for examples in parts or [len(shards[a.client])]
        )

    return steps
