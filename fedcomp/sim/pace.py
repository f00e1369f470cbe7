"""Virtual time: how long a client is at work for a round. Some are slow for good, everybody is slow now and then."""

from collections.abc import Callable

from .. import seeds

SLOWEST = 4.0  # times as slow as the fastest, for good
SWING = 0.5  # of a client's time, up or down, from round to round


def pace(seed: int) -> Callable[[int, int], float]:
    """Seconds for (round, client), drawn from the seed; the fastest take about one."""

    def seconds(round: int, client: int) -> float:
        lasting = seeds.generator(seed, "speed", 0, client).uniform(1.0, SLOWEST)
        return lasting * seeds.generator(seed, "pace", round, client).uniform(1.0 - SWING, 1.0 + SWING)

    return seconds
