"""The clients of a round: the roster of those that can be reached, and the cohort drawn from it."""

import math
from collections.abc import Iterator, Mapping, Sequence

from .. import seeds


class Numbered(Mapping[int, int]):
    """The roster of clients 0 to n−1, in the order of their nodes. It costs nothing to make, however many they are."""

    def __init__(self, nodes: Sequence[int]):
        self.nodes, self.ids = nodes, range(len(nodes))

    def __getitem__(self, client: int) -> int:
        if client not in self.ids:
            raise KeyError(client)
        return self.nodes[client]

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


def ids(nodes: Mapping[int, int]) -> Sequence[int]:
    """Return the logical ids of a roster."""
    return nodes.ids if isinstance(nodes, Numbered) else list(nodes)


def size(participation: float, clients: int) -> int:
    """Return the size of a cohort: the nearest whole number to the share, at least 2 and at most all clients."""
    return min(clients, max(2, math.floor(participation * clients + 0.5)))


def sample(clients: Sequence[int], participation: float, seed: int, round: int) -> list[int]:
    """Return a cohort of logical ids, drawn without replacement, ascending."""
    return draw(clients, size(participation, len(clients)), seed, round)


def draw(clients: Sequence[int], count: int, seed: int, round: int) -> list[int]:
    """Return `count` logical ids, drawn without replacement, ascending."""
    ordered = clients if isinstance(clients, range) and clients.step > 0 else sorted(clients)
    chosen = seeds.generator(seed, "cohort", round).choice(len(ordered), count, replace=False)
    return sorted(ordered[i] for i in chosen)
