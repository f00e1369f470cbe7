"""The base class of callbacks, and the data that a run passes to callbacks. Dashboards and log files are callbacks."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Header:
    """A description of the run, passed to callbacks once before the first round."""

    task: str
    clients: int
    cohort: int  # number of clients in a round
    parameters: int  # trainable parameters of the model
    strategy: str
    uplink: str
    downlink: str
    memory: str
    partition: str
    device: str
    # In a simulation, the training engine and how many clients it trains at once; in a deployment, the address and security of the server.
    engine: str
    first_round: int  # first round to run: 1, or the round after the checkpoint of a resumed run
    rounds: int
    out: str  # run folder
    relays: int = 0  # number of relays between clients and server
    attack: str = ""  # attack by Byzantine (malicious) clients of a simulation, or ""
    byzantine: int = 0  # number of Byzantine clients
    notice: str = ""  # guarantee or advice of the strategy for the user, or ""
    metrics: str = ""  # URL of the metrics for Prometheus, or ""
    network: str = ""  # description of the virtual network, or "" without one
    # Where the error-feedback memories of simulated clients are stored, or "" if they stay on the training device.
    residuals: str = ""
    # Metric that decides which round is the best: accuracy, or loss if the task has no accuracy.
    judged: str = "accuracy"
    measures: tuple[str, ...] = ()  # names of metrics that the task defines
    engine_reason: str = ""  # why --engine auto chose this engine, or "" if the user chose it
    evaluate: str = "server"  # where the model is evaluated (server, clients or both)


@dataclass(frozen=True)
class Rejection:
    """The reason why the server did not accept an update of a client in a round."""

    client: int  # client id
    # What failed. On the client: phase (order of the assignments), download, evaluate, train or encode. Between client and server: relay,
    # send (of the assignment) or reply (missing or invalid). On the server: quorum or deadline (the answer is too late), or aggregate (the
    # strategy refused the update).
    stage: str
    reason: str  # one sentence


@dataclass(frozen=True)
class ClientMetric:
    """The mean and the worst decile of a metric over the clients that reported it in a round."""

    mean: float | None  # mean over the clients, weighted by the clients' numbers of examples
    # For accuracy and loss, the mean over the tenth of the clients with the lowest accuracy or the highest loss; None for other metrics.
    worst_decile: float | None
    clients: int  # number of clients that reported the metric
    examples: int  # total number of examples of the clients that reported the metric


class EvaluatedRecord:
    """Base class of RoundRecord and Summary: accuracy and loss on the server, and metrics that clients reported."""

    accuracy: float | None
    loss: float | None
    client_metrics: Mapping[str, ClientMetric]

    @property
    def measured_accuracy(self) -> float | None:
        """The accuracy on the server, or the mean over the clients if the server did not measure the accuracy."""
        return self._mean("accuracy") if self.accuracy is None else self.accuracy

    @property
    def measured_loss(self) -> float | None:
        """The loss on the server, or the mean over the clients if the server did not measure the loss."""
        return self._mean("loss") if self.loss is None else self.loss

    def _mean(self, name: str) -> float | None:
        return self.client_metrics[name].mean if name in self.client_metrics else None


@dataclass(frozen=True)
class ClientRecord:
    """The bytes, latency and metrics of one client in a round. In a simulation, only clients that reported metrics have a record."""

    client: int  # client id
    uplink_bytes: int  # bytes of the frames (encoded vectors) from the client
    downlink_bytes: int  # bytes of the frames and of the strategy's data sent to the client
    # The wire bytes are TCP payload since the client's previous record, including TLS, handshakes and keepalive. They are None in a
    # simulation, for clients behind a relay, and on platforms that do not count TCP payload.
    wire_bytes_in: int | None = None  # TCP payload received from the client, in bytes
    wire_bytes_out: int | None = None  # TCP payload sent to the client, in bytes
    # Seconds from assignment to answer, summed over the phases (message exchanges) of the round, or None without an answer.
    latency_s: float | None = None
    # Number of model versions that the client had missed at its first assignment of the round, or None if unknown.
    versions_behind: int | None = None
    staleness: int = 0  # number of rounds from the assignment to the round that used the answer
    stage: str = ""  # stage at which the update was rejected, or "" if accepted
    reason: str = ""  # why the client's update was rejected
    metrics: Mapping[str, float] = field(default_factory=dict)  # metrics that the client reported


@dataclass(frozen=True)
class RoundRecord(EvaluatedRecord):
    """The results of a round, stored as a line of metrics.jsonl.

    Byte counts are lengths of frames (encoded vectors); the downlink also includes the data that a strategy announces to clients.
    """

    round: int  # from 1
    accuracy: float | None  # accuracy on the test set, 0 to 1, or None if not evaluated
    loss: float | None  # mean loss on the test set
    # Training loss, averaged over the local steps of each client, and over the clients whose updates were accepted.
    train_loss: float | None
    cohort: int  # number of clients that were selected for the round
    accepted: int  # number of updates that the server accepted
    rejected: int  # number of selected clients without an accepted update
    uplink_bytes: int  # bytes of the frames from clients
    downlink_bytes: int  # bytes of frames and strategy data to clients, including missed rounds
    dense_uplink_bytes: int  # uplink bytes if each selected client sent a float32 model
    # Downlink bytes if each client to which the server sent an assignment downloaded one float32 model.
    dense_downlink_bytes: int
    seconds: float  # duration of the round
    # Part of downlink_bytes that clients downloaded because they had missed rounds.
    catch_up_bytes: int = 0
    # Part of downlink_bytes that clients downloaded when they took part for the first time.
    first_download_bytes: int = 0
    uplink_nonzeros: int = 0  # number of nonzero coordinates in all accepted updates
    # Number of accepted updates that are empty, because the client had nothing to send.
    skipped: int = 0
    clipped: int = 0  # number of accepted updates whose norm was above --clip-update
    relayed_bytes: int = 0  # bytes of the frames from relays to the server, in a simulation
    # The wire bytes are TCP payload since the previous round, including TLS, handshakes and keepalive. They are None in a simulation, and
    # on platforms that do not count TCP payload.
    wire_bytes_in: int | None = None  # TCP payload received at the server's port, in bytes
    wire_bytes_out: int | None = None  # TCP payload sent from the server's port, in bytes
    rejections: Sequence[Rejection] = ()  # one entry for each rejected client
    warnings: Sequence[str] = ()  # warning messages of this round
    # A record for each client of the round; in a simulation, only for clients that reported metrics.
    by_client: Sequence[ClientRecord] = ()
    # Client id → fraction of the client's votes that contradicted a large majority of clients; empty unless the strategy uses votes.
    suspicion: Mapping[int, float] = field(default_factory=dict)
    # Duration of the round on the virtual network, in seconds, or None without a network.
    simulated_s: float | None = None
    simulated_hours: float | None = None  # virtual hours since the start of the run
    metrics: Mapping[str, float | None] = field(
        default_factory=dict
    )  # values of the task's metrics
    # Metrics that clients reported, by metric name.
    client_metrics: Mapping[str, ClientMetric] = field(default_factory=dict)


@dataclass(frozen=True)
class RejectionSummary:
    """The rejections of a run that have the same reason."""

    stage: str
    # Reason of the first of these rejections. The other reasons differ from it only in numbers.
    reason: str
    updates: int  # number of rejected updates
    # Ids of the rejected clients, ascending; at most the 16 lowest ids.
    clients: Sequence[int]
    more_clients: int = 0  # number of rejected clients beyond those in `clients`


@dataclass(frozen=True)
class Summary(EvaluatedRecord):
    """The result of a run, stored in summary.json."""

    accuracy: float | None  # accuracy after the last round, 0 to 1, or None if not measured
    loss: float | None  # loss after the last round, or None if not measured
    uplink_bytes: int  # bytes of the frames from clients in all rounds
    downlink_bytes: int  # bytes of frames and strategy data to clients in all rounds
    dense_uplink_bytes: int  # uplink bytes of all rounds without compression (float32)
    dense_downlink_bytes: int  # downlink bytes of all rounds without compression (float32)
    rounds: int  # number of finished rounds
    clients: int  # number of clients of the run
    client_updates: int  # number of accepted updates
    seconds: float  # duration of all rounds
    client_updates_per_s: float  # mean number of accepted updates per second
    device: str  # training device, such as cpu or cuda:0
    seed: int  # seed of the run
    version: str  # version of fedcomp
    # The wire bytes are TCP payload at the server's port, including TLS, handshakes and keepalive. They are None in a simulation, and on
    # platforms that do not count TCP payload.
    wire_bytes_in: int | None = None  # received bytes
    wire_bytes_out: int | None = None  # sent bytes
    warnings: Sequence[str] = ()  # warnings of the run
    rejections: Sequence[RejectionSummary] = ()  # the most frequent reason comes first
    simulated_hours: float | None = None  # duration on the virtual network, or None without one
    # The metrics that the task defines, measured in the last round.
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    # Last values of the metrics that clients reported, by metric name.
    client_metrics: Mapping[str, ClientMetric] = field(default_factory=dict)


def values_of(record: RoundRecord | Summary) -> dict[str, Any]:
    """Return the fields of a record for JSON files, without empty metrics and without virtual times that are None."""
    values = for_json(record)
    for name in ("simulated_s", "simulated_hours", "metrics", "client_metrics"):
        if values.get(name) in (None, {}):
            values.pop(name, None)
    for client in values.get("by_client", ()):
        if not client["metrics"]:
            del client["metrics"]
    return values


def for_json(value: Any) -> Any:
    """Return `value` for JSON: dicts of fields in place of dataclasses, and None (null) in place of NaN and infinity.

    Unlike `dataclasses.asdict`, this function does not deepcopy, which would be slow for records of a thousand clients.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, int | str):
        return value
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: for_json(item) for key, item in value.items()}
    return [*map(for_json, value)] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class PortFigures:
    """The connections and the traffic at a deployed server's port since the port was opened.

    Byte counts are TCP payload, or None on platforms that do not count TCP payload.
    """

    clients: int = 0  # connected clients that have joined the run
    relays: int = 0  # connected relays
    streams: int = 0  # open gRPC streams
    connections: int = 0  # open connections
    refused: Mapping[str, int] = field(default_factory=dict)  # refused gRPC streams by reason
    received_bytes: int | None = None
    sent_bytes: int | None = None
    # (received, sent) bytes by client id
    by_client: Mapping[int, tuple[int, int]] = field(default_factory=dict)


