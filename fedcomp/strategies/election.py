"""Election coding: a majority vote that liars do not win.

Sohn, Han, Choi, Moon: Election coding for distributed learning: protecting signSGD against Byzantine attacks. NeurIPS 2020.

    local election    voter i: the majority of the signs of the partitions j with G_ij = 1
    global election   θ ← θ + η·(the majority of the votes), as strategy `vote`

G and the seats are those of codes.py. Two ways to run it, `form`:

`data`      Voters train on every partition of their row, whose randomness is that of the partition, so that honest ones agree to the bit.
            A liar is one vote. With the deterministic code the model is, bit for bit, the one that it would be without liars. Every voter
            needs the data of all, and trains as often as its row has partitions. Running statistics start anew in each and are not kept;
            momentum that outlives a round and weights by examples are refused. Where devices of different kinds round a sign near zero
            differently, an honest vote differs there, as a liar's might.
`ballots`   Clients train on their own data and sign a ballot; the server passes on to each voter the ballots of its row. The *tally* is
            guarded, not the ballots: a liar's own is one of those that are counted, wherever its vote ends.

`sealed`    Ballots, passed on by a server that cannot read them, under the deterministic code with b = (n − 1)/2 alone, whose votes say no
            more than the result: docs/ballots.md, sealed_election.py.

When a round may close. Let f (`liars`) be the most who lie in a cohort, m of whom have been proven to (a frame that is none, a ballot that
does not open), while a others are absent. Honest votes win by `Seats.margin` at the least, 2b + 1 where each seat has one voter, if all
are there. One who is missing, or proven and left out, takes 1 off that; one who votes against takes 2. The m are among the f, so at most
f − m others lie unseen: what is left is at least margin − 2·(f − m) − m − a, and the result stands while

    2·max(0, f − m) + m + a < margin,   2·max(0, f − m) + m + a ≤ 2b

Where m > f the run was told a wrong f; the rule then holds if nobody else lies, and the run says so once. A round that may not close moves
nothing: its votes are turned down with the reason, no further phase is asked for, and the next round draws a new cohort.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from .. import spec
from ..codecs import Update
from ..codecs.sign import Sign
from ..errors import ConfigError, FrameError, SpecError
from ..kernels import votes
from ..keys.keyring import DerivedKeys, KnownKeys
from ..layout import Layout
from ..memories.base import Changes
from ..memories.none import Nothing
from ..messages import TRAIN
from ..observe import Rejection
from . import correctness
from .announcements import FEWEST, terms_of
from .base import Outcome, Phase, Rules
from .client_algorithm import ClientAlgorithm, DataPartition
from .closing import QuorumOrDeadline, least
from .codes import Seats, allocation_matrix, deal, default_redundancy, mean_redundancy
from .cohort import draw
from .exchange import Accepted, Exchange, Traffic
from .local_election import BALLOTS, ROW, TALLY, BallotElection, DataElection, Row
from .promises import AS_DRAWN, larger, promise, ties
from .sealed_election import LETTER, Sealing
from .sealed_voter import CARDS, RECOUNT, SealedElection, with_complaints
from .vote import Vote, inner

SEATS = 15  # of a code, at most, where none are asked for: a voter of a full row trains on as many partitions
LOOKED_AT = 3  # whole rounds whose margins tell how often single votes are right
MOST_CORRECT = (
    0.99  # level up to which codes are compared: votes that are always right leave none to choose
)
STATE = "election"  # in a checkpoint


@dataclass(frozen=True)
class Options:
    code: Literal["deterministic", "bernoulli", "uncoded"] = "deterministic"
    byzantine: int = 1  # b that the code is made for, of n seats
    liars: int | None = (
        None  # f, clients of a round that may lie, seen or unseen; as many as `byzantine` when not given
    )
    redundancy: float | None = None  # mean partitions of a row, of the Bernoulli code
    seats: int = 0  # n; 0 = as many as the cohort has clients, at most SEATS
    form: Literal["data", "ballots"] = (
        "data"  # ballots: guards the tally alone, a liar's own ballot counts
    )
    sealed: bool = False  # ballots that the server cannot read
    momentum: float = 0.0  # β, of the server

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise SpecError(
                f"option 'momentum' of strategy 'election' is {self.momentum:g}; give at least 0 and less than 1, such as 0.9"
            )
        if self.seats < 0 or (self.liars is not None and self.liars < 0):
            raise SpecError(
                "options 'seats' and 'liars' of strategy 'election' are counts; give 0 or more"
            )
        if self.sealed and self.form != "ballots":
            raise SpecError(
                "option 'sealed' of strategy 'election' is for ballots that are passed on; give form=ballots as well"
            )


class Election(Vote):
    """Votes by a code, over the data of all or over ballots that are passed on."""

    name: ClassVar[str] = "election"
    Options: ClassVar[type] = Options

    def __init__(self, rules: Rules | None = None, **told: Any):
        super().__init__(rules, **told)
        o, rules = self.options, self.rules
        if (
            not isinstance(inner(self.uplink), Sign)
            or spec.parse(rules.memory).parts[0].name != Nothing.name
        ):
            raise ConfigError(
                f"strategy '{self.name}' counts votes in which honest clients agree to the bit, and {self.uplink} with "
                f"memory '{rules.memory}' makes others; leave --uplink and --memory out, or give sign and none"
            )
        if rules.keep_momentum:
            raise ConfigError(
                f"strategy '{self.name}' trains on other data in every round, and has no momentum to keep; leave "
                "--keep-momentum out"
            )
        self.sealing = Sealing(DerivedKeys(rules.seed)) if o.sealed else None
        self.client_algorithm = self.client_for(o)
        if self.sealing:
            self.client_algorithm = replace(self.client_algorithm, ring=self.sealing.ring)
        self.liars = o.byzantine if o.liars is None else o.liars
        self.notice = promise(o.code, o.form, o.sealed, self.liars)
        self.code = np.empty((0, 0), np.uint8)  # G
        self.seats: Seats | None = None  # of the round, None where there were too few clients
        self.disproved: dict[
            int, str
        ] = {}  # of the round: who is left out after its reply was taken, and why
        self._exchanges: dict[str, Exchange] = {}  # of the round, by phase

    @classmethod
    def client_for(cls, options: Options) -> ClientAlgorithm:
        if options.sealed:
            return SealedElection()
        return DataElection() if options.form == "data" else BallotElection()

    def know(self, run: str, key_of: Callable[[int], bytes], options: str) -> None:
        if self.sealing:
            self.sealing.ring, self.sealing.options = KnownKeys(run, key_of), options

    def check_cohort(self, clients: int) -> None:
        o = self.options
        n = o.seats or min(clients - (o.code == "deterministic" and clients % 2 == 0), SEATS)
        if n > clients:
            raise ConfigError(
                f"strategy '{self.name}' with seats={n} needs rounds of at least {n} clients, and they have {clients}; give "
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
                f"strategy '{self.name}' with byzantine={o.byzantine} needs {2 * o.byzantine + 1} seats, and {seats}; give "
                f"{'more seats, ' * bool(o.seats)}a larger --participation, more --clients, or byzantine={(n - 1) // 2}"
            )
        self.code = self._code(n, clients)
        if not self._bears(clients, n):
            most = (deal(range(clients), n, o.byzantine, 0, 1).margin - 1) // 2
            raise ConfigError(
                f"strategy '{self.name}' with byzantine={o.byzantine} bears {most} liars of {clients} clients, not "
                f"liars={self.liars}; give a larger 'byzantine' or fewer 'liars'"
            )
        if o.sealed and n - self.liars // (clients // n) < FEWEST:
            raise ConfigError(
                f"strategy '{self.name}' with sealed=true votes on {FEWEST} ballots at least, and of {clients} clients with "
                f"liars={self.liars} those who send none, or bad ones, leave fewer; give {larger(n, clients, o.liars)}"
            )
        self.fewest = next(count for count in range(1, clients + 1) if self._bears(count, n))
        self.allocation = self.code
        margin = deal(range(clients), n, o.byzantine, 0, 1).margin
        spare = min(
            margin - 1 - 2 * self.liars, clients // n * (n - FEWEST + 1) - 1 if o.sealed else margin
        )
        self.notice = promise(o.code, o.form, o.sealed, self.liars, spare, clients)
        if o.code == "bernoulli":
            asked = default_redundancy(n) if o.redundancy is None else o.redundancy
            self.notice += AS_DRAWN.format(drawn=mean_redundancy(self.code), asked=asked)
        if o.code != "deterministic" and ties(clients):
            self.notice += f"; {ties(clients)}"

    def _bears(self, clients: int, n: int) -> bool:
        """Whether a round of so many clients could close, if seats of a code of n are empty where they are fewer."""
        seats = deal(range(max(clients, n)), n, self.options.byzantine, 0, 1)
        return seats.may_close(self.liars, max(0, n - clients))

    def _code(self, n: int, clients: int) -> np.ndarray:
        o = self.options
        if o.sealed and (o.code != "deterministic" or n != 2 * o.byzantine + 1 or n < FEWEST):
            raise ConfigError(
                f"strategy '{self.name}' with sealed=true has every voter count all ballots, since votes on some tell "
                f"what those are, and code={o.code} of {n} seats with byzantine={o.byzantine} does not; give "
                f"{larger(n, clients, o.liars)}"
            )
        return allocation_matrix(o.code, n, o.byzantine, o.redundancy, self.rules.seed)

    def begin(self, weights: Tensor, layout: Layout) -> None:
        super().begin(weights, layout)
        self.margins: np.ndarray | None = (
            None  # in how many coordinates of the rounds that are looked at each margin occurred
        )
        self.looked_at = 0  # of these rounds
        self.said: set[str] = set()  # what is warned of once
        self.known: set[int] = set()  # clients that could ever be reached
        self._margins: np.ndarray | None = None  # of the round

    # A round.

    def choose(self, clients: Sequence[int], round: int) -> list[int]:
        cohort = super().choose(clients, round)
        if not len(self.code):  # nobody told how large cohorts are to be
            self.check_cohort(len(cohort))
        n, self.disproved, self._exchanges, self._margins = len(self.code), {}, {}, None
        self.known |= set(clients)
        if len(cohort) < n:
            cohort = draw(clients, min(n, len(clients)), self.rules.seed, round)
        empty = range(
            -max(0, n - len(cohort)), 0
        )  # absent clients, in the seats that nobody is here for
        data_sets = (
            [*cohort, *sorted(self.known - set(cohort))[: len(empty)]]
            if self.options.form == "data"
            else [*cohort, *empty]
        )
        if not self._bears(len(cohort), n) or len(data_sets) < n:
            self.seats = None
            self._say(
                "seats",
                f"round {round} is left out: {len(cohort)} clients can be reached, too few for {n} seats with "
                f"byzantine={self.options.byzantine}, liars={self.liars}",
            )
            return []
        self.seats = deal(
            [*cohort, *empty], n, self.options.byzantine, self.rules.seed, round, data_sets
        )
        self.allocation = self.code[[self.seats.of(client) for client in cohort]]
        if self.sealing:
            s = self.schedule
            told = s.rate(round), s.count("local_steps", round), s.count("batch_size", round)
            terms = terms_of(self.sealing.options, self.broadcasts.fingerprint, *told)
            self.sealing.begin(
                round, {client: self.row(client) for client in cohort}, self.layout.numel, terms
            )
        return cohort

    def phases(self, round: int) -> Iterable[Phase]:
        names = (
            (CARDS, BALLOTS, TALLY)
            if self.sealing
            else (TRAIN,)
            if self.options.form == "data"
            else (BALLOTS, TALLY)
        )
        for name in names if self.seats else names[:1]:
            if self._exchanges and (
                self._too_few([*self._exchanges.values()][-1].accepted) or self._untold
            ):
                return
            yield Phase(name, self._closing)
        if self.sealing and TALLY in self._exchanges:
            self.disproved = self.sealing.judge([*self._exchanges[TALLY].answers()])
            if self.sealing.proofs and not self._untold:
                yield Phase(RECOUNT, self._closing)

    @property
    def _closing(self) -> QuorumOrDeadline | None:
        """The run's own, but never before as many have answered as a vote needs: fast liars would fill a quorum first."""
        if self.seats is None:
            return None
        voters, asked = sum(map(len, self.seats.members)), len(self.allocation)
        needed = voters - (self.seats.margin - 1 - 2 * self.liars)
        raised = min(1.0, max(self.rules.quorum, needed / asked))
        if (asked_for := least(self.rules.quorum, asked)) < (waits := least(raised, asked)):
            self._say(
                "quorum",
                f"--quorum {self.rules.quorum:g} is {asked_for} of {asked} answers, and a vote with "
                f"liars={self.liars} waits for {waits}, so that fast liars do not fill it",
            )
        return QuorumOrDeadline(raised, self.rules.timeout_s)

    def row(self, client: int) -> Row:
        """What a client counts in this round."""
        seat = self.seats.of(client)
        return Row(
            client,
            seat,
            tuple(
                DataPartition(int(j), self.seats.groups[j]) for j in np.flatnonzero(self.code[seat])
            ),
        )

    def announce(
        self, phase: Phase, client: int, before: Mapping[str, Sequence[Accepted]]
    ) -> Mapping[str, bytes]:
        if self.sealing:
            return self.sealing.announce(phase.name, client, before)
        if phase.name == BALLOTS:
            return {}
        row = self.row(client)
        passed_on = {
            str(a.client): a.frame
            for a in before.get(BALLOTS, ())
            if a.frame and a.client in row.senders
        }
        return {ROW: row.pack()} | passed_on

    def look_over(self, phase: Phase, exchange: Exchange) -> None:
        if self.sealing and phase.name == CARDS:
            for client, why in self.sealing.strangers(exchange.accepted.keys(), self.liars).items():
                del exchange.accepted[client]
                exchange.rejected[client] = Rejection(client, "reply", why)

    def _exchange(self, grid: Any, round: int, phase: Phase, traffic: Traffic) -> Exchange:
        self._exchanges[phase.name] = exchange = super()._exchange(grid, round, phase, traffic)
        exchange.vet = lambda client, frame: self._vet(phase.name, client, frame)
        return exchange

    def _vet(self, phase: str, client: int, frame: bytes) -> None:
        if not frame:
            raise FrameError("the answer is empty; one who is honest always has signs to send")
        if self.sealing:
            self.sealing.vet(phase, client, frame)

    def open(self, phase: Phase, frames: Sequence[bytes]) -> list[Update | FrameError | None]:
        if not self.sealing:
            return super().open(phase, frames)
        if phase.name in (CARDS, BALLOTS):
            return [LETTER] * len(frames)
        return [self._opened(frame) for frame in frames]

    def _opened(self, frame: bytes) -> Update | FrameError | None:
        """The vote beside its complaints; None where there are complaints alone."""
        try:
            complaints, vote = with_complaints(frame)
            return (
                self.uplink.open(vote, self.layout.numel, self.layout)
                if vote or not complaints
                else None
            )
        except FrameError as error:
            return error

    # Its end.

    def _close(
        self,
        round: int,
        cohort: list[int],
        results: dict[str, list[Accepted]],
        rejected: dict[int, Rejection],
        traffic: Traffic,
    ) -> Outcome:
        name, last = list(results.items())[-1]
        results = results | {name: [a for a in last if a.client not in self.disproved]}
        rejected = rejected | {
            client: Rejection(client, "aggregate", why) for client, why in self.disproved.items()
        }
        if cohort and not results[name]:
            self._say("failed", f"round {round} failed: none of {len(cohort)} clients has voted")
        return super()._close(round, cohort, results, rejected, traffic)

    @property
    def proven(self) -> set[int]:
        """Who has been shown to lie in this round."""
        return {
            client for exchange in self._exchanges.values() for client in exchange.proven
        } | self.disproved.keys()

    @property
    def _untold(self) -> str:
        """Why the ballots of a sealed round are too few to vote on, in words; "" where they are not, or not yet passed on."""
        return (
            self.sealing.too_few(self._exchanges[BALLOTS].accepted)
            if self.sealing and BALLOTS in self._exchanges
            else ""
        )

    def _too_few(self, voted: Collection[int]) -> str:
        """Why a vote of these is not taken, in words; "" where it is."""
        voters = {client for members in self.seats.members for client in members}
        m, f, absent = len(self.proven), self.liars, len(voters - set(voted) - self.proven)
        if self.seats.may_close(max(0, f - m), m + absent):
            return ""
        left = f"{max(0, f - m)} more may lie" if m else f"{f} may lie"
        return (
            f"the vote could be a wrong one and was not taken: of {len(voters)} voters {absent} are absent and {m} proven to lie, "
            f"{left}, and 2·(may lie) + (proven) + (absent) has to stay below {self.seats.margin}"
        )

    def refusal(self, accepted: Sequence[Accepted]) -> str:
        m, f = len(self.proven), self.liars
        if m > f:
            who = f"{m} clients were" if m > 1 else "1 client was"
            self._say(
                "liars",
                f"{who} proven to lie in round {self.round}, more than liars={f}: the result holds if nobody else lies; "
                f"give liars={m} or more",
            )
        if reason := self._untold:
            self._say("failed", f"round {self.round} failed: {reason}; larger rounds bear more")
        elif reason := self._too_few([a.client for a in accepted if a.update is not None]):
            self._say(
                "failed",
                f"round {self.round} failed: {reason}; a larger 'byzantine', or fewer 'liars', bears more",
            )
        return reason

    def aggregate(self, phases: Mapping[str, Sequence[Accepted]], into: Tensor) -> None:
        last = list(phases.values())[-1]
        cast = {a.client: self.ballot(a.client, a.update) for a in last if a.update is not None}
        self.step(self.tally(cast), into)
        if (
            self.looked_at < LOOKED_AT
            and self.options.code == "bernoulli"
            and len(cast) == sum(map(len, self.seats.members))
        ):
            self._margins = votes.margin_counts([*cast.values()], into.numel())

    def tally(self, cast: Mapping[int, np.ndarray | bytes]) -> np.ndarray:
        """Likewise. Seats of few partitions are not judged where others hold most: there the honest lose wide where those few do."""
        result, held = super().tally(cast), self.code.sum(1, dtype=np.int64)
        if (most := 2 * held > len(self.code)).any():
            self._judged = {
                client: lost for client, lost in self._judged.items() if most[self.seats.of(client)]
            }
        return result

    def closed(self, outcome: Outcome) -> None:
        super().closed(outcome)
        if outcome.broadcast is not None and self._margins is not None:
            self.margins = self._margins if self.margins is None else self.margins + self._margins
            self.looked_at += 1
            if self.looked_at == LOOKED_AT:
                self._warn_of_harm()

    def _warn_of_harm(self) -> None:
        """Say where no code would be better than this one, whether those who may lie lied in the rounds that were looked at or not.

        Margins of honest votes, read as if some had been turned, tell too high a q, up to 1, at which no code can do harm.
        """
        o, members = self.options, [len(held) for held in self.seats.members]
        for liars in dict.fromkeys(
            (0, self.liars)
        ):  # the lower q first, whose outlook is the worse
            q = correctness.estimate_correctness(
                self.margins, self.code, liars, members, self.rules.seed
            )
            level = q and min(q, MOST_CORRECT)
            if level and (
                sentence := correctness.warning(
                    o.code, len(self.code), o.byzantine, level, o.redundancy, self.rules.seed
                )
            ):
                return self._say("code", sentence)

    def _say(self, what: str, sentence: str) -> None:
        if what not in self.said:
            self.said.add(what)
            self.warn(sentence)

    # Checkpoints.

    def take_changes(self) -> Changes:
        vectors, values = super().take_changes()
        margins = None if self.margins is None else self.margins.tolist()
        return vectors, values | {
            STATE: json.dumps(
                [self.looked_at, margins, sorted(self.said), sorted(self.known)]
            ).encode()
        }

    def restore(
        self, vector: Callable[[str], Tensor | None], value: Callable[[str], bytes | None]
    ) -> None:
        super().restore(vector, value)
        self.looked_at, margins, said, known = json.loads(value(STATE))
        self.margins, self.said, self.known = (
            None if margins is None else np.array(margins, np.int64),
            set(said),
            set(known),
        )
