"""Metrics of a run for Prometheus. docs/watching.md lists the families. Counters start at 0 with the process."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

from .. import __version__
from ..callbacks import Callback, ClientRecord, Header, PortFigures, RoundRecord
from .exposition import Family, Histogram, Labels, text

ROUND_BOUNDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)  # seconds
CHECKPOINT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
LABELLED = (
    "task",
    "strategy",
    "uplink",
    "downlink",
    "memory",
    "partition",
    "device",
)  # of the header


@dataclass
class OneClient:
    """The metrics of one client of a deployment."""

    uplink_bytes: int = 0
    downlink_bytes: int = 0
    rejected: int = 0
    latency_s: float | None = None  # of its last answer
    versions_behind: int | None = None  # when it was asked last
    staleness: int = 0  # of its last answer

    def add(self, record: ClientRecord) -> None:
        self.uplink_bytes += record.uplink_bytes
        self.downlink_bytes += record.downlink_bytes
        self.rejected += bool(record.stage)
        self.versions_behind, self.staleness = record.versions_behind, record.staleness
        if record.latency_s is not None:
            self.latency_s = record.latency_s


@dataclass
class Metrics(Callback):
    """The callback that collects metrics. It is called in the run's thread; `text` may be called in any thread."""

    header: Header | None = None
    last: RoundRecord | None = None
    accuracy: float | None = None  # when it was measured last
    loss: float | None = None
    connected: set[int] = field(default_factory=set)
    wanted: int = 0
    answered: int = 0
    sums: Counter[str] = field(default_factory=Counter)  # of the fields of RoundRecord
    rejected: Counter[str] = field(default_factory=Counter)  # by stage
    clients: dict[int, OneClient] = field(default_factory=dict)
    suspicion: Mapping[int, float] = field(
        default_factory=dict
    )  # of the last round that judged votes
    rounds_s: Histogram = field(default_factory=lambda: Histogram(ROUND_BOUNDS))
    checkpoints_s: Histogram = field(default_factory=lambda: Histogram(CHECKPOINT_BOUNDS))
    warnings: int = 0
    port: Callable[[], PortFigures] | None = None
    lock: Lock = field(default_factory=Lock)

    def serving(self, port: Callable[[], PortFigures]) -> None:
        self.port = port

    def started(self, header: Header) -> None:
        with self.lock:
            self.header, self.wanted = header, header.clients

    def waiting(self, here: Sequence[int], wanted: int) -> None:
        with self.lock:
            self.connected, self.wanted = set(here), wanted

    def joined(self, client: int) -> None:
        with self.lock:
            self.connected.add(client)

    def left(self, client: int) -> None:
        with self.lock:
            self.connected.discard(client)

    def progress(self, round: int, answered: int, cohort: int) -> None:
        self.answered = answered

    def round_done(self, record: RoundRecord) -> None:
        with self.lock:
            self.last, self.answered = record, 0
            if record.loss is not None:
                self.accuracy, self.loss = record.accuracy, record.loss
            for name in (
                "accepted",
                "uplink_bytes",
                "downlink_bytes",
                "dense_uplink_bytes",
                "dense_downlink_bytes",
                "relayed_bytes",
            ):
                self.sums[name] += getattr(record, name)
            self.rejected.update(rejection.stage for rejection in record.rejections)
            self.rounds_s.add(record.seconds)
            self.suspicion = record.suspicion or self.suspicion
            for figures in record.by_client:
                self.clients.setdefault(figures.client, OneClient()).add(figures)

    def checkpoint(self, round: int, seconds: float) -> None:
        with self.lock:
            self.checkpoints_s.add(seconds)

    def warning(self, sentence: str) -> None:
        self.warnings += 1

    def text(self) -> str:
        """The page as it is now."""
        port = self.port() if self.port else None
        with self.lock:
            return text(
                [*self._run(), *self._bytes(), *self._deployment(port), *self._clients(port)]
            )

    def _run(self) -> list[Family]:
        header, last = self.header, self.last
        what = {name: getattr(header, name) for name in LABELLED} if header else {}
        return [
            Family(
                "fedcomp_info",
                "gauge",
                "What runs.",
                {(("version", __version__), *what.items()): 1},
            ),
            _gauge(
                "fedcomp_round",
                "The last round that is done.",
                last.round if last else header.first_round - 1 if header else 0,
            ),
            _gauge("fedcomp_rounds", "Rounds of the whole run.", header and header.rounds),
            _gauge(
                "fedcomp_accuracy",
                "Share of the test set, 0 to 1, when it was measured last.",
                self.accuracy,
            ),
            _gauge(
                "fedcomp_loss", "Mean loss on the test set, when it was measured last.", self.loss
            ),
            _gauge(
                "fedcomp_train_loss",
                "Mean loss of the last round's accepted clients before their steps.",
                last and last.train_loss,
            ),
            _gauge("fedcomp_cohort", "Clients of the last round.", last and last.cohort),
            _gauge(
                "fedcomp_answered",
                "Clients that have answered in the round that runs.",
                self.answered,
            ),
            _counter(
                "fedcomp_accepted_total", "Updates that were accepted.", self.sums["accepted"]
            ),
            Family(
                "fedcomp_rejected_total",
                "counter",
                "Clients of rounds that were rejected, by stage.",
                _by("stage", self.rejected),
            ),
            Family("fedcomp_round_seconds", "histogram", "Seconds of a round.", self.rounds_s),
            Family(
                "fedcomp_checkpoint_seconds",
                "histogram",
                "Seconds that it took to write a checkpoint.",
                self.checkpoints_s,
            ),
            _counter("fedcomp_warnings_total", "Warnings.", self.warnings),
        ]

    def _bytes(self) -> list[Family]:
        return [
            _counter(
                "fedcomp_uplink_bytes_total", "Frames from clients.", self.sums["uplink_bytes"]
            ),
            _counter(
                "fedcomp_downlink_bytes_total", "Frames to clients.", self.sums["downlink_bytes"]
            ),
            _counter(
                "fedcomp_dense_uplink_bytes_total",
                "What float32 models would have cost up.",
                self.sums["dense_uplink_bytes"],
            ),
            _counter(
                "fedcomp_dense_downlink_bytes_total",
                "What float32 models would have cost down.",
                self.sums["dense_downlink_bytes"],
            ),
            _counter(
                "fedcomp_relayed_bytes_total", "Frames from relays.", self.sums["relayed_bytes"]
            ),
        ]

    def _deployment(self, port: PortFigures | None) -> list[Family]:
        if port is None:
            return []
        return [
            _gauge(
                "fedcomp_clients_connected", "Clients that can be reached.", len(self.connected)
            ),
            _gauge(
                "fedcomp_clients_wanted",
                "Clients that the round waits for before it begins.",
                self.wanted,
            ),
            *_wire(port),
            _gauge("fedcomp_port_connections", "Open connections of the port.", port.connections),
            Family(
                "fedcomp_port_refused_total",
                "counter",
                "Streams turned away at the port, by reason.",
                _by("reason", port.refused),
            ),
        ]

    def _clients(self, port: PortFigures | None) -> list[Family]:
        if port is None:
            return []
        clients = sorted(self.clients.items())

        def each(name: str) -> dict[Labels, float]:
            values = ((client, getattr(figures, name)) for client, figures in clients)
            return _by("client", {client: value for client, value in values if value is not None})

        received = {client: received for client, (received, _) in sorted(port.by_client.items())}
        sent = {client: sent for client, (_, sent) in sorted(port.by_client.items())}
        return [
            Family(
                "fedcomp_client_connected",
                "gauge",
                "1 for each client that can be reached.",
                _by("client", dict.fromkeys(sorted(self.connected), 1)),
            ),
            Family(
                "fedcomp_client_uplink_bytes_total",
                "counter",
                "Frames from the client.",
                each("uplink_bytes"),
            ),
            Family(
                "fedcomp_client_downlink_bytes_total",
                "counter",
                "Frames to the client.",
                each("downlink_bytes"),
            ),
            Family(
                "fedcomp_client_wire_received_bytes_total",
                "counter",
                "Received from the client at the port.",
                _by("client", received),
            ),
            Family(
                "fedcomp_client_wire_sent_bytes_total",
                "counter",
                "Sent to the client at the port.",
                _by("client", sent),
            ),
            Family(
                "fedcomp_client_latency_seconds",
                "gauge",
                "From question to answer, when it answered last.",
                each("latency_s"),
            ),
            Family(
                "fedcomp_client_versions_behind",
                "gauge",
                "Versions that it had missed when it was asked last.",
                each("versions_behind"),
            ),
            Family(
                "fedcomp_client_staleness_rounds",
                "gauge",
                "Rounds between its last answer's round and when it was taken.",
                each("staleness"),
            ),
            Family(
                "fedcomp_client_rejected_total",
                "counter",
                "Rounds in which it was rejected.",
                each("rejected"),
            ),
            Family(
                "fedcomp_client_suspicion",
                "gauge",
                "Share of its votes that lost by a wide margin, 0 to 1.",
                _by("client", self.suspicion),
            ),
        ]


def _gauge(name: str, help: str, value: float | None) -> Family:
    """Without a sample where there is no value."""
    return Family(name, "gauge", help, {} if value is None else {(): value})


def _counter(name: str, help: str, value: float) -> Family:
    return Family(name, "counter", help, {(): value})


def _wire(port: PortFigures) -> list[Family]:
    """Return the counters of the port's bytes, none where the platform does not count them."""
    if port.received_bytes is None or port.sent_bytes is None:
        return []
    return [
        _counter(
            "fedcomp_wire_received_bytes_total",
            "TCP payload received at the port, with TLS and keepalive.",
            port.received_bytes,
        ),
        _counter(
            "fedcomp_wire_sent_bytes_total",
            "TCP payload sent at the port, with TLS and keepalive.",
            port.sent_bytes,
        ),
    ]


def _by(label: str, values: dict) -> dict[Labels, float]:
    return {((label, str(key)),): value for key, value in values.items()}
