"""What an attack is: what a virtual Byzantine client does in place of its part.

A liar is a client like others up to one point: what it trains on (`data`), what its update is (`updates`), what it sends (`reply`), or
whether it answers at all (`silent`). What it draws depends on (seed, round, client) alone, and nothing outlives a round, so that an
attacked run is the same run, interrupted or not, in whatever pieces its cohorts are worked on.

`updates` is asked again where a later phase makes something new, such as a vote on ballots that were passed on. `reply` hears of every
phase of a round.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from ...codecs import Codec, Context
from ...errors import SpecError
from ...messages import Report
from ...strategies.client_algorithm import ClientAlgorithm
from ...tasks.base import Data

LONGEST = 1_000_000  # clients in a range of names


@dataclass(frozen=True)
class Scene:
    """What the liars of one attack know of a round when they make their updates."""

    cohort: int  # clients that were asked
    liars: int  # of them, those of this attack
    clients: tuple[int, ...]  # the honest whose updates can be seen, ascending
    honest: Tensor  # [h, n], those updates before memory and codec, all finite; without honest ones, what the liars have trained


@dataclass(frozen=True)
class Sender:
    """What a liar makes its frames with."""

    codec: Codec
    seed: int  # that an honest client would encode with
    context: Context  # with the layout of the model
    generator: np.random.Generator
    algorithm: ClientAlgorithm = ClientAlgorithm()  # noqa: RUF009 — a frozen value: the client half, which knows what it signs with

    @property
    def numel(self) -> int:
        return self.context.layout.numel


@dataclass(frozen=True)
class Attack:
    """An attack with its options. Subclasses are frozen dataclasses; their fields, after these two, are the options of the spec string."""

    count: int = 0  # liars; as many as are named when not given
    clients: str = ""  # which, as in 3/7/10-14; drawn when not given

    name: ClassVar[str]
    source: ClassVar[str] = "–"
    looks: ClassVar[bool] = False  # at what the cohort's honest clients have trained
    follows: ClassVar[bool] = (
        False  # the rows of an allocation matrix: who lies is chosen anew in every round
    )

    def __post_init__(self) -> None:
        if self.count < 0:
            raise SpecError(f"attack '{self.name}' has a count of {self.count}; give at least 1")
        if not self.count and not self.named:
            raise SpecError(
                f"attack '{self.name}' needs to know how many lie; write {self.name}:2 or {self.name}:clients=3/7"
            )
        if self.named and self.count not in (0, len(self.named)):
            raise SpecError(
                f"attack '{self.name}' has a count of {self.count} and names {len(self.named)} clients; leave the count out"
            )

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
        """How many lie."""
        return self.count or len(self.named)

    def data(self, data: Data) -> Data:
        """What the liars train on, in place of the data of all."""
        return data

    def updates(self, x: Tensor, scene: Scene, generators: Sequence[np.random.Generator]) -> Tensor:
        """The updates [k, n] that liars give to their memories in place of what they have trained, x [k, n], which may be overwritten."""
        return x

    def reply(self, report: Report, sender: Sender) -> Report:
        """What a liar sends in place of a report that brings a frame, or says that there is nothing to send."""
        return report

    def silent(self, generator: np.random.Generator) -> str:
        """Why a liar does not answer in this round at all; "" where it does."""
        return ""
