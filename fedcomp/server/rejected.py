"""A summary of a run's rejections by reason."""

import re
from collections.abc import Iterable

from ..callbacks import Rejection, Rejections, RoundRecord

REASONS, CLIENTS = 16, 16  # that a summary names; metrics.jsonl has all
NUMBER = re.compile(r"\d+(\.\d+)?")


def rejections_of(records: Iterable[RoundRecord]) -> tuple[Rejections, ...]:
    """Return a run's rejections by reason, the most frequent first. Reasons that differ only in their numbers are combined."""
    found: dict[tuple[str, str], list[Rejection]] = {}
    for rejection in (rejection for record in records for rejection in record.rejections):
        found.setdefault((rejection.stage, NUMBER.sub("#", rejection.reason)), []).append(rejection)
    frequent = sorted(found.values(), key=lambda alike: -len(alike))[:REASONS]
    return tuple(map(_together, frequent))


def _together(alike: list[Rejection]) -> Rejections:
    clients = sorted({rejection.client for rejection in alike})
    first = alike[0]
    return Rejections(
        first.stage,
        first.reason,
        len(alike),
        tuple(clients[:CLIENTS]),
        max(0, len(clients) - CLIENTS),
    )
