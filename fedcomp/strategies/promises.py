"""What a run by election says of itself: what liars change, who may be absent, what a server sees; and the code that would do."""

from .announcements import FEWEST

CROWD = 1000  # cards that a client makes, and checks, in a round, from which it is told
GUARDED = {  # with the deterministic code
    "data": "liars in a round change nothing, up to {f}: voters train on all partitions of their row, with the data of all",
    "ballots": "the tally is guarded against {liars} of a round, the ballots are not: a liar's own counts as one of all",
}
SEALED = "; sealed: the server sees votes, sizes and times, and ballots only if a voter tells it"
AS_DRAWN = "; a voter trains on {drawn:.3g} partitions on average, not {asked:.3g}: draws with an empty row or column are repeated"
TIES = (
    "a cohort of {clients} clients is even: a coin decides each tie of the vote, which costs accuracy; make the cohort odd with "
    "--clients or --participation"
)
UNGUARDED = "code={code} promises nothing against liars, it makes a wrong vote less or more likely; code=deterministic does"


def promise(
    code: str, form: str, sealed: bool, liars: int, spare: int | None = None, clients: int = 0
) -> str:
    """Of a run in whose rounds so many may lie and `spare` more be absent; None: it is not known how many clients a round has."""
    if code != "deterministic":
        return UNGUARDED.format(code=code)
    said = GUARDED[form].format(f=liars, liars=f"{liars} liar{'s' * (liars != 1)}")
    if spare is not None:
        said += (
            f"; with {f'more than {spare}' if spare else 'anybody'} absent a round moves nothing"
        )
    if sealed and clients > CROWD:
        return f"{said}{SEALED}; each client makes, and checks, {clients} signed cards a round, fewer with a smaller --participation"
    return said + SEALED * sealed


def ties(clients: int) -> str:
    """Return the advice against an even cohort of a majority vote, "" for an odd cohort."""
    return "" if clients % 2 else TIES.format(clients=clients)


def larger(n: int, clients: int, liars: int | None) -> str:
    """A code for sealed ballots, of n seats or more, whose `liars`, as many as it bears unless given, leave ballots enough to vote on."""
    for b in range(max(1, (n - 1) // 2), (clients + 1) // 2):
        a_seat, f = clients // (2 * b + 1), b if liars is None else liars
        if 2 * b + 1 - f // a_seat >= FEWEST and 2 * f < a_seat * (2 * b + 1):
            return f"code=deterministic,seats={2 * b + 1},byzantine={b}"
    return f"rounds of {max(5, 2 * (liars or 0) + 1)} clients or more, or liars=0"
