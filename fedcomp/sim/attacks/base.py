"""The interface of an attack: what a virtual Byzantine client does differently from an honest one.

An attack may change what its clients train on (`data`), their updates (`updates`), their reports (`reply`), or whether they answer at all
(`silent`). Random draws depend on (seed, round, client) alone, and an attack keeps no state from round to round. An attacked run is
therefore the same when it is interrupted, and however its cohorts are split.

`updates` is called again in a later phase that makes something new, such as a vote on ballots that were passed on. `reply` is called in
every phase of a round.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from ...codecs import Codec, Context
from ...errors import SpecError
from ...messages import Report
from ...strategies.client_algorithm import ClientAlgorithm
from ...tasks.data import Data

LONGEST = 1_000_000  # clients in a range of ids
UNLIMITED = 1e9  # from which the highest value is not named in an error


@dataclass(frozen=True)
class Scene:
    """What the Byzantine clients of one attack know of a round when they make their updates."""

    cohort: int  # clients that were asked
    byzantine: int  # clients of this attack among them
    clients: tuple[int, ...]  # honest clients whose updates are known, ascending
    honest: Tensor  # [h, n], their updates before memory and codec, all finite; without honest clients, what the attackers trained


@dataclass(frozen=True)
class Sender:
    """What a Byzantine client makes its frames with."""

    codec: Codec
    seed: int  # an honest client would encode with it
    context: Context  # with the layout of the model
    generator: np.random.Generator
    algorithm: ClientAlgorithm = ClientAlgorithm()  # noqa: RUF009 — a frozen value; it knows the client's signing key

    @property
    def numel(self) -> int:
        return self.context.layout.numel


@dataclass(frozen=True)
class Attack:
    """An attack with its options. Subclasses are frozen dataclasses; their fields, after these two, are the options of the spec string."""

    count: int = 0  # Byzantine clients; as many as are named if not given
    clients: str = ""  # their ids, as in 3/7/10-14; drawn if not given

    name: ClassVar[str]
    source: ClassVar[str] = "–"
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {}  # lowest and highest value of options
    looks: ClassVar[bool] = False  # whether it uses the updates of the cohort's honest clients
    follows: ClassVar[bool] = (
        False  # whether its clients are chosen anew in every round, by the allocation matrix
    )

    def __post_init__(self) -> None:
        named = len(self.named)
        if self.count < 0:
            raise SpecError(f"attack '{self.name}' has a count of {self.count}; give at least 1")
        if not self.count and not named:
            raise SpecError(
                f"attack '{self.name}' needs a number of Byzantine clients; write {self.name}:2 or {self.name}:clients=3/7"
            )
        if self.count and named and self.count != named:
            raise SpecError(
                f"attack '{self.name}' has a count of {self.count} and names {named} clients; leave the count out"
            )
        for option, (low, high) in self.limits.items():
            value = getattr(self, option)
            if value is not None and not low <= value <= high:
                below = value < low and high >= UNLIMITED
                allowed = f"{low:g} or more" if below else f"{low:g} to {high:g}"
                raise SpecError(f"{option} is {value:g}; give {allowed}")

    @property
    def named(self) -> list[int]:
        """The logical ids in `clients`, ascending. Raises SpecError."""
        found: list[int] = []
        for piece in self.clients.split("/") if self.clients else ():
            match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", piece)
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if not first <= last < first + LONGEST:
                raise SpecError(f"clients cannot be '{self.clients}'; name them as in 3/7/10-14")
            found += range(first, last + 1)
        if len(found) != len(set(found)):
            raise SpecError("clients names a client twice; keep one")
        return sorted(found)

    @property
    def size(self) -> int:
        """Number of Byzantine clients."""
        return self.count or len(self.named)

    def data(self, data: Data) -> Data:
        """Return what Byzantine clients train on in place of `data`."""
        return data

    def updates(self, x: Tensor, scene: Scene, generators: Sequence[np.random.Generator]) -> Tensor:
        """Return the updates [k, n] that enter the memories in place of the trained ones, x [k, n], which may be overwritten."""
        return x

    def reply(self, report: Report, sender: Sender) -> Report:
        """Return what a Byzantine client sends in place of an honest report."""
        return report

    def silent(self, generator: np.random.Generator) -> str:
        """Return why a Byzantine client does not answer in this round; "" if it does."""
        return ""
