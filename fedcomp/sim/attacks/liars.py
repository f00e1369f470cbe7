"""Who lies in a run, and what the liars of a round see."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ... import seeds
from ...errors import ConfigError
from ...messages import Assignment
from ...tasks.base import Data
from .base import Attack, Scene
from .code_aware import Allocated, heaviest
from .mimic import Mimic

PURPOSE = "attack"  # of what is drawn
NAMED = 8  # clients, in a sentence about who lies


@dataclass
class Seen:
    """A round, as its liars know it."""

    cohort: frozenset[int]
    liars: dict[int, Attack]
    honest: dict[int, Tensor] = field(default_factory=dict)  # updates [n], finite, by client
    stacked: tuple[tuple[int, ...], Tensor] | None = (
        None  # the same, as one stack [h, n] in the order of the ids
    )

    def look(self, client: int, update: Tensor) -> None:
        self.honest[client], self.stacked = update.clone(), None

    def stack(self) -> tuple[tuple[int, ...], Tensor]:
        if self.stacked is None:
            clients = tuple(sorted(self.honest))
            self.stacked = clients, torch.stack([self.honest[client] for client in clients])
            self.honest = dict(zip(clients, self.stacked[1], strict=True))  # held once
        return self.stacked


class Liars:
    """The virtual Byzantine clients of a run; without attacks, nobody.

    Raises ConfigError for liars that are not among the clients or lie in two ways.
    """

    def __init__(self, attacks: Sequence[Attack] = (), clients: int = 0, seed: int = 0):
        self.attacks, self.clients, self.seed = attacks, clients, seed
        self.lies = _dealt(attacks, clients, seed)
        self.look = any(attack.looks for attack in attacks)
        self.whole = self.look or any(
            attack.follows for attack in attacks
        )  # a cohort is wanted in one piece
        self.strategy: Allocated | None = None
        self._rounds: dict[int, Seen] = {}
        self._data: dict[Attack, Data] = {}

    def __str__(self) -> str:
        found = []
        for attack in self.attacks:
            mine = [client for client, other in sorted(self.lies.items()) if other is attack]
            named = "/".join(map(str, mine[:NAMED])) + (
                f" and {len(mine) - NAMED} more" if len(mine) > NAMED else ""
            )
            found.append(f"{attack.name} {named or f'{attack.size} on the heaviest rows'}")
        return ", ".join(found)

    @property
    def size(self) -> int:
        """How many lie in a round at most."""
        return sum(attack.size for attack in self.attacks)

    def follow(self, strategy: Allocated, data: Data) -> None:
        """Know what the strategy hands out, and what clients train on. Raises ConfigError for what an attack cannot work with."""
        self.strategy = strategy
        for attack in self.attacks:
            self._data[attack] = attack.data(data)
            if attack.follows and not attack.named and strategy.allocation is None:
                raise ConfigError(
                    f"attack '{attack.name}' goes by an allocation matrix, and the strategy has none; use inverted, or a "
                    "strategy that hands out partitions"
                )

    def meet(self, assignments: Sequence[Assignment]) -> None:
        """A cohort was asked, in the phase that opens a round; whoever of it is asked again belongs to it already."""
        rounds: dict[int, list[int]] = {}
        for a in assignments:
            rounds.setdefault(a.round, []).append(a.client)
        if rounds:  # else a later phase of those that are known
            self._rounds = {round: seen for round, seen in self._rounds.items() if round in rounds}
        for round, cohort in rounds.items():
            if round not in self._rounds or not self._rounds[round].cohort.issuperset(cohort):
                self._rounds[round] = Seen(frozenset(cohort), self._of(sorted(cohort)))

    def lie(self, a: Assignment) -> Attack | None:
        """How the client of an assignment lies, None if it does not."""
        seen = self._rounds.get(a.round)
        return (seen.liars if seen and a.client in seen.cohort else self.lies).get(a.client)

    def silence(self, a: Assignment) -> str:
        """Why a client does not answer; "" where it does."""
        attack = self.lie(a)
        return attack.silent(self.generator(a)) if attack else ""

    def groups(
        self, assignments: Sequence[Assignment]
    ) -> list[tuple[Attack | None, list[Assignment]]]:
        """Assignments by what is done with them: first the honest, under None, since others may look at what these have trained."""
        groups: dict[Attack | None, list[Assignment]] = {None: []}
        for a in assignments:
            groups.setdefault(self.lie(a), []).append(a)
        return [(attack, mine) for attack, mine in groups.items() if mine]

    def data(self, attack: Attack | None, data: Data) -> Data:
        """What clients train on in place of `data`."""
        return data if attack is None else self._data[attack]

    def changed(self, attack: Attack | None, asked: Sequence[Assignment], x: Tensor) -> Tensor:
        """The updates [k, n] that clients give to their memories, of what they have trained, x, which may be overwritten."""
        if attack is None:
            if self.look:
                self._look(asked, x)
            return x
        if not len(x):
            return x
        seen = self._rounds[asked[0].round]
        clients, honest = seen.stack() if seen.honest else ((), x)
        liars = sum(other is attack for other in seen.liars.values())
        return attack.updates(
            x, Scene(len(seen.cohort), liars, clients, honest), [self.generator(a) for a in asked]
        )

    def generator(self, a: Assignment) -> np.random.Generator:
        """What a liar draws from."""
        return seeds.generator(self.seed, PURPOSE, a.round, a.client)

    def _look(self, asked: Sequence[Assignment], x: Tensor) -> None:
        for a, row, finite in zip(asked, x, x.isfinite().all(1).tolist(), strict=True):
            if finite:
                self._rounds[a.round].look(a.client, row)

    def _of(self, cohort: Sequence[int]) -> dict[int, Attack]:
        """Who of a cohort lies."""
        found = {client: self.lies[client] for client in cohort if client in self.lies}
        for attack in self.attacks:
            if attack.follows and not attack.named:
                ranked = heaviest(cohort, self.strategy.allocation)
                found |= dict.fromkeys(
                    [client for client in ranked if client not in found][: attack.size], attack
                )
        return found


def _dealt(attacks: Sequence[Attack], clients: int, seed: int) -> dict[int, Attack]:
    """Who lies how: those who are named, and of the others as many as are asked for, drawn from (seed, "attack")."""
    lies: dict[int, Attack] = {}
    for attack in attacks:
        for client in attack.named:
            if client >= clients:
                raise ConfigError(
                    f"attack '{attack.name}' names client {client}, and the clients are 0 to {clients - 1}; name one of them"
                )
            if client in lies:
                raise ConfigError(f"client {client} is named by two attacks; keep one")
            lies[client] = attack
    if (wanted := sum(attack.size for attack in attacks)) > clients:
        raise ConfigError(
            f"--attack has {wanted} liars, and there are {clients} clients; give fewer liars or more --clients"
        )
    free = iter(
        [int(c) for c in seeds.generator(seed, PURPOSE).permutation(clients) if int(c) not in lies]
        if attacks
        else ()
    )
    for attack in attacks:
        if not attack.named and not attack.follows:
            lies |= {next(free): attack for _ in range(attack.count)}
    for attack in attacks:
        if (
            isinstance(attack, Mimic)
            and attack.of is not None
            and (attack.of not in range(clients) or attack.of in lies)
        ):
            raise ConfigError(
                f"attack '{attack.name}' is to copy client {attack.of}, who is no honest one here; name another in 'of'"
            )
    return lies
