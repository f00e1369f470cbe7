"""Metrics of a run for Prometheus (docs/reference/metrics.md). Counters start at 0 when the process starts, also in a resumed run."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .. import __version__
from ..callbacks import Callback, ClientMetric, ClientRecord, Header, PortFigures, RoundRecord
from ..errors import ConfigError, os_errors

HOST = "127.0.0.1"
# Upper limits of the buckets of the histograms, in seconds.
ROUND_BOUNDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
CHECKPOINT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
# Fields of Header that are labels of the metric fedcomp_info.
LABELS = ("task", "strategy", "uplink", "downlink", "memory", "partition", "device")
# Maximum number of client-reported metrics to keep. If there are more, the least recently reported ones are dropped.
MAX_CLIENT_METRICS = 128
# Help texts of the metric families, by NAME or NAME{LABEL}. A family is a counter if NAME ends in _total, and otherwise a gauge.
TOTALS = {  # sums of fields of RoundRecord
    "accepted_total": "Accepted updates.",
    "uplink_bytes_total": "Bytes of frames (encoded updates) from clients.",
    "downlink_bytes_total": "Bytes of frames (encoded updates) and strategy data to clients.",
    "dense_uplink_bytes_total": "Bytes that clients would have sent without compression (float32 models).",
    "dense_downlink_bytes_total": "Bytes that clients would have received without compression (float32 models).",
    "relayed_bytes_total": "Bytes of frames (encoded updates) from relays in a simulation; 0 in a deployment.",
}
OF_RUN = {
    "round": "The last completed round.",
    "rounds": "Number of rounds of the whole run.",
    "accuracy": "Test accuracy of the last evaluated round, 0 to 1.",
    "loss": "Mean test loss of the last evaluated round.",
    "train_loss": "Mean training loss of the last round.",
    "client_metric_mean{metric}": "Last reported mean of a metric over the clients.",
    "client_metric_worst_decile{metric}": "Last reported mean of a metric over the worst tenth of the clients.",
    "cohort": "Number of clients of the last round.",
    "answered": "Number of clients that have answered in the current phase of the round.",
    **TOTALS,
    "rejected_total{stage}": "Updates that were rejected or did not arrive, by the stage of the failure.",
    "warnings_total": "Number of warnings.",
}
OF_DEPLOYMENT = {
    "clients_connected": "Number of connected clients.",
    "clients_wanted": "Number of clients that a round waits for.",
    "wire_received_bytes_total": "Bytes of TCP payload received at the server's port.",
    "wire_sent_bytes_total": "Bytes of TCP payload sent from the server's port.",
    "port_connections": "Open connections of the server's port.",
    "port_refused_total{reason}": "Refused gRPC streams, by reason.",
    "client_connected{client}": "1 for each connected client.",
    "client_latency_seconds{client}": "Seconds from the client's last assignment to its answer.",
    "client_versions_behind{client}": "Number of model versions by which the client was behind at its last assignment.",
    "client_staleness_rounds{client}": "Rounds from the start of the client's last training to the round that used its update.",
    "client_suspicion{client}": "Fraction of the client's votes that contradicted a large majority of clients, 0 to 1.",
    "client_uplink_bytes_total{client}": "Bytes of frames (encoded updates) from the client.",
    "client_downlink_bytes_total{client}": "Bytes of frames (encoded updates) and strategy data to the client.",
    "client_rejected_total{client}": "Rounds in which the client was rejected.",
    "client_wire_received_bytes_total{client}": "Bytes of TCP payload received from the client.",
    "client_wire_sent_bytes_total{client}": "Bytes of TCP payload sent to the client.",
}


class Metrics(Callback, Collector):
    """The metrics of a run for Prometheus. Any thread may call `collect`."""

    def __init__(self) -> None:
        # By name of the metric family: a number (None if not known yet), or a number for each value of the family's label.
        self.values: dict[str, Any] = {"round": 0, "answered": 0, "clients_wanted": 0}
        for family in OF_RUN | OF_DEPLOYMENT:
            name, brace, _ = family.partition("{")
            unknown = 0 if name.endswith("_total") else None
            self.values.setdefault(name, Counter() if brace else unknown)
        self.options: dict[str, str] = {}  # labels of fedcomp_info and their values
        # Last values of the metrics that clients reported, from the least to the most recently reported metric.
        self.client_metrics: dict[str, ClientMetric] = {}
        name, help = "fedcomp_round_seconds", "Duration of a round."
        self.rounds_s = Histogram(name, help, buckets=ROUND_BOUNDS, registry=None)
        name, help = "fedcomp_checkpoint_seconds", "Time to write a checkpoint."
        self.checkpoints_s = Histogram(name, help, buckets=CHECKPOINT_BOUNDS, registry=None)
        self.port: Callable[[], PortFigures] | None = None
        self.lock = Lock()
        self.registry = CollectorRegistry()
        self.registry.register(self)

    # The hooks of `Callback`.

    def on_port_open(self, port: Callable[[], PortFigures]) -> None:
        self.port = port

    def on_run_start(self, header: Header) -> None:
        with self.lock:
            self.options = {name: _encodable(getattr(header, name)) for name in LABELS}
            self.values |= {
                "round": header.first_round - 1,
                "rounds": header.rounds,
                "clients_wanted": header.clients,
            }

    def on_waiting(self, connected: Sequence[int], wanted: int) -> None:
        with self.lock:
            self.values["clients_wanted"] = wanted
            self.values["client_connected"] = dict.fromkeys(connected, 1)

    def on_client_joined(self, client: int) -> None:
        with self.lock:
            self.values["client_connected"][client] = 1

    def on_client_left(self, client: int) -> None:
        with self.lock:
            self.values["client_connected"].pop(client, None)

    def on_progress(self, round: int, answered: int, cohort: int) -> None:
        self.values["answered"] = answered

    def on_round_end(self, record: RoundRecord) -> None:
        with self.lock:
            values = self.values
            for name in ("round", "cohort", "train_loss"):
                values[name] = getattr(record, name)
            values["answered"] = 0
            if record.loss is not None:
                values["accuracy"], values["loss"] = record.accuracy, record.loss
            for name in TOTALS:
                values[name] += getattr(record, name.removesuffix("_total"))
            values["rejected_total"].update(rejection.stage for rejection in record.rejections)
            values["client_suspicion"] = record.suspicion or values["client_suspicion"]
            self.rounds_s.observe(record.seconds)
            self._add_client_metrics(record.client_metrics)
            for client in record.by_client:
                self._add_client(client)

    def on_checkpoint(self, round: int, seconds: float) -> None:
        self.checkpoints_s.observe(seconds)

    def on_warning(self, sentence: str) -> None:
        self.values["warnings_total"] += 1

    def _add_client_metrics(self, reported: Mapping[str, ClientMetric]) -> None:
        earlier = {n: metric for n, metric in self.client_metrics.items() if n not in reported}
        recent = list((earlier | dict(reported)).items())[-MAX_CLIENT_METRICS:]
        self.client_metrics = dict(recent)
        for statistic in ("mean", "worst_decile"):
            values = {name: getattr(metric, statistic) for name, metric in recent}
            self.values[f"client_metric_{statistic}"] = values

    def _add_client(self, record: ClientRecord) -> None:
        values, client = self.values, record.client
        values["client_uplink_bytes_total"][client] += record.uplink_bytes
        values["client_downlink_bytes_total"][client] += record.downlink_bytes
        values["client_rejected_total"][client] += bool(record.stage)
        values["client_versions_behind"][client] = record.versions_behind
        values["client_staleness_rounds"][client] = record.staleness
        if record.latency_s is not None:
            values["client_latency_seconds"][client] = record.latency_s

    # The metric families.

    def collect(self) -> Iterable[Metric]:
        """Return all metric families with their current values."""
        port = self.port() if self.port else None
        with self.lock:
            values, families = dict(self.values), OF_RUN
            if port is not None:
                families = OF_RUN | OF_DEPLOYMENT
                by_client = port.by_client.items()
                values |= {
                    "clients_connected": len(values["client_connected"]),
                    "wire_received_bytes_total": port.received_bytes,
                    "wire_sent_bytes_total": port.sent_bytes,
                    "port_connections": port.connections,
                    "port_refused_total": port.refused,
                    "client_wire_received_bytes_total": {c: got for c, (got, _) in by_client},
                    "client_wire_sent_bytes_total": {c: sent for c, (_, sent) in by_client},
                }
            info = GaugeMetricFamily(
                "fedcomp_info", "Options of the run, as labels.", labels=["version", *self.options]
            )
            info.add_metric([__version__, *self.options.values()], 1)
            return [
                info,
                *(_family(name, help, values) for name, help in families.items()),
                _without_created(self.rounds_s),
                _without_created(self.checkpoints_s),
            ]


def _family(family: str, help: str, values: Mapping[str, Any]) -> Metric:
    """Return a metric family. `family`: its key in OF_RUN or OF_DEPLOYMENT; `help`: its help text; `values`: `Metrics.values`.

    Unknown values (None) are left out.
    """
    name, _, label = family.removesuffix("}").partition("{")
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    if not label:
        return kind(f"fedcomp_{name}", help, values[name])
    labelled = kind(f"fedcomp_{name}", help, labels=[label])
    for key, value in values[name].items():
        if value is not None:
            labelled.add_metric([str(key)], value)
    return labelled


def _without_created(histogram: Histogram) -> Metric:
    """Return the family of a histogram without its `_created` samples, which Prometheus would show as another family."""
    (family,) = histogram.collect()
    family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    return family


def _encodable(text: str) -> str:
    """Replace characters that UTF-8 cannot encode, which file names can contain, with "?"."""
    return text.encode("utf-8", "replace").decode()


@contextmanager
def serve(registry: CollectorRegistry, port: int) -> Iterator[str]:
    """Serve the metrics at a port of 127.0.0.1 in a `with` block, and yield their URL. Port 0 means any free port.

    Raises ConfigError if the port cannot be opened.
    """
    found = f"--metrics-port {port}: the port cannot be opened on {HOST}"
    with os_errors(ConfigError, found, "give another port, or 0 for a free one"):
        server, thread = start_http_server(port, HOST, registry)
    try:
        yield f"http://{HOST}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
