"""The interface of attacks by Byzantine clients.

An attack may replace the training data of its clients (method `data`), their updates (`updates`) and their reports (`reply`), or make its
clients send no answer (`silence_reason`). The random numbers of an attack depend only on the run's seed, the round and the
client, and an attack keeps no state between rounds. The result of a run with attacks is therefore the same if the run is interrupted and
resumed, or if a cohort is trained in several parts.

A round may have several phases, such as the phases of an election (docs/explanation/elections.md). `reply` is called in every phase.
`updates` is called in the first phase, and in each later phase in which clients compute a new vector, for example a vote.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from ...codecs import Codec, Context
from ...errors import SpecError
from ...layout import Layout
from ...messages import Report
from ...spec import check_ranges
from ...strategies.base import ClientAlgorithm
from ...tasks.data import Examples

Generators = Sequence[np.random.Generator]  # one random generator for each client
MAX_RANGE = 1_000_000  # maximum number of clients in a range of ids such as 10-14


@dataclass(frozen=True)
class UpdateContext:
    """The information that an attack can use to compute the updates of its Byzantine clients in a round."""

    cohort_size: int
    n_byzantine: int  # number of clients in the cohort that carry out this attack
    honest_clients: tuple[int, ...]  # ascending ids of the honest clients with finite updates
    # The honest clients' updates before encoding, [honest clients, numel]. If there are none, the attackers' own trained updates.
    honest_updates: Tensor


@dataclass(frozen=True)
class ReplyContext:
    """The values that a Byzantine client needs to encode a vector as a frame."""

    codec: Codec
    seed: int  # seed that an honest client would use to encode its update
    codec_context: Context  # further arguments of the codec, such as the layout
    generator: np.random.Generator
    algorithm: ClientAlgorithm = ClientAlgorithm()  # the client half of the strategy

    @property
    def layout(self) -> Layout:
        assert self.codec_context.layout is not None
        return self.codec_context.layout

    @property
    def numel(self) -> int:
        return self.layout.numel


@dataclass(frozen=True)
class Attack:
    """An attack with its options. Subclasses are frozen dataclasses whose fields are the options of the attack."""

    count: int = 0  # number of Byzantine clients; 0: as many as `clients` names
    clients: str = ""  # ids of the Byzantine clients, such as 3/7/10-14; empty: random clients

    name: ClassVar[str]
    source: ClassVar[str] = "–"  # short citation, such as "Fang 2020"
    # Maps an option to its lowest and highest allowed value.
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {}
    uses_honest_updates: ClassVar[bool] = False  # whether `updates` reads `honest_updates`
    # Whether the attackers of each round are chosen by the strategy's allocation matrix, which assigns data partitions to clients
    # (see code_aware.py).
    uses_allocation: ClassVar[bool] = False

    def __post_init__(self) -> None:
        n_named = len(self.named_clients)
        if self.count < 0:
            raise SpecError(f"attack '{self.name}' has a count of {self.count}; give at least 1")
        if not self.count and not n_named:
            raise SpecError(
                f"attack '{self.name}' needs a number of Byzantine clients; write {self.name}:2 or {self.name}:clients=3/7"
            )
        if self.count and n_named and self.count != n_named:
            raise SpecError(
                f"attack '{self.name}' has a count of {self.count} and names {n_named} clients; leave the count out"
            )
        check_ranges(self, **self.limits)

    @property
    def named_clients(self) -> list[int]:
        """The client ids in the option `clients`, in ascending order. Raises SpecError."""
        clients: list[int] = []
        for piece in self.clients.split("/") if self.clients else ():
            match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", piece)
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if not first <= last < first + MAX_RANGE:
                raise SpecError(
                    f"clients={self.clients} is not a list of client ids; give ids and ranges of ids, such as clients=3/7/10-14"
                )
            clients += range(first, last + 1)
        if len(clients) != len(set(clients)):
            raise SpecError(f"clients={self.clients} names a client twice; give each id once")
        return sorted(clients)

    @property
    def size(self) -> int:
        return self.count or len(self.named_clients)

    def data(self, data: Examples) -> Examples:
        """Return the data on which Byzantine clients train, by default the original data."""
        return data

    def updates(self, x: Tensor, context: UpdateContext, generators: Generators) -> Tensor:
        """Return the updates that Byzantine clients encode instead of their trained updates `x`. May overwrite `x`.

        `x` and the result [clients, numel] have a row for each Byzantine client, and `generators` has a random generator for each. The
        result is encoded with error feedback, like honest updates.
        """
        return x

    def reply(self, report: Report, context: ReplyContext) -> Report:
        """Return the report that a Byzantine client sends instead of the honest `report`."""
        return report

    def silence_reason(self, generator: np.random.Generator) -> str:
        """Return why a Byzantine client does not answer in this round, or "" if it answers."""
        return ""
