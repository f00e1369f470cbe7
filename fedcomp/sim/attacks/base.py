"""The interface of attacks. An attack changes what virtual Byzantine clients do in a round.

An attack may replace the training data of its clients (`data`), their updates (`updates`), their reports (`reply`), or keep them from
answering (`silence_reason`). Random draws depend only on (seed, round, client), and an attack keeps no state from round to round. The
result of an attacked run therefore depends neither on interruptions nor on how cohorts are split.

`updates` is called again in a later phase if clients compute new updates there, such as votes on the ballots of others. `reply` is called
in every phase of a round.
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

Generators = Sequence[np.random.Generator]  # one for each client
MAX_RANGE = 1_000_000  # clients in a range of ids


@dataclass(frozen=True)
class UpdateContext:
    """The knowledge of the Byzantine clients of one attack when they compute their updates in a round."""

    cohort_size: int
    n_byzantine: int  # clients of this attack in the cohort
    honest_clients: tuple[int, ...]  # ids of the honest clients with finite updates, ascending
    # [h, n], before encoding; if the cohort has no honest clients, the trained updates of the attackers
    honest_updates: Tensor


@dataclass(frozen=True)
class ReplyContext:
    """The values from which a Byzantine client makes a frame (an encoded update)."""

    codec: Codec
    seed: int  # seed with which an honest client would encode
    codec_context: Context  # with the layout of the model
    generator: np.random.Generator
    algorithm: ClientAlgorithm = ClientAlgorithm()  # noqa: RUF009 — a frozen value; it has the client's signing key

    @property
    def layout(self) -> Layout:
        assert self.codec_context.layout is not None
        return self.codec_context.layout

    @property
    def numel(self) -> int:
        return self.layout.numel


@dataclass(frozen=True)
class Attack:
    """An attack with its options. Subclasses are frozen dataclasses, and the fields that they add are further options."""

    count: int = 0  # number of Byzantine clients; 0: the number of ids in `clients`
    clients: str = ""  # ids of the Byzantine clients, as in 3/7/10-14; "": drawn from the seed

    name: ClassVar[str]
    source: ClassVar[str] = "–"
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {}  # lowest and highest value of options
    uses_honest_updates: ClassVar[bool] = False  # `updates` reads the honest clients' updates
    # Whether the strategy's allocation matrix determines the attackers of each round
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
        """The logical ids in `clients`, ascending. Raises SpecError."""
        clients: list[int] = []
        for piece in self.clients.split("/") if self.clients else ():
            match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", piece)
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if not first <= last < first + MAX_RANGE:
                raise SpecError(f"clients cannot be '{self.clients}'; name them as in 3/7/10-14")
            clients += range(first, last + 1)
        if len(clients) != len(set(clients)):
            raise SpecError(f"clients={self.clients} names a client twice; remove one of the two")
        return sorted(clients)

    @property
    def size(self) -> int:
        """Number of Byzantine clients."""
        return self.count or len(self.named_clients)

    def data(self, data: Examples) -> Examples:
        """Return the training data of Byzantine clients, in place of `data`."""
        return data

    def updates(self, x: Tensor, context: UpdateContext, generators: Generators) -> Tensor:
        """Return the updates [k, n] of Byzantine clients, in place of the trained updates x [k, n], which may be overwritten.

        The clients' memories encode the returned updates.
        """
        return x

    def reply(self, report: Report, context: ReplyContext) -> Report:
        """Return the report that a Byzantine client sends in place of the honest one."""
        return report

    def silence_reason(self, generator: np.random.Generator) -> str:
        """Return the reason why a Byzantine client does not answer in this round; "" if it answers."""
        return ""
