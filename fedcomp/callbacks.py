"""Callbacks of a run, such as dashboards and log files, and their arguments: a header, a record for each round, a summary."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Header:
    """A description of the run, passed once before the first round."""

    task: str
    clients: int
    cohort: int  # clients in a round
    parameters: int
    strategy: str
    uplink: str
    downlink: str
    memory: str
    partition: str
    device: str
    engine: str  # "serial" or "batched", with the batch of clients
    first_round: int  # 1, or the round after the checkpoint
    rounds: int
    out: str  # run folder
    relays: int = 0  # between clients and server
    attack: str = ""  # what Byzantine virtual clients do; "" = nothing
    byzantine: int = 0  # number of Byzantine clients
    notice: str = ""  # what the strategy guarantees or advises; "" for nothing
    metrics: str = ""  # address of /metrics, "" = none
    network: str = ""  # virtual network; "" = none
    residuals: str = ""  # where virtual clients are stored between rounds; "" = where they compute
    judged: str = "accuracy"  # measure of the model: "accuracy", or "loss" of a task without it
    measures: tuple[str, ...] = ()  # the task's own metrics
    evaluate: str = "server"  # where the model is evaluated: "server", "clients" or "both"


@dataclass(frozen=True)
class Rejection:
    client: int  # its id
    stage: str  # "phase", "download", "evaluate", "train", "encode", "relay", "send", "reply", "quorum", "deadline", "aggregate"
    reason: str  # one sentence


@dataclass(frozen=True)
class ClientMetric:
    """A metric that clients reported in a round."""

    mean: float | None  # weighted by examples
    # Mean over the tenth of the clients with the lowest accuracy or the highest loss; None for other metrics.
    worst_decile: float | None
    clients: int
    examples: int


class EvaluatedRecord:
    """A record with the accuracy and loss that the server measured, and metrics of clients."""

    accuracy: float | None
    loss: float | None
    client_metrics: Mapping[str, ClientMetric]

    @property
    def measured_accuracy(self) -> float | None:
        """The accuracy on the server, else the mean over the clients."""
        return self._mean("accuracy") if self.accuracy is None else self.accuracy

    @property
    def measured_loss(self) -> float | None:
        """The loss on the server, else the mean over the clients."""
        return self._mean("loss") if self.loss is None else self.loss

    def _mean(self, name: str) -> float | None:
        return self.client_metrics[name].mean if name in self.client_metrics else None


@dataclass(frozen=True)
class ClientRecord:
    """A client of a deployment that was asked in a round, or whose answer was taken in it; or a virtual client with metrics."""

    client: int  # its id
    uplink_bytes: int  # frames of its answers
    downlink_bytes: int  # frames that it was sent, and what was announced and returned with them
    # TCP payload since its last record, with TLS, handshakes and keepalive; None where the platform does not count it.
    wire_bytes_in: int | None  # received from the client
    wire_bytes_out: int | None  # sent to it
    latency_s: float | None  # from question to answer, summed over phases; None: no answer
    versions_behind: int | None  # versions of the model that it had missed; None: not known
    staleness: int = 0  # rounds between the one that its answer belongs to and this one
    stage: str = ""  # where it was rejected; "" if it was not
    reason: str = ""  # why
    metrics: Mapping[str, float] = field(default_factory=dict)  # that it reported


@dataclass(frozen=True)
class RoundRecord(EvaluatedRecord):
    """A line of metrics.jsonl. Bytes are lengths of frames that were made; dense_* is what float32 models would have cost."""

    round: int  # from 1
    accuracy: float | None  # share of the test set, 0..1; None when the round was not evaluated
    loss: float | None  # mean loss on the test set
    train_loss: float | None  # mean over the accepted clients of the loss before each local step
    cohort: int  # clients of the round
    accepted: int  # updates that the server accepted
    rejected: int  # clients without an accepted update
    uplink_bytes: int  # frames from clients
    downlink_bytes: int  # frames to clients, with broadcasts that they had missed
    dense_uplink_bytes: int  # the same exchanges in float32
    dense_downlink_bytes: int  # the same exchanges in float32
    seconds: float  # duration of the round
    catch_up_bytes: int = 0  # of downlink_bytes: broadcasts older than the newest
    first_download_bytes: int = 0  # of downlink_bytes: what clients without a state needed
    uplink_nonzeros: int = 0  # coordinates in the accepted updates
    skipped: int = 0  # of the accepted: clients that had nothing to send
    clipped: int = 0  # of the accepted: updates whose norm was more than --clip-update
    relayed_bytes: int = 0  # from relays to the server, in a simulation with relays
    # TCP payload since the round before, with TLS, handshakes and keepalive; None in a simulation, and where it is not counted.
    wire_bytes_in: int | None = None  # received at the port
    wire_bytes_out: int | None = None  # sent from the port
    rejections: Sequence[Rejection] = ()  # where and why each client was rejected
    warnings: Sequence[str] = ()  # found in this round, each once a run
    by_client: Sequence[
        ClientRecord
    ] = ()  # in a deployment; in a simulation, of clients with metrics
    suspicion: Mapping[int, float] = field(default_factory=dict)  # share of votes lost by far
    simulated_s: float | None = None  # duration on a virtual network; None: there is none
    simulated_hours: float | None = None  # of this round and those before it
    metrics: Mapping[str, float | None] = field(default_factory=dict)  # the task's own
    client_metrics: Mapping[str, ClientMetric] = field(
        default_factory=dict
    )  # that clients reported


@dataclass(frozen=True)
class RejectionSummary:
    """The rejections of a run that have the same reason."""

    stage: str
    reason: str  # the first one, where reasons differ in their numbers alone
    updates: int
    clients: Sequence[int]  # whose, ascending, the lowest of them where there are many
    more_clients: int = 0  # besides those


@dataclass(frozen=True)
class Summary(EvaluatedRecord):
    """summary.json."""

    accuracy: float | None  # the last one, 0..1
    loss: float | None  # the last one
    uplink_bytes: int  # of the run
    downlink_bytes: int  # of the run
    dense_uplink_bytes: int  # the same exchanges in float32
    dense_downlink_bytes: int  # the same exchanges in float32
    rounds: int
    clients: int
    client_updates: int  # accepted
    seconds: float  # sum of the rounds
    client_updates_per_s: float
    device: str
    seed: int
    version: str  # of fedcomp
    # TCP payload at a deployment's port, with TLS, handshakes and keepalive; None in a simulation, and where it is not counted.
    wire_bytes_in: int | None = None  # received
    wire_bytes_out: int | None = None  # sent
    warnings: Sequence[str] = ()  # of the run
    rejections: Sequence[RejectionSummary] = ()  # the most frequent first
    simulated_hours: float | None = None  # to the last accuracy, on a virtual network
    metrics: Mapping[str, float | None] = field(default_factory=dict)  # as measured last
    client_metrics: Mapping[str, ClientMetric] = field(default_factory=dict)  # as reported last


def values_of(record: RoundRecord | Summary) -> dict[str, Any]:
    """Return the fields of a record that are written to files: virtual times and metrics only if there are any."""
    values = asdict(record)
    for name in ("simulated_s", "simulated_hours", "metrics", "client_metrics"):
        if values.get(name) in (None, {}):
            values.pop(name, None)
    for client in values.get("by_client", ()):
        if not client["metrics"]:
            del client["metrics"]
    return values


@dataclass(frozen=True)
class PortFigures:
    """The traffic of a deployment's port since it was opened. Bytes are TCP payload; None where the platform does not count them."""

    connections: int  # open now
    refused: Mapping[str, int]  # streams that were turned away, by reason
    received_bytes: int | None
    sent_bytes: int | None
    by_client: Mapping[int, tuple[int, int]]  # received and sent, of the clients that have joined


