"""The Byzantine clients of a run: who attacks in which round, and which updates of honest clients they see."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ... import seeds
from ...clients.session import ClientHook, context_of
from ...errors import ConfigError
from ...memories import Memory
from ...messages import Assignment, Report
from ...strategies import RoundStrategy
from ...strategies.client_algorithm import ClientAlgorithm
from ...tasks.data import Data
from .base import Attack, Scene, Sender
from .code_aware import heaviest
from .mimic import Mimic

PURPOSE = "attack"  # of what is drawn
NAMED = 8  # clients whose ids are printed


@dataclass
class AttackedRound:
    """What the Byzantine clients know of a round."""

    cohort: frozenset[int]
    attackers: dict[int, Attack]
    honest: dict[int, Tensor] = field(default_factory=dict)  # finite updates [n] by client

    def stack(self) -> tuple[tuple[int, ...], Tensor]:
        """Return the honest clients, ascending, and their updates [h, n]."""
        clients = tuple(sorted(self.honest))
        stack = torch.stack([self.honest[client] for client in clients])
        self.honest = dict(zip(clients, stack, strict=True))  # frees the single updates
        return clients, stack


class ByzantineClients(ClientHook):
    """The virtual Byzantine clients of a run; none without attacks.

    Raises ConfigError for attackers that are not among the clients or that have two attacks.
    """

    def __init__(self, attacks: Sequence[Attack] = (), clients: int = 0, seed: int = 0):
        self.attacks, self.clients, self.seed = attacks, clients, seed
        self.fixed = _assigned(attacks, clients, seed)  # attackers that are the same in all rounds
        self.sees = any(attack.looks for attack in attacks)
        self.needs_whole_cohort = self.sees or any(attack.follows for attack in attacks)
        self.uses_updates = bool(attacks)
        self.algorithm, self.allocation = ClientAlgorithm(), None
        self._rounds: dict[int, AttackedRound] = {}
        self._data: dict[Attack, Data] = {}

    def __str__(self) -> str:
        found = []
        for attack in self.attacks:
            mine = [client for client, other in sorted(self.fixed.items()) if other is attack]
            named = "/".join(map(str, mine[:NAMED])) + (
                f" and {len(mine) - NAMED} more" if len(mine) > NAMED else ""
            )
            found.append(f"{attack.name} {named or f'{attack.size} on the heaviest rows'}")
        return ", ".join(found)

    @property
    def size(self) -> int:
        """Number of Byzantine clients of a round, at most."""
        return sum(attack.size for attack in self.attacks)

    def follow(self, strategy: RoundStrategy, data: Data) -> None:
        """Set the strategy and the clients' data. Raises ConfigError for an attack that cannot work with them."""
        self.algorithm, self.allocation = strategy.client_algorithm, strategy.allocation
        for attack in self.attacks:
            self._data[attack] = attack.data(data)
            if attack.follows and not attack.named and self.allocation is None:
                raise ConfigError(
                    f"attack '{attack.name}' needs an allocation matrix, and the strategy has none; use inverted, or a strategy "
                    "that hands out partitions"
                )

    def attack_of(self, a: Assignment) -> Attack | None:
        """Return the attack of an assignment's client, None for an honest one."""
        seen = self._rounds.get(a.round)
        attackers = seen.attackers if seen and a.client in seen.cohort else self.fixed
        return attackers.get(a.client)

    def generator(self, a: Assignment) -> np.random.Generator:
        """Return the generator of an attacker."""
        return seeds.generator(self.seed, PURPOSE, a.round, a.client)

    # The hook. Groups are attacks; the key of the honest clients is None.

    def on_assignments(self, assignments: Sequence[Assignment]) -> None:
        rounds: dict[int, list[int]] = {}
        for a in assignments:
            rounds.setdefault(a.round, []).append(a.client)
        if rounds:  # else a later phase of a known round
            self._rounds = {round: seen for round, seen in self._rounds.items() if round in rounds}
        for round, cohort in rounds.items():
            if round not in self._rounds or not self._rounds[round].cohort.issuperset(cohort):
                attackers = self._attackers(sorted(cohort))
                self._rounds[round] = AttackedRound(frozenset(cohort), attackers)

    def no_answer_reason(self, assignment: Assignment) -> str:
        attack = self.attack_of(assignment)
        return attack.silent(self.generator(assignment)) if attack else ""

    def groups(
        self, assignments: Sequence[Assignment]
    ) -> list[tuple[Attack | None, list[Assignment]]]:
        """Honest clients come first, since attackers may look at their updates."""
        groups: dict[Attack | None, list[Assignment]] = {None: []}
        for a in assignments:
            groups.setdefault(self.attack_of(a), []).append(a)
        return [(attack, mine) for attack, mine in groups.items() if mine]

    def training_data(self, group: Attack | None, data: Data) -> Data:
        return data if group is None else self._data[group]

    def on_updates(
        self, group: Attack | None, assignments: Sequence[Assignment], updates: Tensor
    ) -> Tensor:
        if group is None and self.sees:
            self._see(assignments, updates)
        if group is None or not len(updates):
            return updates
        seen = self._rounds[assignments[0].round]
        clients, honest = seen.stack() if seen.honest else ((), updates)
        attackers = sum(other is group for other in seen.attackers.values())
        scene = Scene(len(seen.cohort), attackers, clients, honest)
        return group.updates(updates, scene, [self.generator(a) for a in assignments])

    def on_report(self, assignment: Assignment, report: Report, memory: Memory) -> Report:
        attack = self.attack_of(assignment)
        if attack is None:
            return report
        seed = self.algorithm.seed(memory.codec, self.seed, assignment)
        context = replace(context_of(assignment), layout=memory.layout)
        sender = Sender(memory.codec, seed, context, self.generator(assignment), self.algorithm)
        return attack.reply(report, sender)

    def _see(self, assignments: Sequence[Assignment], updates: Tensor) -> None:
        finite = updates.isfinite().all(1).tolist()
        for a, update, is_finite in zip(assignments, updates, finite, strict=True):
            if is_finite:
                self._rounds[a.round].honest[a.client] = update.clone()

    def _attackers(self, cohort: Sequence[int]) -> dict[int, Attack]:
        """Return the attackers of a cohort with their attacks."""
        found = {client: self.fixed[client] for client in cohort if client in self.fixed}
        for attack in self.attacks:
            if attack.follows and not attack.named:
                ranked = heaviest(cohort, self.allocation)
                found |= dict.fromkeys(
                    [client for client in ranked if client not in found][: attack.size], attack
                )
        return found


