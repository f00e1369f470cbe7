"""Guarantees of an election against Byzantine clients: checks of its options, and the notice of a run."""

from typing import TYPE_CHECKING

import numpy as np

from ..errors import ConfigError
from .codes import assign_seats, default_redundancy, mean_redundancy
from .sealed_messages import MIN_PARTITIONS

if TYPE_CHECKING:
    from .election import Options

MANY_CARDS = 1000  # cards that a client makes and checks in a round, from which a run says so


def notice(o: "Options", f: int, code: np.ndarray, clients: int = 0) -> str:
    """Return a sentence that states the guarantee of a run.

    `f`: the largest number of Byzantine clients in a round. `clients`: the size of a round, 0 if it is not known.
    """
    if o.code != "deterministic":
        found = [
            f"code={o.code} guarantees nothing against Byzantine clients, it makes a wrong vote less or more likely; "
            "code=deterministic does"
        ]
        if o.code == "bernoulli" and clients:
            asked = default_redundancy(len(code)) if o.redundancy is None else o.redundancy
            found.append(
                f"a voter trains on {mean_redundancy(code):.3g} partitions on average, not {asked:.3g}: draws with an "
                "empty row or column are repeated"
            )
        return "; ".join([*found, *filter(None, [even_cohort(clients)])])
    of = f"{f} Byzantine client{'s' * (f != 1)}"
    said = (
        f"up to {of} in a round change nothing: voters train on all partitions of their row, with the data of all"
        if o.form == "data"
        else f"the tally is guarded against {of} in a round, the ballots are not: a Byzantine client's own counts as one of all"
    )
    if clients:
        margin = assign_seats(range(clients), len(code), o.byzantine, 0, 1).margin
        spare = margin - 1 - 2 * f
        if o.sealed:
            spare = min(spare, clients // len(code) * (len(code) - MIN_PARTITIONS + 1) - 1)
        absent = f"more than {spare}" if spare else "anybody"
        said += f"; with {absent} absent a round moves nothing"
    if o.sealed:
        said += (
            "; sealed: the server sees votes, sizes and times, and ballots only if a voter tells it"
        )
    if o.sealed and clients > MANY_CARDS:
        said += f"; each client makes, and checks, {clients} signed cards a round, fewer with a smaller --participation"
    return said


def even_cohort(clients: int) -> str:
    """Return the advice against an even cohort of a majority vote, "" for an odd cohort, or one of unknown size (0)."""
    if clients % 2 or not clients:
        return ""
    return (
        f"a cohort of {clients} clients is even: a coin decides each tie of the vote, which costs accuracy; make the cohort odd "
        "with --clients or --participation"
    )


def can_close(clients: int, n: int, b: int, f: int) -> bool:
    """Return whether a round of so many clients can close, `f` of them Byzantine, with empty seats of n where they are fewer."""
    return assign_seats(range(max(clients, n)), n, b, 0, 1).may_close(f, max(0, n - clients))


def check_seats(o: "Options", f: int, n: int, clients: int) -> None:
    """Raise ConfigError where no code of n seats guarantees what the options ask for, in rounds of so many clients."""
    if n > clients:
        raise ConfigError(
            f"--strategy election with seats={n} needs rounds of at least {n} clients, and they have {clients}; give "
            f"a smaller 'seats', a larger --participation, or more --clients"
        )
    if 2 * o.byzantine >= n:
        raise ConfigError(
            f"--strategy election with byzantine={o.byzantine} needs {2 * o.byzantine + 1} seats, and rounds of {clients} "
            f"clients have {n}; give byzantine={(n - 1) // 2}, more 'seats', a larger --participation, or more --clients"
        )
    if o.sealed and (o.code != "deterministic" or n != 2 * o.byzantine + 1 or n < MIN_PARTITIONS):
        raise ConfigError(
            f"--strategy election with sealed=true has every voter count all ballots, since votes on some tell what those "
            f"are, and code={o.code} of {n} seats with byzantine={o.byzantine} does not; give code=deterministic, and "
            f"an odd number of 'seats', at least {MIN_PARTITIONS}, with byzantine=(seats - 1)/2"
        )
    if not can_close(clients, n, o.byzantine, f):
        most = (assign_seats(range(clients), n, o.byzantine, 0, 1).margin - 1) // 2
        raise ConfigError(
            f"--strategy election with byzantine={o.byzantine} tolerates {most} Byzantine clients among {clients} clients, not "
            f"f={f}; give a larger 'byzantine' or a smaller 'f'"
        )
    if o.sealed and n - f // (clients // n) < MIN_PARTITIONS:
        raise ConfigError(
            f"--strategy election with sealed=true votes on {MIN_PARTITIONS} ballots at least, and of {clients} clients with "
            f"f={f} those who send none, or bad ones, leave fewer; give a smaller 'f', or more 'seats' and --clients"
        )
