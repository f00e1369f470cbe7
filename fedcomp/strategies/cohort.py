"""The size of a cohort and its random selection from the connected clients."""

import math
from collections.abc import Sequence

from .. import seeds


def cohort_size(participation: float, clients: int) -> int:
    """Return participation · clients, rounded, at least 2 and at most all clients."""
    return min(clients, max(2, math.floor(participation * clients + 0.5)))


def sample_cohort(clients: Sequence[int], participation: float, seed: int, round: int) -> list[int]:
    """Return a cohort of logical ids, drawn without replacement, ascending."""
    return draw_cohort(clients, cohort_size(participation, len(clients)), seed, round)


def draw_cohort(clients: Sequence[int], count: int, seed: int, round: int) -> list[int]:
    """Return `count` logical ids, drawn without replacement, ascending."""
    ordered = clients if isinstance(clients, range) and clients.step > 0 else sorted(clients)
    chosen = seeds.generator(seed, "cohort", round).choice(len(ordered), count, replace=False)
    return sorted(ordered[i] for i in chosen)