def _assigned(attacks: Sequence[Attack], clients: int, seed: int) -> dict[int, Attack]:
    """Return the attack of each attacker: clients that are named, and as many others as asked for, drawn from (seed, "attack")."""
    attackers: dict[int, Attack] = {}
    for attack in attacks:
        for client in attack.named:
            if client >= clients:
                raise ConfigError(
                    f"attack '{attack.name}' names client {client}, and the clients are 0 to {clients - 1}; name one of them"
                )
            if client in attackers:
                raise ConfigError(f"client {client} is named by two attacks; keep one")
            attackers[client] = attack
    if (wanted := sum(attack.size for attack in attacks)) > clients:
        raise ConfigError(
            f"--attack has {wanted} Byzantine clients, and there are {clients} clients; give fewer attackers or more --clients"
        )
    if not attacks:
        return {}
    drawn = seeds.generator(seed, PURPOSE).permutation(clients).tolist()
    free = iter([client for client in drawn if client not in attackers])
    for attack in attacks:
        if not attack.named and not attack.follows:
            attackers |= {next(free): attack for _ in range(attack.count)}
    for attack in attacks:
        copied = attack.of if isinstance(attack, Mimic) else None
        if copied is not None and (copied not in range(clients) or copied in attackers):
            raise ConfigError(
                f"attack '{attack.name}' cannot copy client {copied}, which is not honest here; name another in 'of'"
            )
    return attackers
