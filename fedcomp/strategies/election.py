"""Election coding: a majority vote that Byzantine clients do not win.

Sohn, Han, Choi, Moon: Election coding for distributed learning: protecting signSGD against Byzantine attacks. NeurIPS 2020.

    local election    voter i: the majority of the signs of the partitions j with G_ij = 1
    global election   θ ← θ + η·(the majority of the votes), as strategy `vote`

G and the seats are those of codes.py. The option `form` says who trains on what:

`data`      Voters train on every partition of their row. Batches, dropout and coins are keyed by (seed, round, partition), so that honest
            votes agree to the bit. With the deterministic code the model is, bit for bit, the one without Byzantine clients. Every voter
            needs the data of all clients and trains once per partition. Running statistics start anew in each partition and are not
            kept; momentum that outlives a round and weights by examples are refused. Where devices of different kinds round a sign near
            zero differently, an honest vote differs there, as a Byzantine one might.
`ballots`   Clients train on their own data and sign a ballot; the server passes on to each voter the ballots of its row. The *tally* is
            guarded, the ballots are not: a Byzantine client's own ballot counts, wherever its vote ends.

With `sealed`, the server passes on ballots that it cannot read (sealed_election.py, docs/explanation/elections.md). This requires the
deterministic code with b = (n − 1)/2, whose votes reveal no more than the result.

When a round may close. Let f (option `f`) be the largest number of Byzantine clients in a cohort, m the number of clients that are
proven to be Byzantine in this round (each sent an invalid frame or a ballot that cannot be opened), and a the number of absent clients.
If all are present, honest votes win by at least `Seats.margin`, 2b + 1 with one voter per seat. A voter who is absent, or proven and
left out, takes 1 off the margin, a vote against the honest ones 2. At most f − m Byzantine clients are not proven, so the result stands
while

    2·max(0, f − m) + m + a < margin,   2·max(0, f − m) + m + a ≤ 2b

Where m > f, the run was given too small an f; the rule then holds if no other client is Byzantine, and the run warns once. A round that may
not close moves nothing: its votes are rejected with the reason, no further phase is asked for, and the next round draws a new cohort.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from .. import spec
from ..codecs import Codec, Context, Update
from ..codecs.checks import nonfinite_rows
from ..codecs.sign import Sign
from ..errors import ConfigError, FrameError, NonFiniteError, SpecError
from ..keys.keyring import DerivedKeys, ServerKeys
from ..memories import Memory
from ..memories.base import Changes, ReadValue, ReadVector
from ..memories.none import NoMemory
from ..messages import Assignment
from .base import AcceptedUpdate, Phase, PhaseResult, RoundUpdates
from .client_algorithm import ClientAlgorithm, DataPartition
from .codes import Seats, allocation_matrix, assign_seats
from .cohort import draw_cohort
from .guarantees import can_close, check_seats, notice
from .local_election import (
    BALLOTS,
    ROW,
    TALLY,
    CodeRow,
    announced_row,
    announcements,
    ballot_of,
    ballots_of_row,
    sent_ballot,
    vote_of,
)
from .round_completion import RoundCompletion, quorum_size
from .sealed_election import UNREAD_UPDATE, SealedElectionClient, SealedRound
from .sealed_messages import CARDS, RECOUNT, split_vote, terms_of
from .vote import Vote

MAX_SEATS = 15  # unless given: a voter of a full row trains on as many partitions
STATE = "election"  # in a checkpoint


@dataclass(frozen=True)
class Options:
    code: Literal["deterministic", "bernoulli", "uncoded"] = "deterministic"
    byzantine: int = 1  # b that the code is made for, of n seats
    f: int | None = None  # Byzantine clients of a round, proven or not; None: `byzantine`
    redundancy: float | None = None  # mean partitions of a row, of the Bernoulli code
    seats: int = 0  # n; 0: as many as the cohort has clients, at most MAX_SEATS
    form: Literal["data", "ballots"] = "data"  # ballots: guards the tally alone
    sealed: bool = False  # ballots that the server cannot read
    momentum: float = 0.0  # β, of the server

    def __post_init__(self) -> None:
        spec.check_decays(self, "momentum")
        if self.seats < 0 or (self.f is not None and self.f < 0):
            raise SpecError("seats and f are counts; give 0 or more")
        if self.sealed and self.form != "ballots":
            raise SpecError("sealed is for ballots that are passed on; give form=ballots as well")


class DataElectionClient(ClientAlgorithm):
    """Train on all partitions of a row and vote once."""

    trains_on_partitions: ClassVar[bool] = True

    def seed(self, codec: Codec, run_seed: int, assignment: Assignment) -> int:
        return run_seed  # a vote has no zeros, and coins are keyed by what they decide

    def partitions(self, assignment: Assignment) -> Sequence[DataPartition]:
        return announced_row(announcements(assignment)).parts

    def summarize(
        self, partition: DataPartition, update: Tensor, seed: int, round: int
    ) -> tuple[bytes, NonFiniteError | None]:
        """Return the ballot of a partition, and the error of an update that holds NaN or infinity."""
        (error,) = nonfinite_rows(update[None], None, f"the update of partition {partition.number}")
        return ballot_of(update, seed, round, partition.number), error

    def combine(
        self,
        assignment: Assignment,
        summaries: Sequence[tuple[bytes, NonFiniteError | None]],
        numel: int,
        seed: int,
    ) -> Tensor:
        """Raises NonFiniteError where most of several updates are not finite: training fails everywhere, not on one bad data set."""
        errors = [error for _, error in summaries if error is not None]
        if len(summaries) > 1 and 2 * len(errors) > len(summaries):
            raise errors[0]
        row, ballots = announced_row(announcements(assignment)), [ballot for ballot, _ in summaries]
        return vote_of(row, ballots, numel, seed, assignment.round)


class BallotElectionClient(ClientAlgorithm):
    """Send the signs of the own update, then vote on the ballots that were passed on."""

    one_by_one: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__((BALLOTS, TALLY))

    def seed(self, codec: Codec, run_seed: int, assignment: Assignment) -> int:
        own = super().seed(codec, run_seed, assignment)
        return own if assignment.phase == BALLOTS else run_seed

    def later_update(
        self, memory: Memory, values: dict[str, Any], seed: int, context: Context
    ) -> Tensor:
        row, told = announced_row(context.announced), context.announced
        passed_on = [client for client in row.senders if str(client) in told]
        sent = {client: sent_ballot(memory, told[str(client)]) for client in passed_on}
        numel, round = memory.numel, context.round
        return vote_of(row, ballots_of_row(row, sent, numel, seed, round), numel, seed, round)

    def encode_one(
        self, memory: Memory, update: Tensor, values: dict[str, Any], seed: int, context: Context
    ) -> bytes:
        if context.phase == BALLOTS:
            return memory.codec.encode(update, seed=seed, layout=memory.layout, context=context)
        return memory.propose(update, seed=seed, context=context)


class Election(Vote):
    """A majority of votes by a code, over the data of all clients or over ballots that are passed on."""

    name: ClassVar[str] = "election"
    Options: ClassVar[type] = Options
    allowed_uplinks: ClassVar[tuple[type[Codec], ...]] = (Sign,)
    required_memory: ClassVar[str] = NoMemory.name  # honest votes agree to the bit

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        o = self.options
        self.sealed = SealedRound(DerivedKeys(self.config.seed)) if o.sealed else None
        self.client_algorithm = self.client_for(o)
        if self.sealed:
            self.client_algorithm = replace(self.client_algorithm, ring=self.sealed.ring)
        self.f = o.byzantine if o.f is None else o.f
        self.code = np.empty((0, 0), np.uint8)  # G; empty until the size of cohorts is known
        self.notice = notice(o, self.f, self.code)
        self.seats: Seats | None = None  # of the round; None: too few clients
        self.convicted: dict[int, str] = {}  # of the round: left out after the tally, with reasons
        self._round = 0
        self._ended: dict[str, PhaseResult] = {}  # phases of the round that are over
        self.said: set[str] = set()  # warnings, each given once
        self.known: set[int] = set()  # clients that could ever be reached
        if self.cohort_size:
            self._make_code(self.cohort_size)

    def _check_settings(self) -> None:
        super()._check_settings()
        if self.config.keep_momentum:
            raise ConfigError(
                f"--strategy {self.name} trains on other data in every round, and has no momentum to keep; leave "
                "--keep-momentum out"
            )

    @classmethod
    def client_for(cls, options: Options) -> ClientAlgorithm:
        if options.sealed:
            return SealedElectionClient()
        return DataElectionClient() if options.form == "data" else BallotElectionClient()

    def set_identity(self, run: str, key_of: Callable[[int], bytes], options: str) -> None:
        if self.sealed:
            self.sealed.ring, self.sealed.options = ServerKeys(run, key_of), options

    def _make_code(self, clients: int) -> None:
        """Choose the code for cohorts of this size. Raises ConfigError if there is none for the options."""
        o = self.options
        n = o.seats or min(clients - (o.code == "deterministic" and clients % 2 == 0), MAX_SEATS)
        check_seats(o, self.f, n, clients)
        self.code = allocation_matrix(o.code, n, o.byzantine, o.redundancy, self.config.seed)
        self.min_clients = next(
            c for c in range(1, clients + 1) if can_close(c, n, o.byzantine, self.f)
        )
        self.allocation, self.notice = self.code, notice(o, self.f, self.code, clients)

    # A round.

    def select_clients(self, clients: Sequence[int], round: int, fingerprint: str) -> list[int]:
        cohort = super().select_clients(clients, round, fingerprint)
        if not len(self.code):  # nobody told how large cohorts are to be
            self._make_code(len(cohort))
        n, b = len(self.code), self.options.byzantine
        self.convicted, self._ended, self._round = {}, {}, round
        self.known |= set(clients)
        if len(cohort) < n:
            cohort = draw_cohort(clients, min(n, len(clients)), self.config.seed, round)
        empty = range(-max(0, n - len(cohort)), 0)  # stand for absent clients in empty seats
        data_sets = [*cohort, *empty]
        if self.options.form == "data":  # that of absent clients is there
            data_sets = [*cohort, *sorted(self.known - set(cohort))[: len(empty)]]
        if not can_close(len(cohort), n, b, self.f) or len(data_sets) < n:
            self.seats = None
            self._say(
                "seats",
                f"round {round} is left out: {len(cohort)} clients can be reached, too few for {n} seats with "
                f"byzantine={b}, f={self.f}",
            )
            return []
        self.seats = assign_seats([*cohort, *empty], n, b, self.config.seed, round, data_sets)
        self.allocation = self.code[[self.seats.of(client) for client in cohort]]
        if self.sealed:
            s = self.schedule
            told = s.rate(round), s.count("local_steps", round), s.count("batch_size", round)
            terms = terms_of(self.sealed.options, fingerprint, *told)
            rows = {client: self.row(client) for client in cohort}
            self.sealed.start(round, rows, self.layout.numel, terms)
        return cohort

    def phases(self, round: int) -> Iterable[Phase]:
        names = [name for name in self.client_algorithm.phases if name != RECOUNT]
        for name in names if self.seats else names[:1]:
            if self._ended:
                last = list(self._ended.values())[-1]
                if self._too_few([a.client for a in last.accepted]) or self._untold:
                    return
            yield Phase(name, self._completion)
        if self.sealed and TALLY in self._ended:
            self.convicted = self.sealed.judge(self._ended[TALLY].accepted)
            if self.sealed.proofs and not self._untold:
                yield Phase(RECOUNT, self._completion)

    @property
    def _completion(self) -> RoundCompletion | None:
        """The run's quorum, raised to the answers that a vote needs: fast Byzantine clients would fill a smaller one first."""
        if self.seats is None:
            return None
        voters, asked = sum(map(len, self.seats.members)), len(self.allocation)
        needed = voters - (self.seats.margin - 1 - 2 * self.f)
        raised = min(1.0, max(self.config.quorum, needed / asked))
        if (asked_for := quorum_size(self.config.quorum, asked)) < (
            waits := quorum_size(raised, asked)
        ):
            self._say(
                "quorum",
                f"--quorum {self.config.quorum:g} is {asked_for} of {asked} answers, and a vote with "
                f"f={self.f} waits for {waits}, so that fast Byzantine clients do not fill it",
            )
        return RoundCompletion(raised, self.config.timeout_s)

    def row(self, client: int) -> CodeRow:
        """Return what a client counts in this round."""
        seat = self.seats.of(client)
        numbers = np.flatnonzero(self.code[seat]).tolist()
        return CodeRow(client, seat, tuple(DataPartition(j, self.seats.groups[j]) for j in numbers))

    def announce(
        self, phase: Phase, client: int, before: Mapping[str, Sequence[AcceptedUpdate]]
    ) -> Mapping[str, bytes]:
        if self.sealed:
            return self.sealed.announce(phase.name, client, before)
        if phase.name == BALLOTS:
            return {}
        row = self.row(client)
        passed_on = {
            str(a.client): a.frame
            for a in before.get(BALLOTS, ())
            if a.frame and a.client in row.senders
        }
        return {ROW: row.pack()} | passed_on

    def on_phase_end(self, result: PhaseResult) -> Mapping[int, str]:
        left_out: dict[int, str] = {}
        if self.sealed and result.phase == CARDS:
            present = {a.client for a in result.accepted}
            left_out = self.sealed.without_known_key(present, self.f)
        rest = [a for a in result.accepted if a.client not in left_out]
        self._ended[result.phase] = replace(result, accepted=rest)
        return left_out

    def check_frame(self, phase: Phase, client: int, frame: bytes) -> None:
        if not frame:
            raise FrameError("the answer is empty; an honest client always has signs to send")
        if self.sealed:
            self.sealed.check(phase.name, client, frame)

    def open(self, phase: Phase, frames: Sequence[bytes]) -> list[Update | FrameError | None]:
        if not self.sealed:
            return super().open(phase, frames)
        if phase.name in (CARDS, BALLOTS):
            return [UNREAD_UPDATE] * len(frames)
        return [self._opened(frame) for frame in frames]

    def _opened(self, frame: bytes) -> Update | FrameError | None:
        """Return the vote after its complaints; None where there are complaints alone."""
        try:
            complaints, vote = split_vote(frame)
            if complaints and not vote:
                return None
            return self.uplink.open(vote, self.layout.numel, self.layout)
        except FrameError as error:
            return error

    # Its end.

    @property
    def proven_byzantine(self) -> set[int]:
        """The clients proven to be Byzantine in this round."""
        return {
            c for phase in self._ended.values() for c in phase.proven_byzantine
        } | self.convicted.keys()

    @property
    def _untold(self) -> str:
        """The reason why the ballots of a sealed round are too few to vote on; "" if they are enough, or not yet passed on."""
        if not self.sealed or BALLOTS not in self._ended:
            return ""
        return self.sealed.too_few([a.client for a in self._ended[BALLOTS].accepted])

    def _too_few(self, voted: Collection[int]) -> str:
        """Return the reason why a vote of these clients is not taken, "" if it is."""
        voters = {client for members in self.seats.members for client in members}
        m, f, absent = (
            len(self.proven_byzantine),
            self.f,
            len(voters - set(voted) - self.proven_byzantine),
        )
        if self.seats.may_close(max(0, f - m), m + absent):
            return ""
        left = f"{max(0, f - m)} more may lie" if m else f"{f} may lie"
        return (
            f"the vote could be a wrong one and was not taken: of {len(voters)} voters {absent} are absent and {m} proven to lie, "
            f"{left}, and 2·(may lie) + (proven) + (absent) has to stay below {self.seats.margin}"
        )

    def reject(self, accepted: Sequence[AcceptedUpdate]) -> Mapping[int, str]:
        left = [a for a in accepted if a.client not in self.convicted]
        if not left and self.seats is not None:
            clients = len(self.allocation)
            self._say("failed", f"round {self._round} failed: none of {clients} clients has voted")
        reason = self._refusal(left) if left else ""
        return self.convicted | ({a.client: reason for a in left} if reason else {})

    def _refusal(self, accepted: Sequence[AcceptedUpdate]) -> str:
        """Return the reason why a vote of these clients moves nothing, "" if it may."""
        m, f = len(self.proven_byzantine), self.f
        if m > f:
            who = f"{m} clients were" if m > 1 else "1 client was"
            self._say(
                "byzantine",
                f"{who} proven to lie in round {self._round}, more than f={f}: the result holds if nobody else lies; "
                f"give f={m} or more",
            )
        voted = [a.client for a in accepted if a.update is not None]
        if reason := self._untold or self._too_few(voted):
            self._say(
                "failed",
                f"round {self._round} failed: {reason}; more clients in a round, a larger 'byzantine' or a smaller 'f' tolerate more",
            )
        return reason

    def _tally(self, cast: Mapping[int, np.ndarray | bytes], updates: RoundUpdates) -> np.ndarray:
        result = super()._tally(cast, updates)
        # Honest seats of few partitions lose by wide margins where others count most of them, so they are not judged.
        most = 2 * self.code.sum(1, dtype=np.int64) > len(self.code)
        if most.any():
            judged = self._judged.items()
            self._judged = {client: lost for client, lost in judged if most[self.seats.of(client)]}
        return result

    def _say(self, what: str, sentence: str) -> None:
        if what not in self.said:
            self.said.add(what)
            self.warn(sentence)

    # Checkpoints.

    def take_changes(self) -> Changes:
        vectors, values = super().take_changes()
        values[STATE] = json.dumps([sorted(self.said), sorted(self.known)]).encode()
        return vectors, values

    def restore(self, vector: ReadVector, value: ReadValue) -> None:
        super().restore(vector, value)
        said, known = json.loads(value(STATE))
        self.said, self.known = set(said), set(known)
