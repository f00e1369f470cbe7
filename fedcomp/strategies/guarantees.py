"""What an election guarantees against Byzantine clients: checks of its options, the notice of a run, and warnings."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ConfigError
from . import correctness
from .codes import deal, default_redundancy, mean_redundancy
from .sealed_messages import MIN_PARTITIONS

if TYPE_CHECKING:
    from .election import Options

MANY_CARDS = 1000  # cards that a client makes and checks in a round, from which a run says so
WATCHED = 3  # complete rounds from whose margins the correctness of single votes is estimated
MAX_CORRECTNESS = 0.99  # up to which codes are compared: if votes are always right, all codes are


def notice(o: "Options", f: int, code: np.ndarray, clients: int = 0) -> str:
    """Return a sentence that states the guarantee of a run.

    `f`: the largest number of Byzantine clients in a round. `clients`: the size of a round, 0 if it is not known.
    """
    if o.code != "deterministic":
        said = (
            f"code={o.code} guarantees nothing against Byzantine clients, it makes a wrong vote less or more likely; "
            "code=deterministic does"
        )
        if o.code == "bernoulli" and clients:
            asked = default_redundancy(len(code)) if o.redundancy is None else o.redundancy
            said += (
                f"; a voter trains on {mean_redundancy(code):.3g} partitions on average, not {asked:.3g}: draws with an "
                "empty row or column are repeated"
            )
        return "; ".join([said, *filter(None, [even_cohort(clients) if clients else ""])])
    of = f"{f} Byzantine client{'s' * (f != 1)}"
    said = (
        f"up to {of} in a round change nothing: voters train on all partitions of their row, with the data of all"
        if o.form == "data"
        else f"the tally is guarded against {of} in a round, the ballots are not: a Byzantine client's own counts as one of all"
    )
    if clients:
        margin = deal(range(clients), len(code), o.byzantine, 0, 1).margin
        spare = margin - 1 - 2 * f
        if o.sealed:
            spare = min(spare, clients // len(code) * (len(code) - MIN_PARTITIONS + 1) - 1)
        absent = f"more than {spare}" if spare else "anybody"
        said += f"; with {absent} absent a round moves nothing"
    if not o.sealed:
        return said
    if clients > MANY_CARDS:
        return (
            f"{said}; sealed: the server sees votes, sizes and times, and ballots only if a voter tells it; each client makes, "
            f"and checks, {clients} signed cards a round, fewer with a smaller --participation"
        )
    return f"{said}; sealed: the server sees votes, sizes and times, and ballots only if a voter tells it"


def even_cohort(clients: int) -> str:
    """Return the advice against an even cohort of a majority vote, "" for an odd cohort."""
    if clients % 2:
        return ""
    return (
        f"a cohort of {clients} clients is even: a coin decides each tie of the vote, which costs accuracy; make the cohort odd "
        "with --clients or --participation"
    )


def holds(clients: int, n: int, b: int, f: int) -> bool:
    """Return whether a round of so many clients can close, `f` of them Byzantine, with empty seats of n where they are fewer."""
    return deal(range(max(clients, n)), n, b, 0, 1).may_close(f, max(0, n - clients))


def check_seats(o: "Options", f: int, n: int, clients: int) -> None:
    """Raise ConfigError where no code of n seats guarantees what the options ask for, in rounds of so many clients."""
    if n > clients:
        raise ConfigError(
            f"--strategy election with seats={n} needs rounds of at least {n} clients, and they have {clients}; give "
            f"a smaller 'seats', a larger --participation, or more --clients"
        )
    if o.code == "deterministic" and n % 2 == 0:
        others = f"{n - 1} or {n + 1}" if n < clients else f"{n - 1}"
        raise ConfigError(
            f"the deterministic code needs an odd number of seats, not {n}; choose seats={others}, or code=bernoulli"
        )
    if 2 * o.byzantine >= n:
        seats = (
            f"seats={n} are fewer"
            if o.seats
            else f"rounds of {clients} clients have {n} seat{'s' * (n > 1)}"
        )
        raise ConfigError(
            f"--strategy election with byzantine={o.byzantine} needs {2 * o.byzantine + 1} seats, and {seats}; give "
            f"{'more seats, ' * bool(o.seats)}a larger --participation, more --clients, or byzantine={(n - 1) // 2}"
        )
    if o.sealed and (o.code != "deterministic" or n != 2 * o.byzantine + 1 or n < MIN_PARTITIONS):
        raise ConfigError(
            f"--strategy election with sealed=true has every voter count all ballots, since votes on some tell "
            f"what those are, and code={o.code} of {n} seats with byzantine={o.byzantine} does not; give "
            f"{_larger_code(n, clients, o.liars)}"
        )
    if not holds(clients, n, o.byzantine, f):
        most = (deal(range(clients), n, o.byzantine, 0, 1).margin - 1) // 2
        raise ConfigError(
            f"--strategy election with byzantine={o.byzantine} bears {most} liars of {clients} clients, not "
            f"liars={f}; give a larger 'byzantine' or fewer 'liars'"
        )
    if o.sealed and n - f // (clients // n) < MIN_PARTITIONS:
        raise ConfigError(
            f"--strategy election with sealed=true votes on {MIN_PARTITIONS} ballots at least, and of {clients} clients with "
            f"liars={f} those who send none, or bad ones, leave fewer; give {_larger_code(n, clients, o.liars)}"
        )


def _larger_code(n: int, clients: int, liars: int | None) -> str:
    """Return options for sealed ballots, of n seats or more, that bear `liars` (None: b) and leave ballots enough to vote on."""
    for b in range(max(1, (n - 1) // 2), (clients + 1) // 2):
        a_seat, f = clients // (2 * b + 1), b if liars is None else liars
        if 2 * b + 1 - f // a_seat >= MIN_PARTITIONS and 2 * f < a_seat * (2 * b + 1):
            return f"code=deterministic,seats={2 * b + 1},byzantine={b}"
    return f"rounds of {max(5, 2 * (liars or 0) + 1)} clients or more, or liars=0"


class MarginWatch:
    """The margins of the first complete rounds, and the warning that follows where a Bernoulli code does harm."""

    def __init__(self, margins: list[int] | None = None, rounds: int = 0):
        self.margins = None if margins is None else np.array(margins, np.int64)  # how often each
        self.rounds = rounds

    @property
    def over(self) -> bool:
        return self.rounds >= WATCHED

    def add(self, margins: np.ndarray) -> None:
        """Count the margins of a round."""
        self.margins = margins if self.margins is None else self.margins + margins
        self.rounds += 1

    def warning(
        self, o: "Options", f: int, code: np.ndarray, members: Sequence[int], seed: int
    ) -> str:
        """Return a warning where no code would be better than this one, whether the `f` Byzantine clients attacked so far or not, else "".

        Margins of honest votes, read as if some had been inverted, give too high a correctness, up to 1, at which no code can do harm.
        """
        for attacked in dict.fromkeys((0, f)):  # the lower correctness, of the worse outlook, first
            q = correctness.estimate_correctness(self.margins, code, attacked, members, seed)
            if q and (
                sentence := correctness.warning(
                    o.code, len(code), o.byzantine, min(q, MAX_CORRECTNESS), o.redundancy, seed
                )
            ):
                return sentence
        return ""
