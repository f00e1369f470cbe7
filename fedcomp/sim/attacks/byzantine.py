"""The Byzantine clients of a run: which clients attack in a round, and the honest updates that their attacks read."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import seeds
from ...clients.session import ClientHook, context_of
from ...errors import ConfigError
from ...memories import Memory
from ...messages import Assignment, Report
from ...strategies import RoundStrategy
from ...strategies.base import ClientAlgorithm
from ...tasks.data import Examples
from .base import Attack, ReplyContext, UpdateContext
from .code_aware import rank_by_row_weight
from .mimic import Mimic

SEED_PURPOSE = "attack"
MAX_LISTED = 8  # maximum number of client ids in the description of an attack


@dataclass
class AttackedCohort:
    """The cohort of a round, its attackers with their attacks, and the honest updates that have been computed so far."""

    cohort: frozenset[int]  # client ids
    attackers: dict[int, Attack]  # by client id
    honest: dict[int, Tensor] = field(default_factory=dict)  # finite updates [numel] by client id

    def stack_honest(self) -> tuple[tuple[int, ...], Tensor]:
        """Return the ids of the honest clients, in ascending order, and a matrix [honest clients, numel] of their updates."""
        clients = tuple(sorted(self.honest))
        stack = torch.stack([self.honest[client] for client in clients])
        # Keep only the rows of `stack`, so that each update is in memory only once.
        self.honest = dict(zip(clients, stack, strict=True))
        return clients, stack


class ByzantineClients(ClientHook):
    """The virtual Byzantine clients of a run. Raises ConfigError if an attacker is not a client of the run or has two attacks."""

    def __init__(self, attacks: Sequence[Attack] = (), clients: int = 0, seed: int = 0):
        self.attacks, self.clients, self.seed = attacks, clients, seed
        # The clients that attack in all rounds, with their attacks.
        self.fixed = _assign_clients(attacks, clients, seed)
        self.uses_honest_updates = any(attack.uses_honest_updates for attack in attacks)
        uses_allocation = any(attack.uses_allocation for attack in attacks)
        self.needs_whole_cohort = self.uses_honest_updates or uses_allocation
        self.algorithm = ClientAlgorithm()
        self.strategy: RoundStrategy | None = None
        self._rounds: dict[int, AttackedCohort] = {}
        self._data: dict[Attack, Examples] = {}

    def __str__(self) -> str:
        descriptions = []
        for attack in self.attacks:
            attackers = [c for c, other in sorted(self.fixed.items()) if other is attack]
            ids = "/".join(map(str, attackers[:MAX_LISTED]))
            if len(attackers) > MAX_LISTED:
                ids += f" and {len(attackers) - MAX_LISTED} more"
            descriptions.append(
                f"{attack.name} {ids or f'{attack.size} clients with the most data partitions'}"
            )
        return ", ".join(descriptions)

    @property
    def size(self) -> int:
        """The number of Byzantine clients."""
        return sum(attack.size for attack in self.attacks)

    def set_strategy(self, strategy: RoundStrategy, data: Examples) -> None:
        """Set the strategy and the clients' training data. Raises ConfigError if an attack does not support the strategy or the data."""
        self.algorithm, self.strategy = strategy.client_algorithm, strategy
        for attack in self.attacks:
            self._data[attack] = attack.data(data)
            if attack.uses_allocation and not attack.named_clients and strategy.allocation is None:
                raise ConfigError(
                    f"attack '{attack.name}' needs an allocation matrix, but the strategy has none; use the attack 'inverted', or a "
                    "strategy that assigns data partitions, such as election"
                )

    def attack_of(self, a: Assignment) -> Attack | None:
        """Return the attack of the client of assignment `a`, or None if the client is honest."""
        attacked = self._rounds.get(a.round)
        attackers = attacked.attackers if attacked and a.client in attacked.cohort else self.fixed
        return attackers.get(a.client)

    def generator(self, a: Assignment) -> np.random.Generator:
        return seeds.generator(self.seed, SEED_PURPOSE, a.round, a.client)

    # The methods below implement ClientHook. Clients are grouped by their attack, which is the name of the group. The name of the group of
    # honest clients is None.

    def on_assignments(self, assignments: Sequence[Assignment]) -> None:
        rounds: dict[int, list[int]] = {}
        for a in assignments:
            rounds.setdefault(a.round, []).append(a.client)
        if rounds:  # not in later phases of a round, which have no assignments
            self._rounds = {r: attacked for r, attacked in self._rounds.items() if r in rounds}
        for round, cohort in rounds.items():
            if round not in self._rounds or not self._rounds[round].cohort.issuperset(cohort):
                attackers = self._attackers(sorted(cohort))
                self._rounds[round] = AttackedCohort(frozenset(cohort), attackers)

    def no_answer_reason(self, assignment: Assignment) -> str:
        attack = self.attack_of(assignment)
        return attack.silence_reason(self.generator(assignment)) if attack else ""

    def groups(self, assignments: Sequence[Assignment]) -> list[tuple[Any, list[Assignment]]]:
        """Return the assignments, grouped by attack. The honest clients come first, since attacks may read their updates."""
        groups: dict[Attack | None, list[Assignment]] = {None: []}
        for a in assignments:
            groups.setdefault(self.attack_of(a), []).append(a)
        return [(attack, group) for attack, group in groups.items() if group]

    def training_data(self, group: Attack | None, data: Examples) -> Examples:
        return data if group is None else self._data[group]

    def on_updates(
        self, group: Attack | None, assignments: Sequence[Assignment], updates: Tensor
    ) -> Tensor:
        if group is None and self.uses_honest_updates:
            self._record_honest_updates(assignments, updates)
        if group is None or not len(updates):
            return updates
        attacked = self._rounds[assignments[0].round]
        clients, honest = attacked.stack_honest() if attacked.honest else ((), updates)
        n_byzantine = sum(other is group for other in attacked.attackers.values())
        context = UpdateContext(len(attacked.cohort), n_byzantine, clients, honest)
        return group.updates(updates, context, [self.generator(a) for a in assignments])

    def on_report(self, assignment: Assignment, report: Report, memory: Memory) -> Report:
        attack = self.attack_of(assignment)
        if attack is None:
            return report
        seed = self.algorithm.seed(memory.codec, self.seed, assignment)
        codec_context = replace(context_of(assignment), layout=memory.layout)
        context = ReplyContext(
            memory.codec, seed, codec_context, self.generator(assignment), self.algorithm
        )
        return attack.reply(report, context)

    def _record_honest_updates(self, assignments: Sequence[Assignment], updates: Tensor) -> None:
        finite = updates.isfinite().all(1).tolist()
        for a, update, is_finite in zip(assignments, updates, finite, strict=True):
            if is_finite:
                self._rounds[a.round].honest[a.client] = update.clone()

    def _attackers(self, cohort: Sequence[int]) -> dict[int, Attack]:
        attackers = {client: self.fixed[client] for client in cohort if client in self.fixed}
        allocation = self.strategy.allocation if self.strategy else None  # matrix of this round
        for attack in self.attacks:
            if attack.uses_allocation and not attack.named_clients and allocation is not None:
                ranked = rank_by_row_weight(cohort, allocation)
                free = [client for client in ranked if client not in attackers]
                attackers |= dict.fromkeys(free[: attack.size], attack)
        return attackers


