"""Election coding: a majority vote on the signs of updates that tolerates Byzantine clients.

Sohn, Han, Choi, Moon: Election coding for distributed learning: protecting signSGD against Byzantine attacks. NeurIPS 2020.

The data are divided into n partitions, and an election has n seats, each with one or more clients as voters. Row i of the allocation matrix
G (codes.py) determines the partitions of seat i.

    Local election:    each voter of seat i votes for the majority of the signs of its partitions, the partitions j with G_ij = 1.
    Global election:   the update is the learning rate times the majority of all votes, as in the strategy `vote`.

Both majorities are computed in each coordinate.

The option `form` selects where the signs of a partition come from:

`data`      A voter trains on each partition of its seat. The signs of a partition are those of the resulting update. Batches, dropout and
            random signs depend only on the seed, the round and the partition, so honest voters of a seat send identical votes. With the
            deterministic code, up to f Byzantine clients cannot change the model. But every voter needs the data of all clients.
            BatchNorm statistics are reset for each partition and then discarded. CPUs and GPUs of different types may round a value near
            zero to different signs. In such a coordinate, the vote of an honest client can be wrong.
`ballots`   A client trains on its own data and sends the signs of its update, its ballot. The signs of a partition are the majority of its
            clients' ballots. The server forwards the ballots to the voters, which count them and send their votes in a second phase, the
            *tally*. Only the counting is protected: the ballot of a Byzantine client counts like any other ballot. With the option
            `sealed`, ballots are encrypted, so that the server cannot read them (sealed_election.py).

A client is proven Byzantine if it sends an invalid frame. With `sealed`, it is also proven Byzantine if it sends a ballot that cannot be
decrypted, or a false complaint about a ballot. The server excludes proven Byzantine clients from the round. Let m be the number of these
clients, `a` the number of absent voters, and f (an option) the largest number of Byzantine clients in a round, including the m clients.
`Seats.margin` is the lead of the correct votes over the wrong votes if all voters are present and honest. A Byzantine vote reduces this
lead by 2, and an absent or excluded voter reduces it by 1. Therefore, a round updates the model only if

    2·max(0, f − m) + m + a < margin.

Otherwise, the server rejects all votes of the round, and the next round draws a new cohort. If m > f, the option `f` is too small, and the
run warns once that the result is correct only if no client except these m is Byzantine.

The options `--keep-momentum` and `--weights examples` are errors with this strategy.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from .. import spec
from ..codecs import Codec, Context, Update
from ..codecs.base import nonfinite_errors
from ..codecs.sign import Sign
from ..codecs.update import Dense
from ..errors import ConfigError, FrameError, NonFiniteError, SpecError
from ..keys.keyring import DerivedKeys, ServerKeys
from ..memories import Memory
from ..memories.base import Changes, ReadValue, ReadVector
from ..memories.none import NoMemory
from ..messages import Assignment
from . import codes
from .base import (
    AcceptedByPhase,
    AcceptedUpdate,
    ClientAlgorithm,
    DataPartition,
    Phase,
    PhaseResult,
    RoundCompletion,
    Values,
    draw_cohort,
    quorum_size,
)
from .codes import (
    BALLOTS,
    ROW,
    TALLY,
    CodeRow,
    Seats,
    announced_row,
    ballot_of,
    signs_of,
    tolerates,
    vote_of,
    vote_on_ballots,
)
from .sealed_election import (
    CARDS,
    MIN_PARTITIONS,
    RECOUNT,
    SealedElectionClient,
    SealedRound,
    split_vote,
    terms_of,
    too_few_ballots,
)
from .vote import Vote, even_cohort

MAX_SEATS = 15  # largest default of the option `seats`; more seats mean more work for each voter
KNOWN_CLIENTS = "election"  # name of the checkpoint entry with the ids of all known clients
NO_SEATS = Seats((), (), 0)  # in a round that has too few clients for an election
# Placeholder for the update in a frame that contains cards or an encrypted ballot
UNREAD_UPDATE = Dense(np.empty(0, np.float32))


@dataclass(frozen=True)
class ElectionOptions:
    code: Literal["deterministic", "bernoulli", "uncoded"] = "deterministic"
    byzantine: int = 1  # b: number of Byzantine seats that the code tolerates
    f: int | None = None  # largest number of Byzantine clients in a round; None = `byzantine`
    # For code=bernoulli: mean number of data partitions per seat if seats without partitions were allowed; None = √(n·ln n), for n seats
    redundancy: float | None = None
    # n: number of seats and of data partitions; 0 = number of clients in a round (minus 1 if it is even and code=deterministic), at most 15
    seats: int = 0
    # data: voters train on the data of several clients; ballots: voters count the ballots (signs of updates) that clients send
    form: Literal["data", "ballots"] = "data"
    sealed: bool = False  # encrypt ballots, so that the server cannot read them; needs form=ballots
    momentum: float = 0.0  # β: factor of the momentum on the server

    def __post_init__(self) -> None:
        spec.check_decays(self, "momentum")
        spec.check_ranges(self, seats=(0, math.inf), f=(0, math.inf))
        if self.sealed and self.form != "ballots":
            raise SpecError("sealed=true needs form=ballots; give both")


# The client half.


class DataElectionClient(ClientAlgorithm):
    """Client half for form=data: train on all partitions of the seat, and send one vote."""

    trains_on_partitions: ClassVar[bool] = True

    def partitions(self, assignment: Assignment) -> Sequence[DataPartition]:
        return announced_row(assignment.announcements).partitions

    def summarize(
        self, partition: DataPartition, update: Tensor, seed: int, round: int
    ) -> tuple[bytes, NonFiniteError | None]:
        """Return the ballot of a partition's update, and a NonFiniteError if the update contains NaN or infinity, else None."""
        (error,) = nonfinite_errors(
            update[None], None, f"the update of partition {partition.number}"
        )
        return ballot_of(update, seed, round, partition.number), error

    def combine(
        self,
        assignment: Assignment,
        summaries: Sequence[tuple[bytes, NonFiniteError | None]],
        numel: int,
        seed: int,
    ) -> Tensor:
        """Return a client's vote. Raises NonFiniteError if the client has several partitions, and most of their updates are not finite."""
        errors = [error for _, error in summaries if error is not None]
        if len(summaries) > 1 and 2 * len(errors) > len(summaries):
            raise errors[0]
        row, ballots = announced_row(assignment.announcements), [ballot for ballot, _ in summaries]
        return vote_of(row, ballots, numel, seed, assignment.round)


