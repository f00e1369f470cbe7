"""Code-aware: the clients that most depends on attack.

    attackers = the members of the cohort on the heaviest rows of the allocation matrix G;  x ← −s·x

In a coded election (Sohn, Han, Choi, Moon: Election coding for distributed learning. NeurIPS 2020), row i of G holds the partitions, or
ballots, that voter i tallies. Random attackers mostly have light rows; one who knows G takes the heaviest. Row i is that of the i-th
member of the cohort, in the order of the logical ids; members beyond the last row start again at the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .blind import Inverted


@dataclass(frozen=True)
class CodeAware(Inverted):
    name: ClassVar[str] = "code-aware"
    source: ClassVar[str] = "Sohn 2020"
    follows: ClassVar[bool] = True


def heaviest(cohort: Sequence[int], allocation: np.ndarray) -> list[int]:
    """Return the members of a cohort by the weight of their rows, heaviest first; ties in the order of the rows."""
    held = allocation.sum(1, dtype=np.int64)
    ranked = sorted(range(len(cohort)), key=lambda place: (-held[place % len(held)], place))
    return [cohort[place] for place in ranked]
