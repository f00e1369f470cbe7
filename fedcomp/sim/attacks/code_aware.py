"""Code-aware: whoever sits where most depends on it.

    liars = the members of the cohort on the heaviest rows of the allocation matrix G;  x ← −s·x

In a coded election (Sohn, Han, Choi, Moon: Election coding for distributed learning. NeurIPS 2020), row i of G holds the partitions, or
ballots, that voter i tallies. Random liars mostly hit light rows; one who knows G takes those that hold all. Row i is that of the i-th
member of the cohort, in the order of the logical ids; members beyond the last row start again at the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from .blind import Inverted


class Allocated(Protocol):
    """A strategy that hands out partitions or ballots by a matrix."""

    allocation: (
        np.ndarray | None
    )  # 0/1 [n, n]: row i is what voter i holds; None for strategies that hand out nothing


@dataclass(frozen=True)
class CodeAware(Inverted):
    name: ClassVar[str] = "code-aware"
    source: ClassVar[str] = "Sohn 2020"
    follows: ClassVar[bool] = True


def heaviest(cohort: Sequence[int], allocation: np.ndarray) -> list[int]:
    """The members of a cohort, those first whose rows hold most; of rows that hold as much, the upper ones."""
    held = allocation.sum(1, dtype=np.int64)
    ranked = sorted(range(len(cohort)), key=lambda place: (-held[place % len(held)], place))
    return [cohort[place] for place in ranked]