class Callback:
    """Base class of callbacks. The hooks (methods on_*) do nothing by default. Override the hooks that you need."""

    def on_port_open(self, port: Callable[[], PortFigures]) -> None:
        """Handle the opening of a deployed server's port. `port()` returns the current PortFigures, and may be called in any thread."""

    def on_run_start(self, header: Header) -> None:
        """Handle the start of the run, before the first round."""

    def on_waiting(self, connected: Sequence[int], wanted: int) -> None:
        """Handle a change of the connected clients while the run waits for `wanted` clients, or the end of the wait.

        `connected`: ids of the connected clients.
        """

    def on_client_joined(self, client: int) -> None:
        """Handle the connection of a client to a deployed server."""

    def on_client_left(self, client: int) -> None:
        """Handle the disconnection of a client from a deployed server."""

    def on_progress(self, round: int, answered: int, cohort: int) -> None:
        """Handle the answer of a client. In this phase (message exchange) of the round, `answered` of `cohort` clients have answered."""

    def on_round_end(self, record: RoundRecord) -> None:
        """Handle the end of a round."""

    def on_checkpoint(self, round: int, seconds: float) -> None:
        """Handle a checkpoint that was written after a round. Writing took `seconds`."""

    def on_warning(self, sentence: str) -> None:
        """Handle a warning for the user."""

    def on_run_end(self, summary: Summary, out: str) -> None:
        """Handle the end of the run. `out` is the run folder."""


