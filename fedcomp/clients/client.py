"""One client: its copy of the model, its data, its memory; and the Flower ClientApp around it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from flwr.app import Context as FlowerContext
from flwr.app import Message
from flwr.clientapp import ClientApp
from torch import Tensor

from ..codecs import Context
from ..errors import FedcompError, NonFiniteError, ProtocolError
from ..memories import Memory
from ..memories.base import mask
from ..messages import FAILED, NEED_DENSE, UPDATE, Assignment, Report, failure, ticket
from ..strategies.client_algorithm import ClientAlgorithm, DataPartition, RoundState
from ..tasks.base import Data
from ..tasks.data import non_finite
from ..tasks.user_errors import client_error
from ..training.batches import plan_batches
from ..training.local_sgd import LocalSGD, SerialEngine, Traces, Trained
from .flower import from_records, to_records
from .replica import NeedDense, Replica


def settle(
    memory: Memory,
    pending: str,
    accepted: str,
    returned: bytes = b"",
    momentum: Tensor | None = None,
) -> None:
    """Commit a memory's waiting proposal if `accepted` names it, else put it back. Hearing the same news twice, or late, does no harm.

    `returned` is a frame of what was dropped of it, if anything. Of the client's momentum [numel], if it keeps one, what was taken
    is masked. Raises FrameError, with nothing changed, when `returned` is damaged.
    """
    if memory.pending is None:
        return
    if pending != accepted:
        memory.rollback()
        return
    sent = memory.sent if momentum is not None else None
    dropped = memory.open_returned(returned) if returned else None
    memory.commit(returned=returned or None)
    if momentum is not None:
        mask([momentum], sent, dropped)


def follow(memory: Memory, waiting: str, accepted: str, after: str) -> str:
    """The ticket of the proposal that a memory last committed, once it is settled: that of the one that waited, or still `after`.

    A memory with a counterpart starts from nothing where that is not what the server accepted last.
    """
    after = waiting if waiting and waiting == accepted else after
    if memory.counterpart is not None and after != accepted:
        memory.reset()
        after = ""
    return after


def context_of(assignment: Assignment) -> Context:
    """What codec and memory may know of the exchange."""
    names, values = assignment.announced[::2], assignment.announced[1::2]
    announced = {name.decode(): value for name, value in zip(names, values, strict=True)}
    return Context(
        round=assignment.round, phase=assignment.phase, announced=announced, rate=assignment.lr
    )


@dataclass
class Client:
    """What a client holds between rounds. `shard` is the index of its examples in `data`."""

    replica: Replica
    memory: Memory
    engine: SerialEngine
    data: Data
    shard: np.ndarray
    sgd: LocalSGD
    seed: int
    ticket: str = ""  # of the proposal that waits in the memory
    buffers: dict | None = (
        None  # running statistics, and the client state of `algorithm`, which stay here
    )
    momentum: Tensor | None = None  # where the client's last round left it, if it is kept
    after: str = ""  # ticket of the proposal that the memory last committed
    algorithm: ClientAlgorithm = ClientAlgorithm()  # the strategy's client half
    round_state: RoundState | None = None  # of the last round that it started
    all_shards: Sequence[np.ndarray] | None = (
        None  # the shards of all clients by logical id, where this one has the data of all
    )

    def handle(self, assignment: Assignment) -> Report:
        """Do what an assignment asks. Every failure becomes a report that names its stage."""
        stage = "phase"
        try:
            starts = self.algorithm.starts_round(assignment, self.round_state)
            trained, traces, state = None, Traces(), self.round_state
            if starts:
                stage = "download"
                self._arrive(assignment)
                stage = "train"
                trained, traces = self._train(assignment)
                values = self.algorithm.initial_values(assignment, self.round_state)
                state = RoundState(assignment.round, trained.loss, values)
            stage = "encode"
            self.memory.use_density(assignment.density)
            seed = self.algorithm.seed(self.memory.codec, self.seed, assignment)
            context = replace(context_of(assignment), moments=Traces.stack([traces]).moments)
            x = (
                trained.update
                if starts
                else self.algorithm.later_update(self.memory, state.values, seed, context)
            )
            updates = None if x is None else x[None]
            (frame,) = self.algorithm.encode(
                [self.memory], updates, [state.values], [seed], context
            )
            if isinstance(frame, FedcompError):
                raise frame
        except NeedDense as error:
            return self._failure(assignment, stage, str(error), NEED_DENSE)
        except NonFiniteError as error:
            found = encoding_error(error, self.data, self.shard)
            return self._failure(assignment, stage, reason(found))
        except Exception as error:
            return self._failure(assignment, stage, reason(error))
        if starts:
            self.buffers, self.momentum, self.round_state = trained.buffers, traces.momentum, state
        self.ticket = ticket(assignment.round, assignment.client, frame or b"")
        return Report(
            assignment.round,
            assignment.phase,
            assignment.client,
            UPDATE,
            self.replica.version,
            self.replica.fingerprint,
            frame or b"",
            self.ticket,
            len(self.shard),
            state.loss,
            "",
            "",
            self.after,
        )

    def _arrive(self, assignment: Assignment) -> None:
        """Settle the proposal that waits, and bring the copy of the model to the assignment's version."""
        waiting = self.ticket if self.memory.pending is not None else ""
        settle(self.memory, self.ticket, assignment.accepted, assignment.returned, self.momentum)
        self.after = follow(self.memory, waiting, assignment.accepted, self.after)
        self.replica.move(assignment)

    def _train(self, assignment: Assignment) -> tuple[Trained, Traces]:
        if parts := self.algorithm.partitions(assignment):
            return self._train_parts(assignment, parts), Traces()
        sgd = self.sgd.as_told(assignment.lr, assignment.steps, assignment.batch_size)
        batches = plan_batches(sgd, self.shard, self.seed, assignment.round, assignment.client)
        state, kept = self.replica.weights.to(self.engine.device), self.buffers or {}
        start = self.algorithm.model_weights(state)
        traces = Traces.begin(
            self.sgd,
            self.memory.needs_moments,
            start,
            self.momentum,
            self.algorithm.gradient_correction(state, kept, self.sgd),
        )
        trained = self.engine.train(
            start,
            self.data,
            batches,
            sgd,
            seed=self.seed,
            round=assignment.round,
            who=assignment.client,
            buffers=self.buffers,
            traces=traces,
        )
        (update,), (own,) = self.algorithm.after_training(
            trained.update[None], state, [kept], self.sgd, [sgd.lr * len(batches)]
        )
        return Trained(update, trained.loss, {**(trained.buffers or {}), **own} or None), traces

    def _train_parts(self, assignment: Assignment, parts: Sequence[DataPartition]) -> Trained:
        start, kept, losses = self.replica.weights.to(self.engine.device), [], []
        sgd = self.sgd.as_told(assignment.lr, assignment.steps, assignment.batch_size)
        for part in parts:
            shard = shard_of(part, self.all_shards)
            trained = self.engine.train(
                start,
                self.data,
                plan_batches(sgd, shard, self.seed, assignment.round, part.number),
                sgd,
                seed=self.seed,
                round=assignment.round,
                who=part.number,
            )
            kept.append(self.algorithm.summarize(part, trained.update, self.seed, assignment.round))
            losses.append(trained.loss)
        return Trained(
            self.algorithm.combine(assignment, kept, start.numel(), self.seed).to(start.device),
            sum(losses) / len(losses),
            None,
        )

    def _failure(
        self, assignment: Assignment, stage: str, sentence: str, kind: str = FAILED
    ) -> Report:
        return failure(
            assignment, stage, sentence, self.replica.version, self.replica.fingerprint, kind
        )