@dataclass(frozen=True)
class BallotElectionClient(ClientAlgorithm):
    """Client half for form=ballots: send the signs of the update, then vote on the ballots that the server forwards."""

    phases: tuple[str, ...] = (BALLOTS, TALLY)

    one_by_one: ClassVar[bool] = True

    def seed(self, codec: Codec, run_seed: int, assignment: Assignment) -> int:
        if assignment.phase == BALLOTS:
            return super().seed(codec, run_seed, assignment)
        return run_seed  # honest voters of a seat must draw the same random signs

    def later_update(self, memory: Memory, values: Values, seed: int, context: Context) -> Tensor:
        announced, row = context.announced, announced_row(context.announced)
        ballots = {
            client: signs_of(memory.codec.open(announced[str(client)], memory.numel, memory.layout))
            for client in row.senders
            if str(client) in announced
        }
        return vote_on_ballots(row, ballots, memory.numel, seed, context.round)

    def encode_one(
        self, memory: Memory, update: Tensor | None, values: Values, seed: int, context: Context
    ) -> bytes | None:
        assert update is not None
        if context.phase == BALLOTS:
            return memory.codec.encode(update, seed=seed, layout=memory.layout, context=context)
        return memory.propose(update, seed=seed, context=context)


# The server half.


class Election(Vote):
    """A majority vote with election coding."""

    name: ClassVar[str] = "election"
    Options: ClassVar[type] = ElectionOptions
    allowed_uplinks: ClassVar[tuple[type[Codec], ...]] = (Sign,)
    required_memory: ClassVar[str] = NoMemory.name  # error feedback would make honest votes differ

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        o = self.options
        self.sealed: SealedRound | None = None
        self.client_algorithm = client = self.client_for(o)
        if isinstance(client, SealedElectionClient):
            self.sealed = SealedRound(DerivedKeys(self.config.seed))
            self.client_algorithm = replace(client, ring=self.sealed.ring)
        self.f = o.byzantine if o.f is None else o.f
        # The allocation matrix G [n, n]; empty until the number of clients in a round is known.
        self.code = np.empty((0, 0), np.uint8)
        self.notice = self._guarantee()
        self.known_clients: set[int] = set()  # all clients that have ever connected
        # The state of the current round:
        self.seats = NO_SEATS  # NO_SEATS if the round has too few clients
        self._selected = 0  # number of clients in the cohort
        self._excluded: dict[int, str] = {}  # clients excluded after the tally, with the reason
        self._round = 0
        self._results: dict[str, PhaseResult] = {}  # results of the phases that have ended
        if self.cohort_size:
            self._make_code(self.cohort_size)

    def _check_settings(self) -> None:
        super()._check_settings()
        if self.config.keep_momentum:
            raise ConfigError(
                f"--strategy {self.name} cannot keep the momentum of clients, because they may train on different data in every round "
                "(form=data); leave --keep-momentum out"
            )

    @classmethod
    def client_for(cls, options: ElectionOptions) -> ClientAlgorithm:
        if options.sealed:
            return SealedElectionClient()
        return DataElectionClient() if options.form == "data" else BallotElectionClient()

    def set_identity(self, run: str, key_of: Callable[[int], bytes], options: str) -> None:
        if self.sealed:
            self.sealed.ring, self.sealed.options = ServerKeys(run, key_of), options

    def _make_code(self, clients: int) -> None:
        o = self.options
        n = o.seats or min(clients - (o.code == "deterministic" and clients % 2 == 0), MAX_SEATS)
        self._check_seats(n, clients)
        self.code = codes.allocation_matrix(o.code, n, o.byzantine, o.redundancy, self.config.seed)
        self.min_clients = next(
            c for c in range(1, clients + 1) if tolerates(c, n, o.byzantine, self.f)
        )
        self.allocation, self.notice = self.code, self._guarantee(clients)

    def _check_seats(self, n: int, clients: int) -> None:
        """Raise ConfigError if an election with n seats and this many clients is impossible with the options."""
        o, f = self.options, self.f
        if n > clients:
            raise ConfigError(
                f"--strategy election with seats={n} needs rounds of at least {n} clients, but a round has {clients} clients; give "
                "a smaller 'seats', a larger --participation, or more --clients"
            )
        if 2 * o.byzantine >= n:
            raise ConfigError(
                f"--strategy election with byzantine={o.byzantine} needs {2 * o.byzantine + 1} seats, but a round of {clients} "
                f"clients has only {n}; give byzantine={(n - 1) // 2}, more 'seats', a larger --participation, or more --clients"
            )
        if o.sealed and (
            o.code != "deterministic" or n != 2 * o.byzantine + 1 or n < MIN_PARTITIONS
        ):
            raise ConfigError(
                f"--strategy election with sealed=true does not work with code={o.code}, {n} seats and byzantine={o.byzantine}: votes on "
                f"few ballots would reveal these ballots; give code=deterministic, an odd number of 'seats', at least {MIN_PARTITIONS}, "
                "and byzantine=(seats - 1)/2, so that every voter counts every ballot"
            )
        if not tolerates(clients, n, o.byzantine, f):
            tolerated = (codes.assign_seats(range(clients), n, o.byzantine, 0, 1).margin - 1) // 2
            raise ConfigError(
                f"--strategy election with byzantine={o.byzantine} tolerates {tolerated} Byzantine clients among {clients} clients, not "
                f"f={f}; give a larger 'byzantine' or a smaller 'f'"
            )
        if o.sealed and n - f // (clients // n) < MIN_PARTITIONS:
            raise ConfigError(
                f"--strategy election with sealed=true needs valid ballots of at least {MIN_PARTITIONS} partitions, but a round has {n} "
                f"partitions of about {clients // n} clients, so that f={f} Byzantine clients can leave only {n - f // (clients // n)} "
                "partitions with valid ballots; give a smaller 'f', or more 'seats' and --clients"
            )

    def _guarantee(self, clients: int = 0) -> str:
        """Return a text for the user about the run's protection against Byzantine clients.

        `clients`: number of clients in a round, or 0 if unknown.
        """
        o, f, code = self.options, self.f, self.code
        if o.code != "deterministic":
            sentences = [
                f"code={o.code} changes the probability of a wrong vote and guarantees nothing against Byzantine clients; "
                "code=deterministic gives a guarantee"
            ]
            if o.code == "bernoulli" and clients:
                default = codes.default_redundancy(len(code))
                requested = default if o.redundancy is None else o.redundancy
                counts, unit = (
                    ("trains on", "partitions")
                    if o.form == "data"
                    else ("counts the ballots of", f"of {len(code)} groups of clients")
                )
                sentences.append(
                    f"a voter {counts} {codes.mean_redundancy(code):.3g} {unit} on average, not {requested:.3g}: the allocation matrix is "
                    "drawn again while it has an empty row or column"
                )
            return "; ".join([*sentences, *filter(None, [even_cohort(clients)])])
        byzantine = f"{f} Byzantine client{'s' * (f != 1)}"
        if o.form == "data":
            text = f"up to {byzantine} in a round cannot change the model; for this, every client needs the data of all clients"
        else:
            text = (
                f"the counting of ballots (signs of updates) is protected against up to {byzantine} in a round, but the ballot of a "
                "Byzantine client counts like any other"
            )
        if clients:
            margin = codes.assign_seats(range(clients), len(code), o.byzantine, 0, 1).margin
            spare = margin - 1 - 2 * f
            if o.sealed:
                spare = min(spare, clients // len(code) * (len(code) - MIN_PARTITIONS + 1) - 1)
            absent = f"more than {spare} clients" if spare else "any client"
            text += f"; with {absent} absent, a round does not update the model"
        if o.sealed:
            text += (
                "; ballots are encrypted: the server sees votes, message sizes and times, but cannot read a ballot unless a voter "
                "reveals it"
            )
        return text

    # During a round.

    def select_clients(self, clients: Sequence[int], round: int, fingerprint: str) -> list[int]:
        cohort = super().select_clients(clients, round, fingerprint)
        if not len(self.code):  # the number of clients was unknown at the start of the run
            self._make_code(len(cohort))
        n, b = len(self.code), self.options.byzantine
        self._excluded, self._results, self._round = {}, {}, round
        self.known_clients |= set(clients)
        if len(cohort) < n:
            cohort = draw_cohort(clients, min(n, len(clients)), self.config.seed, round)
        # If the cohort has fewer than n clients, negative ids fill the empty seats. They count as absent voters.
        empty = range(-max(0, n - len(cohort)), 0)
        owners = [*cohort, *empty]
        # The data of known clients outside the cohort fill empty partitions.
        if self.options.form == "data":
            owners = [*cohort, *sorted(self.known_clients - set(cohort))[: len(empty)]]
        if not tolerates(len(cohort), n, b, self.f) or len(owners) < n:
            self.seats = NO_SEATS
            self.warn(
                f"round {round} is skipped: {len(cohort)} clients are available, too few for {n} seats with byzantine={b}, f={self.f}",
                kind="seats",
            )
            return []
        self.seats = codes.assign_seats([*cohort, *empty], n, b, self.config.seed, round, owners)
        self.allocation = self.code[[self.seats.seat_of(client) for client in cohort]]
        self._selected = len(cohort)
        if self.sealed:
            s = self.schedule
            settings = s.rate(round), s.count("local_steps", round), s.count("batch_size", round)
            terms = terms_of(self.sealed.options, fingerprint, *settings)
            rows = {client: self.row(client) for client in cohort}
            self.sealed.start(round, rows, self.layout.numel, terms)
        return cohort

    def phases(self, round: int) -> Iterable[Phase]:
        names = [name for name in self.client_algorithm.phases if name != RECOUNT]
        for name in names if self.seats is not NO_SEATS else names[:1]:
            if self._results:
                last = list(self._results.values())[-1]
                if self._too_few_votes(last.accepted) or self._too_few_ballots:
                    return
            yield Phase(name, self._completion)
        if self.sealed and TALLY in self._results:
            self._excluded = self.sealed.check_complaints(self._results[TALLY].accepted)
            if self.sealed.proofs and not self._too_few_ballots:
                yield Phase(RECOUNT, self._completion)

    @property
    def _completion(self) -> RoundCompletion | None:
        """The rule that ends a phase. Its quorum is so large that Byzantine clients cannot fill it by answering first."""
        if self.seats is NO_SEATS:
            return None
        voters, selected = sum(map(len, self.seats.voters)), self._selected
        needed = voters - (self.seats.margin - 1 - 2 * self.f)
        raised = min(1.0, max(self.config.quorum, needed / selected))
        configured, required = (quorum_size(q, selected) for q in (self.config.quorum, raised))
        if configured < required:
            self.warn(
                f"--quorum {self.config.quorum:g} is {configured} of {selected} answers, but a vote with "
                f"f={self.f} waits for {required} answers, so that fast Byzantine clients cannot fill the quorum",
                kind="quorum",
            )
        return RoundCompletion(raised, self.config.timeout_s)

    def row(self, client: int) -> CodeRow:
        """Return a client's row of the allocation matrix in this round."""
        seat, partitions = self.seats.seat_of(client), self.seats.partitions
        numbers = np.flatnonzero(self.code[seat]).tolist()
        return CodeRow(client, seat, tuple(DataPartition(j, partitions[j]) for j in numbers))

    def announce(self, phase: Phase, client: int, before: AcceptedByPhase) -> Mapping[str, bytes]:
        if self.sealed:
            return self.sealed.announce(phase.name, client, before)
        if phase.name == BALLOTS:
            return {}
        row, ballots = self.row(client), before.get(BALLOTS, ())
        sent = {str(a.client): a.frame for a in ballots if a.frame and a.client in row.senders}
        return {ROW: row.pack()} | sent

    def on_phase_end(self, result: PhaseResult) -> Mapping[int, str]:
        excluded: dict[int, str] = {}
        if self.sealed and result.phase == CARDS:
            excluded = self.sealed.without_known_key({a.client for a in result.accepted}, self.f)
        rest = [a for a in result.accepted if a.client not in excluded]
        self._results[result.phase] = replace(result, accepted=rest)
        return excluded

    def check_frame(self, phase: Phase, client: int, frame: bytes) -> None:
        if not frame:
            raise FrameError("the frame is empty, but every honest client sends signs")
        if self.sealed:
            self.sealed.check_frame(phase.name, client, frame)

    def open(self, phase: Phase, frames: Sequence[bytes]) -> Sequence[Update | FrameError | None]:
        if not self.sealed:
            return super().open(phase, frames)
        if phase.name in (CARDS, BALLOTS):
            return [UNREAD_UPDATE] * len(frames)
        return [self._open_vote(frame) for frame in frames]

    def _open_vote(self, frame: bytes) -> Update | FrameError | None:
        """Decode the vote in a frame of a sealed election. Return None for a frame of complaints without a vote."""
        try:
            complaints, vote = split_vote(frame)
            if complaints and not vote:
                return None
            return self.uplink.open(vote, self.layout.numel, self.layout)
        except FrameError as error:
            return error

    # The end of a round.

    @property
    def proven_byzantine(self) -> set[int]:
        """The clients proven to be Byzantine in this round."""
        proven = (result.proven_byzantine for result in self._results.values())
        return set(self._excluded).union(*proven)

    @property
    def _too_few_ballots(self) -> str:
        """The reason why a sealed election has too few ballots for a vote; "" if it has enough, or if the phase `ballots` has not ended."""
        if not self.sealed or BALLOTS not in self._results:
            return ""
        row = next(iter(self.sealed.rows.values()))  # every row contains all senders of ballots
        senders = {a.client for a in self._results[BALLOTS].accepted}
        return too_few_ballots(row, senders - self.sealed.proofs.keys())

    def _too_few_votes(self, voted: Collection[AcceptedUpdate]) -> str:
        """Return the reason why the result of the votes could be wrong, or "" if it is certainly correct."""
        voters = {client for voters in self.seats.voters for client in voters}
        m, f = len(self.proven_byzantine), self.f
        absent = len(voters - {a.client for a in voted} - self.proven_byzantine)
        if self.seats.tolerates(max(0, f - m), m + absent):
            return ""
        possible = f"{max(0, f - m)} more may be" if m else f"{f} may be"
        return (
            f"the result could be wrong and was discarded: of {len(voters)} voters, {absent} are absent, {m} are proven Byzantine, "
            f"and {possible} Byzantine; together, they could change the majority"
        )

    def reject(self, accepted: Sequence[AcceptedUpdate]) -> Mapping[int, str]:
        remaining = [a for a in accepted if a.client not in self._excluded]
        if not remaining:
            if self.seats is not NO_SEATS:
                failed = f"round {self._round} failed: none of {self._selected} clients has voted"
                self.warn(failed, kind="failed election")
            return self._excluded
        m, f = len(self.proven_byzantine), self.f
        if m > f:
            clients = f"{m} clients were" if m > 1 else "1 client was"
            self.warn(
                f"{clients} proven Byzantine in round {self._round}, more than f={f}: the result is correct only if no other client "
                f"is Byzantine; give f={m} or more",
                kind="more than f",
            )
        voted = [a for a in remaining if a.update is not None]
        reason = self._too_few_ballots or self._too_few_votes(voted)
        if not reason:
            return self._excluded
        self.warn(
            f"round {self._round} failed: {reason}; to tolerate more absent clients, use more clients in a round, a larger "
            "'byzantine' or a smaller 'f'",
            kind="failed election",
        )
        return self._excluded | {a.client: reason for a in remaining}

    def _has_suspicion(self, client: int) -> bool:
        # An honest vote on few partitions often contradicts a large majority. Therefore, if some seats have more than half of the
        # partitions, only votes of these seats count for the suspicion.
        has_most = 2 * self.code.sum(1, dtype=np.int64) > len(self.code)
        return not has_most.any() or bool(has_most[self.seats.seat_of(client)])

    # Checkpoints.

    def take_changes(self) -> Changes:
        vectors, values = super().take_changes()
        values[KNOWN_CLIENTS] = json.dumps(sorted(self.known_clients)).encode()
        return vectors, values

    def restore(self, vector: ReadVector, value: ReadValue) -> None:
        super().restore(vector, value)
        self.known_clients = set(json.loads(value(KNOWN_CLIENTS) or b"[]"))