class Callback:
    """Base class of callbacks. All hooks do nothing; override the ones that are needed."""

    def on_port_open(self, port: Callable[[], PortFigures]) -> None:
        """The port of a deployment is open. `port()` returns its traffic and may be called in any thread."""

    def on_run_start(self, header: Header) -> None: ...

    def on_waiting(self, connected: Sequence[int], wanted: int) -> None:
        """A round waits for clients. Called with the ids of the connected clients whenever they change, and when the wait ends."""

    def on_client_joined(self, client: int) -> None:
        """A client of a deployment can be reached from now on."""

    def on_client_left(self, client: int) -> None:
        """A client of a deployment can no longer be reached."""

    def on_progress(self, round: int, answered: int, cohort: int) -> None: ...

    def on_round_end(self, record: RoundRecord) -> None: ...

    def on_checkpoint(self, round: int, seconds: float) -> None:
        """A checkpoint after this round was written, which took `seconds`."""

    def on_warning(self, sentence: str) -> None: ...

    def on_run_end(self, summary: Summary, out: str) -> None: ...


class ForwardingCallback(Callback, ABC):
    """Base class of callbacks that treat all hooks alike."""

    @abstractmethod
    def forward(self, hook: str, *values: Any) -> None:
        """Called for each call of a hook, with its name and arguments."""

    def on_port_open(self, port: Callable[[], PortFigures]) -> None:
        self.forward("on_port_open", port)

    def on_run_start(self, header: Header) -> None:
        self.forward("on_run_start", header)

    def on_waiting(self, connected: Sequence[int], wanted: int) -> None:
        self.forward("on_waiting", connected, wanted)

    def on_client_joined(self, client: int) -> None:
        self.forward("on_client_joined", client)

    def on_client_left(self, client: int) -> None:
        self.forward("on_client_left", client)

    def on_progress(self, round: int, answered: int, cohort: int) -> None:
        self.forward("on_progress", round, answered, cohort)

    def on_round_end(self, record: RoundRecord) -> None:
        self.forward("on_round_end", record)

    def on_checkpoint(self, round: int, seconds: float) -> None:
        self.forward("on_checkpoint", round, seconds)

    def on_warning(self, sentence: str) -> None:
        self.forward("on_warning", sentence)

    def on_run_end(self, summary: Summary, out: str) -> None:
        self.forward("on_run_end", summary, out)


class CallbackList(ForwardingCallback):
    """Combines several callbacks. An error in one of `others` does not end the run: the callback is reported and removed."""

    def __init__(self, first: Callback, others: Mapping[str, Callback], metrics: str = ""):
        """`others`: callbacks by name, with which a warning about them begins. `metrics`: address of /metrics, for the header."""
        self.first, self.others, self.metrics = first, dict(others), metrics

    def on_run_start(self, header: Header) -> None:
        super().on_run_start(replace(header, metrics=self.metrics or header.metrics))

    def forward(self, hook: str, *values: Any) -> None:
        getattr(self.first, hook)(*values)
        for name, callback in list(self.others.items()):
            if name not in self.others:
                continue  # it failed at the warning about another
            try:
                getattr(callback, hook)(*values)
            except Exception as error:
                del self.others[name]
                why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
                self.on_warning(f"{name} has failed ({why}); the run goes on without it")


class LogMessage(str):
    """A sentence to print, with an event's name and values for a log."""

    event: str
    values: Mapping[str, Any]

    def __new__(cls, sentence: str, event: str, **values: Any) -> "LogMessage":
        made = super().__new__(cls, sentence)
        made.event, made.values = event, values
        return made