class ForwardingCallback(Callback, ABC):
    """Base class of callbacks that handle all hooks in one method."""

    @abstractmethod
    def forward(self, hook: str, *values: Any) -> None:
        """Handle a call of the hook named `hook` with the arguments `values`."""


def _forwarding(hook: str) -> Callable[..., None]:
    return lambda callback, *values: callback.forward(hook, *values)


for _hook in [name for name in vars(Callback) if name.startswith("on_")]:
    setattr(ForwardingCallback, _hook, _forwarding(_hook))


class CallbackList(ForwardingCallback):
    """A callback that passes the call of each hook on to the callback `first` and to the callbacks in `others`.

    An exception of `first` ends the run. If a callback in `others` raises an exception, this callback is removed with a warning,
    and the run continues.
    """

    def __init__(self, first: Callback, others: Mapping[str, Callback], metrics: str = ""):
        """`others`: callbacks by name, which warnings show. `metrics`: URL of the metrics for Prometheus, or ""."""
        self.first, self.others, self.metrics = first, dict(others), metrics

    def on_run_start(self, header: Header) -> None:
        super().on_run_start(replace(header, metrics=self.metrics or header.metrics))

    def forward(self, hook: str, *values: Any) -> None:
        getattr(self.first, hook)(*values)
        for name, callback in list(self.others.items()):
            if name not in self.others:
                continue  # a nested call of on_warning has removed this callback
            try:
                getattr(callback, hook)(*values)
            except Exception as error:
                del self.others[name]
                why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
                self.on_warning(f"{name} has failed ({why}); the run continues without it")


class LogMessage(str):
    """A sentence about an event, which a text log shows. A JSON log contains the name (`event`) and the `values` of the event."""

    event: str
    values: Mapping[str, Any]

    def __new__(cls, sentence: str, event: str, **values: Any) -> "LogMessage":
        message = super().__new__(cls, sentence)
        message.event, message.values = event, values
        return message
