"""Metrics of a run for Prometheus. docs/reference/metrics.md lists the metric families. Counters start at 0 when the process starts."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .. import __version__
from ..callbacks import Callback, ClientMetric, ClientRecord, Header, PortFigures, RoundRecord
from ..errors import ConfigError

HOST = "127.0.0.1"
ROUND_BOUNDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)  # seconds
CHECKPOINT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
LABELS = ("task", "strategy", "uplink", "downlink", "memory", "partition", "device")  # of Header
TOTALS = {  # fields of RoundRecord
    "accepted": "Accepted updates.",
    "uplink_bytes": "Bytes of frames (encoded updates) from clients.",
    "downlink_bytes": "Bytes of frames (encoded updates) to clients.",
    "dense_uplink_bytes": "Bytes that clients would have sent without compression (float32 models).",
    "dense_downlink_bytes": "Bytes that clients would have received without compression (float32 models).",
    "relayed_bytes": "Bytes of frames (encoded updates) from relays.",
}
# Maximum number of client metrics. If clients report more, the least recently reported metrics are dropped.
MAX_CLIENT_METRICS = 128
MEAN_HELP = "Last reported mean of a metric over the clients."
WORST_HELP = "Last reported mean of a metric over the worst tenth of the clients."
CLIENT_TOTALS = {
    "uplink_bytes": "Bytes of frames (encoded updates) from the client.",
    "downlink_bytes": "Bytes of frames (encoded updates) to the client.",
    "rejected": "Rounds in which the client was rejected.",
}


class Metrics(Callback, Collector):
    """The metrics of a run for Prometheus. Any thread may call `collect`."""

    def __init__(self) -> None:
        self.header: Header | None = None
        self.last: RoundRecord | None = None
        self.evaluated: RoundRecord | None = None  # the last round that was evaluated
        self.connected: set[int] = set()
        self.wanted = self.answered = self.warnings = 0
        self.totals: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()  # number of rejected clients by stage
        self.client_totals: dict[str, Counter[int]] = {name: Counter() for name in CLIENT_TOTALS}
        self.client_records: dict[int, ClientRecord] = {}  # the last ClientRecord of each client
        self.latency_s: dict[int, float] = {}  # by client: latency of the last answer
        # By name: the last values of a metric that clients have reported, sorted from the least to the most recently reported metric.
        self.client_metrics: dict[str, ClientMetric] = {}
        # By client: fraction of its votes that contradicted a large majority of clients, in the last round with votes.
        self.suspicion: Mapping[int, float] = {}
        self.rounds_s = _histogram("round_seconds", "Duration of a round.", ROUND_BOUNDS)
        self.checkpoints_s = _histogram(
            "checkpoint_seconds", "Time to write a checkpoint.", CHECKPOINT_BOUNDS
        )
        self.port: Callable[[], PortFigures] | None = None
        self.lock = Lock()
        self.registry = CollectorRegistry()
        self.registry.register(self)

    # The hooks of `Callback`.

    def on_port_open(self, port: Callable[[], PortFigures]) -> None:
        self.port = port

    def on_run_start(self, header: Header) -> None:
        with self.lock:
            self.header, self.wanted = header, header.clients

    def on_waiting(self, connected: Sequence[int], wanted: int) -> None:
        with self.lock:
            self.connected, self.wanted = set(connected), wanted

    def on_client_joined(self, client: int) -> None:
        with self.lock:
            self.connected.add(client)

    def on_client_left(self, client: int) -> None:
        with self.lock:
            self.connected.discard(client)

    def on_progress(self, round: int, answered: int, cohort: int) -> None:
        self.answered = answered

    def on_round_end(self, record: RoundRecord) -> None:
        with self.lock:
            self.last, self.answered = record, 0
            if record.loss is not None:
                self.evaluated = record
            self.totals.update({name: getattr(record, name) for name in TOTALS})
            self.rejected.update(rejection.stage for rejection in record.rejections)
            self.rounds_s.observe(record.seconds)
            self.suspicion = record.suspicion or self.suspicion
            for name, metric in record.client_metrics.items():
                self.client_metrics.pop(name, None)
                self.client_metrics[name] = metric
            while len(self.client_metrics) > MAX_CLIENT_METRICS:
                del self.client_metrics[next(iter(self.client_metrics))]
            for of_client in record.by_client:
                client = of_client.client
                self.client_totals["uplink_bytes"][client] += of_client.uplink_bytes
                self.client_totals["downlink_bytes"][client] += of_client.downlink_bytes
                self.client_totals["rejected"][client] += bool(of_client.stage)
                self.client_records[client] = of_client
                if of_client.latency_s is not None:
                    self.latency_s[client] = of_client.latency_s

    def on_checkpoint(self, round: int, seconds: float) -> None:
        self.checkpoints_s.observe(seconds)

    def on_warning(self, sentence: str) -> None:
        self.warnings += 1

    # The metric families.

    def collect(self) -> Iterable[Metric]:
        """Return all metric families with their current values."""
        port = self.port() if self.port else None
        with self.lock:
            if port is None:
                return self._of_run()
            return [*self._of_run(), *self._of_deployment(port), *self._of_clients(port)]

    def _of_run(self) -> list[Metric]:
        header, last, evaluated = self.header, self.last, self.evaluated
        accuracy, loss = (evaluated.accuracy, evaluated.loss) if evaluated else (None, None)
        train_loss, cohort = (last.train_loss, last.cohort) if last else (None, None)
        means = {name: metric.mean for name, metric in self.client_metrics.items()}
        worst = {name: metric.worst_decile for name, metric in self.client_metrics.items()}
        options = {name: _encodable(getattr(header, name)) for name in LABELS} if header else {}
        info = GaugeMetricFamily(
            "fedcomp_info", "Options of the run, as labels.", labels=["version", *options]
        )
        info.add_metric([__version__, *options.values()], 1)
        done = last.round if last else header.first_round - 1 if header else 0
        return [
            info,
            _gauge("round", "The last completed round.", done),
            _gauge(
                "rounds", "Number of rounds of the whole run.", header.rounds if header else None
            ),
            _gauge("accuracy", "Test accuracy of the last evaluated round, 0 to 1.", accuracy),
            _gauge("loss", "Mean test loss of the last evaluated round.", loss),
            _gauge("train_loss", "Mean training loss of the last round.", train_loss),
            _gauge("client_metric_mean", MEAN_HELP, means, "metric"),
            _gauge("client_metric_worst_decile", WORST_HELP, worst, "metric"),
            _gauge("cohort", "Number of clients of the last round.", cohort),
            _gauge(
                "answered",
                "Number of clients that have answered in the current round.",
                self.answered,
            ),
            *(_counter(name, help, self.totals[name]) for name, help in TOTALS.items()),
            _counter("rejected", "Rejected clients, by stage.", self.rejected, "stage"),
            _counter("warnings", "Number of warnings.", self.warnings),
            _without_created(self.rounds_s),
            _without_created(self.checkpoints_s),
        ]

    def _of_deployment(self, port: PortFigures) -> list[Metric]:
        return [
            _gauge(
                "clients_connected", "Number of clients that can be reached.", len(self.connected)
            ),
            _gauge("clients_wanted", "Number of clients that a round waits for.", self.wanted),
            _counter("wire_received_bytes", "TCP payload received.", port.received_bytes),
            _counter("wire_sent_bytes", "TCP payload sent.", port.sent_bytes),
            _gauge("port_connections", "Open connections of the server's port.", port.connections),
            _counter("port_refused", "Refused gRPC streams, by reason.", port.refused, "reason"),
        ]

    def _of_clients(self, port: PortFigures) -> list[Metric]:
        records = self.client_records
        behind = {client: record.versions_behind for client, record in records.items()}
        staleness = {client: record.staleness for client, record in records.items()}
        connected = dict.fromkeys(sorted(self.connected), 1)
        received = {client: received for client, (received, _) in port.by_client.items()}
        sent = {client: sent for client, (_, sent) in port.by_client.items()}
        gauges: dict[str, tuple[str, Mapping[int, float | None]]] = {
            "connected": ("1 for each client that can be reached.", connected),
            "latency_seconds": (
                "Seconds from the client's last assignment to its answer.",
                self.latency_s,
            ),
            "versions_behind": (
                "Number of model versions by which the client was behind at its last assignment.",
                behind,
            ),
            "staleness_rounds": ("Rounds by which the client's last answer was late.", staleness),
            "suspicion": (
                "Fraction of the client's votes that contradicted a large majority of clients, 0 to 1.",
                self.suspicion,
            ),
        }
        counters: dict[str, tuple[str, Mapping[int, float | None]]] = {
            **{name: (help, self.client_totals[name]) for name, help in CLIENT_TOTALS.items()},
            "wire_received_bytes": ("TCP payload received from the client.", received),
            "wire_sent_bytes": ("TCP payload sent to the client.", sent),
        }
        return [
            *(_gauge(f"client_{name}", *about, "client") for name, about in gauges.items()),
            *(_counter(f"client_{name}", *about, "client") for name, about in counters.items()),
        ]


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    help: str,
    values: float | Mapping[Any, float | None] | None,
    label: str = "",
) -> Metric:
    """Return a Prometheus metric family. `values` is a number, or a dict from label values to numbers. A value of None adds no sample."""
    if not isinstance(values, Mapping):
        return kind(f"fedcomp_{name}", help, values)
    family = kind(f"fedcomp_{name}", help, labels=[label])
    for key, value in values.items():
        if value is not None:
            family.add_metric([str(key)], value)
    return family


_gauge, _counter = partial(_family, GaugeMetricFamily), partial(_family, CounterMetricFamily)


def _histogram(name: str, help: str, bounds: Sequence[float]) -> Histogram:
    return Histogram(f"fedcomp_{name}", help, buckets=bounds, registry=None)


def _without_created(histogram: Histogram) -> Metric:
    """Return the metric family of a histogram without its `_created` samples, which Prometheus would show as another family."""
    (family,) = histogram.collect()
    family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    return family


def _encodable(text: str) -> str:
    """Return `text` with "?" in place of characters that UTF-8 cannot encode. Some file names contain such characters."""
    return text.encode("utf-8", "replace").decode()


@contextmanager
def serve(registry: CollectorRegistry, port: int) -> Iterator[str]:
    """Serve the metrics on a loopback port within a `with` block, and yield their URL. With port 0, the system chooses a free port.

    Raises ConfigError if the port cannot be opened.
    """
    try:
        server, thread = start_http_server(port, HOST, registry)
    except OSError as error:
        raise ConfigError(
            f"--metrics-port {port}: the port cannot be opened on {HOST} ({error.strerror}); give another port, or 0 for "
            "a free one"
        ) from error
    try:
        yield f"http://{HOST}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
