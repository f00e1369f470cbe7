"""The guarantee of an election against Byzantine clients: checks of the options, and its description at the start of a run."""

from typing import TYPE_CHECKING

import numpy as np

from ..errors import ConfigError
from .codes import assign_seats, default_redundancy, mean_redundancy
from .sealed_messages import MIN_PARTITIONS

if TYPE_CHECKING:
    from .election import ElectionOptions

MANY_CARDS = 1000  # cards of a client in a round above which the notice warns


def notice(o: "ElectionOptions", f: int, code: np.ndarray, clients: int = 0) -> str:
    """Return the guarantee of a run in a sentence.

    `f`: the largest number of Byzantine clients in a round. `clients`: the cohort size, 0 if it is not known.
    """
    if o.code != "deterministic":
        sentences = [
            f"code={o.code} changes the probability of a wrong vote and guarantees nothing against Byzantine clients; "
            "code=deterministic does"
        ]
        if o.code == "bernoulli" and clients:
            requested = default_redundancy(len(code)) if o.redundancy is None else o.redundancy
            sentences.append(
                f"a voter trains on {mean_redundancy(code):.3g} partitions on average, not {requested:.3g}: draws with an "
                "empty row or column are repeated"
            )
        return "; ".join([*sentences, *filter(None, [even_cohort(clients)])])
    byzantine = f"{f} Byzantine client{'s' * (f != 1)}"
    text = (
        f"up to {byzantine} in a round change nothing: voters train on all partitions of their row, with the data of all clients"
        if o.form == "data"
        else f"the tally is protected against {byzantine} in a round, the ballots are not: a Byzantine client's own counts as one of all"
    )
    if clients:
        margin = assign_seats(range(clients), len(code), o.byzantine, 0, 1).margin
        spare = margin - 1 - 2 * f
        if o.sealed:
            spare = min(spare, clients // len(code) * (len(code) - MIN_PARTITIONS + 1) - 1)
        absent = f"more than {spare}" if spare else "any client"
        text += f"; with {absent} absent a round does not move the model"
    if o.sealed:
        text += "; sealed: the server sees votes, sizes and times, and a ballot only if a voter reveals it"
    if o.sealed and clients > MANY_CARDS:
        text += f"; each client signs and checks {clients} cards a round, fewer with a smaller --participation"
    return text


def even_cohort(clients: int) -> str:
    """Return a warning about an even cohort of a majority vote, "" for an odd or unknown (0) number of clients."""
    if clients % 2 or not clients:
        return ""
    return (
        f"a cohort of {clients} clients is even: ties of the vote are broken at random, which costs accuracy; make the cohort odd "
        "with --clients or --participation"
    )


def can_close(clients: int, n: int, b: int, f: int) -> bool:
    """Return whether a round of this many clients can close with `f` of them Byzantine. Fewer than n clients leave seats empty."""
    return assign_seats(range(max(clients, n)), n, b, 0, 1).may_close(f, max(0, n - clients))


def check_seats(o: "ElectionOptions", f: int, n: int, clients: int) -> None:
    """Raise ConfigError if no code of n seats gives the guarantee of the options in rounds of this many clients."""
    if n > clients:
        raise ConfigError(
            f"--strategy election with seats={n} needs rounds of at least {n} clients, and rounds have {clients}; give "
            f"a smaller 'seats', a larger --participation, or more --clients"
        )
    if 2 * o.byzantine >= n:
        raise ConfigError(
            f"--strategy election with byzantine={o.byzantine} needs {2 * o.byzantine + 1} seats, but a round of {clients} "
            f"clients has only {n}; give byzantine={(n - 1) // 2}, more 'seats', a larger --participation, or more --clients"
        )
    if o.sealed and (o.code != "deterministic" or n != 2 * o.byzantine + 1 or n < MIN_PARTITIONS):
        raise ConfigError(
            f"--strategy election with sealed=true needs a code whose voters all count every ballot, since other votes reveal "
            f"ballots; code={o.code} of {n} seats with byzantine={o.byzantine} is not one; give code=deterministic, and "
            f"an odd number of 'seats', at least {MIN_PARTITIONS}, with byzantine=(seats - 1)/2"
        )
    if not can_close(clients, n, o.byzantine, f):
        tolerated = (assign_seats(range(clients), n, o.byzantine, 0, 1).margin - 1) // 2
        raise ConfigError(
            f"--strategy election with byzantine={o.byzantine} tolerates {tolerated} Byzantine clients among {clients} clients, not "
            f"f={f}; give a larger 'byzantine' or a smaller 'f'"
        )
    if o.sealed and n - f // (clients // n) < MIN_PARTITIONS:
        raise ConfigError(
            f"--strategy election with sealed=true needs at least {MIN_PARTITIONS} valid ballots, and f={f} Byzantine clients of "
            f"{clients} can leave fewer; give a smaller 'f', or more 'seats' and --clients"
        )
