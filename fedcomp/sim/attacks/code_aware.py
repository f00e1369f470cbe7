"""The code-aware attack: in a coded majority vote, the clients that train on the most data partitions attack.

Sohn, Han, Choi, Moon, "Election coding for distributed learning", NeurIPS 2020:

    attackers = the cohort members with the heaviest rows of the allocation matrix G;  x ← −s·x, s = `scale`

Here, x is an attacker's update. Row i of G belongs to the i-th client of the cohort in the order of the client ids; if the cohort has more
clients than G has rows, the rows are assigned cyclically. A client's row has a one for each data partition on which the client trains, or,
in elections in which clients exchange ballots, for each sender whose ballot the client counts. The weight of a row is the number of its
ones. Clients with heavy rows influence the majority vote more than others, so an adversary that knows G corrupts these clients.
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
    uses_allocation: ClassVar[bool] = True


def rank_by_row_weight(cohort: Sequence[int], allocation: np.ndarray) -> list[int]:
    """Return the clients of a cohort, sorted by the weights of their rows of `allocation` (heaviest first), then by their ids."""
    weights = allocation.sum(1, dtype=np.int64)
    ranked = sorted(range(len(cohort)), key=lambda i: (-weights[i % len(weights)], i))
    return [cohort[i] for i in ranked]
