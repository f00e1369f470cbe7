"""One client: its copy of the model, its data, its memory; and the Flower ClientApp around it."""

from dataclasses import dataclass

import numpy as np
from flwr.app import Context as FlowerContext
from flwr.app import Message
from flwr.clientapp import ClientApp

from .. import seeds
from ..codecs import Context
from ..errors import FedcompError, ProtocolError
from ..memories import Memory
from ..messages import FAILED, NEED_DENSE, TRAIN, UPDATE, Assignment, Report, failure, ticket
from ..tasks.base import Data
from .flower import from_records, to_records
from .local_sgd import LocalSGD, SerialEngine, plan_batches
from .replica import NeedDense, Replica


def settle(memory: Memory, pending: str, accepted: str) -> None:
    """Commit a memory's waiting proposal if `accepted` names it, else put it back. Hearing the same news twice, or late, does no harm."""
    if memory.pending is None:
        return
    if pending == accepted:
        memory.commit()
    else:
        memory.rollback()


def check_phase(assignment: Assignment) -> None:
    """Raise ProtocolError, before anything is done, for a phase that clients have no part in."""
    if assignment.phase != TRAIN:
        raise ProtocolError(f"this client has no part in a phase '{assignment.phase}'; both sides need the same strategy")


def context_of(assignment: Assignment) -> Context:
    """What codec and memory may know of the exchange."""
    names, values = assignment.announced[::2], assignment.announced[1::2]
    announced = {name.decode(): value for name, value in zip(names, values, strict=True)}
    return Context(round=assignment.round, phase=assignment.phase, announced=announced)


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
    buffers: dict | None = None  # running statistics, which stay here

    def handle(self, assignment: Assignment) -> Report:
        """Do what an assignment asks. Every failure becomes a report that names its stage."""
        stage = "phase"
        try:
            check_phase(assignment)
            stage = "download"
            settle(self.memory, self.ticket, assignment.accepted)
            self.replica.move(assignment)
            stage = "train"
            batches = plan_batches(self.sgd, self.shard, self.seed, assignment.round, assignment.client)
            trained = self.engine.train(
                self.replica.weights.to(self.engine.device), self.data, batches, self.sgd.at_rate(assignment.lr),
                seed=self.seed, round=assignment.round, who=assignment.client, buffers=self.buffers,
            )
            stage = "encode"
            self.memory.use_density(assignment.density)
            seed = seeds.key(self.seed, "encode", assignment.round, assignment.client)
            frame = self.memory.propose(trained.update, seed=seed, context=context_of(assignment)) or b""
        except NeedDense as error:
            return self._failure(assignment, stage, str(error), NEED_DENSE)
        except Exception as error:
            return self._failure(assignment, stage, reason(error))
        self.buffers = trained.buffers
        self.ticket = ticket(assignment.round, assignment.client, frame)
        return Report(
            assignment.round, assignment.phase, assignment.client, UPDATE, self.replica.version, self.replica.fingerprint,
            frame, self.ticket, len(self.shard), trained.loss, "", "",
        )

    def _failure(self, assignment: Assignment, stage: str, sentence: str, kind: str = FAILED) -> Report:
        return failure(assignment, stage, sentence, self.replica.version, self.replica.fingerprint, kind)


def reason(error: Exception) -> str:
    """One line for a report: our own sentence, or the kind of a foreign error and its first line."""
    text = str(error).strip().split("\n")[0]
    return text if isinstance(error, FedcompError) else f"{type(error).__name__}: {text}"


def client_app(client: Client) -> ClientApp:
    """A Flower ClientApp that answers train messages with what `client` has to say."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: FlowerContext) -> Message:
        report = client.handle(from_records(message.content, Assignment))
        return Message(to_records(report, {"num-examples": report.examples}), reply_to=message)

    return app