def _assign_clients(attacks: Sequence[Attack], clients: int, seed: int) -> dict[int, Attack]:
    """Return the attack of each Byzantine client. The option `clients` names them, or they are drawn at random.

    The result omits attacks with `uses_allocation` that name no clients, because their clients are chosen in each round.
    """
    attackers: dict[int, Attack] = {}
    for attack in attacks:
        for client in attack.named_clients:
            if client >= clients:
                raise ConfigError(
                    f"--attack {attack.name} names client {client}, but the clients are 0 to {clients - 1}; name one of them"
                )
            if client in attackers:
                raise ConfigError(
                    f"--attack names client {client} in two attacks; remove it from one of them"
                )
            attackers[client] = attack
    if (needed := sum(attack.size for attack in attacks)) > clients:
        raise ConfigError(
            f"--attack has {needed} Byzantine clients, but --clients is {clients}; give fewer attackers or more --clients"
        )
    if not attacks:
        return {}
    drawn = seeds.generator(seed, SEED_PURPOSE).permutation(clients).tolist()
    free = iter([client for client in drawn if client not in attackers])
    for attack in attacks:
        if not attack.named_clients and not attack.uses_allocation:
            attackers |= {next(free): attack for _ in range(attack.count)}
    for attack in attacks:
        copied = attack.of if isinstance(attack, Mimic) else None
        if copied is not None and (copied not in range(clients) or copied in attackers):
            raise ConfigError(
                f"--attack {attack.name} cannot copy client {copied}, which is not an honest client of this run; "
                "set the option 'of' to the id of an honest client"
            )
    return attackers