def shard_of(part: DataPartition, shards: Sequence[np.ndarray] | None) -> np.ndarray:
    """The examples of a part. Raises ProtocolError for data that is not here."""
    if shards is None or not set(part.clients) <= set(range(len(shards))):
        raise ProtocolError(
            f"part {part.number} has data that this client does not have; give it the data of all, with --partition-id"
        )
    return np.concatenate([shards[client] for client in part.clients])


def encoding_error(error: FedcompError, data: Data, shard: np.ndarray) -> FedcompError:
    """Return `error` or, for a non-finite update of a client whose data is not finite, an error that says so."""
    if isinstance(error, NonFiniteError) and (found := non_finite(data, shard)):
        return NonFiniteError(
            f"the update is not finite, as this client's training data holds {found}; correct train()"
        )
    return error


def reason(error: Exception) -> str:
    """Return one line for a report: the first line of an error of fedcomp, or file, line and message of an error in the user's code."""
    return str(client_error(error)).strip().split("\n")[0]


def client_app(client: Client) -> ClientApp:
    """A Flower ClientApp that answers train messages with what `client` has to say."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: FlowerContext) -> Message:
        report = client.handle(from_records(message.content, Assignment))
        return Message(to_records(report, {"num-examples": report.examples}), reply_to=message)

    return app
