"""The metrics page has the sums over the round records of a run, and no other samples."""

import re
from dataclasses import replace
from pathlib import Path

from example_records import HEADER, RECORD
from prometheus_client import generate_latest
from prometheus_text import parsed

from fedcomp.callbacks import ClientMetric, ClientRecord, PortFigures
from fedcomp.server.metrics import Metrics

RESUMED = replace(
    HEADER, task='my "task"\\\n.py', uplink="stc:density=1/100", engine="deployed", first_round=4
)
FIGURES = ClientRecord(
    client=0,
    uplink_bytes=10,
    downlink_bytes=20,
    wire_bytes_in=100,
    wire_bytes_out=200,
    latency_s=0.5,
    versions_behind=1,
    staleness=2,
)
AWAY = ClientRecord(2, 0, 7, 50, 60, None, None, 0, "deadline", "no reply")
DEPLOYED_RECORD = replace(RECORD, by_client=(FIGURES, AWAY))
PORT = PortFigures(
    connections=3,
    refused={"key": 2, "protocol": 1},
    received_bytes=500,
    sent_bytes=900,
    by_client={0: (100, 200), 2: (50, 60)},
)


def text_of(metrics):
    return generate_latest(metrics.registry).decode()


def of(client):
    return (("client", str(client)),)


def test_the_page_is_valid_before_the_run_starts():
    samples = parsed(text_of(Metrics()))
    assert samples["fedcomp_round", ()] == 0 and not {
        "fedcomp_accuracy",
        "fedcomp_rounds",
        "fedcomp_cohort",
    } & {n for n, _ in samples}


def test_the_metrics_of_a_resumed_run_continue():
    metrics = Metrics()
    metrics.on_run_start(RESUMED)
    samples = parsed(text_of(metrics))
    assert samples["fedcomp_round", ()] == 3 and samples["fedcomp_rounds", ()] == 9
    (info,) = [dict(labels) for name, labels in samples if name == "fedcomp_info"]
    assert info["task"] == RESUMED.task and info["uplink"] == "stc:density=1/100"


def test_a_task_whose_name_is_not_utf_8_does_not_break_the_page():
    metrics = Metrics()
    metrics.on_run_start(replace(RESUMED, task="\udcff.py"))
    (info,) = [dict(labels) for name, labels in parsed(text_of(metrics)) if name == "fedcomp_info"]
    assert info["task"] == "?.py"


def test_counters_sum_over_rounds_and_the_last_accuracy_stays():
    metrics = Metrics()
    metrics.on_run_start(RESUMED)
    metrics.on_progress(4, 1, 2)
    assert parsed(text_of(metrics))["fedcomp_answered", ()] == 1
    metrics.on_round_end(DEPLOYED_RECORD)
    metrics.on_checkpoint(4, 0.02)
    metrics.on_round_end(
        replace(DEPLOYED_RECORD, round=5, accuracy=None, loss=None, train_loss=None, seconds=3.0)
    )
    metrics.on_warning("odd")
    samples = parsed(text_of(metrics))
    assert (
        samples["fedcomp_round", ()] == 5
        and samples["fedcomp_answered", ()] == 0
        and samples["fedcomp_warnings_total", ()] == 1
    )
    assert (samples["fedcomp_accuracy", ()], samples["fedcomp_loss", ()]) == (0.5, 1.25) and (
        "fedcomp_train_loss",
        (),
    ) not in samples
    assert (
        samples["fedcomp_accepted_total", ()] == 2
        and samples["fedcomp_rejected_total", (("stage", "deadline"),)] == 2
    )
    assert (
        samples["fedcomp_uplink_bytes_total", ()] == 20
        and samples["fedcomp_downlink_bytes_total", ()] == 54
    )
    assert (
        samples["fedcomp_round_seconds_bucket", (("le", "0.5"),)] == 1
        and samples["fedcomp_round_seconds_count", ()] == 2
    )
    assert samples["fedcomp_checkpoint_seconds_sum", ()] == 0.02
    assert not any(
        name.startswith(("fedcomp_client", "fedcomp_port", "fedcomp_wire")) for name, _ in samples
    ), "a simulation has none"


def test_metrics_of_clients_stay_until_they_are_reported_again():
    metrics = Metrics()
    reported = {
        "accuracy": ClientMetric(0.75, 0.5, 2, 30),
        "train_loss": ClientMetric(2.0, 3.0, 2, 30),
    }
    metrics.on_round_end(replace(DEPLOYED_RECORD, client_metrics=reported))
    later = {"train_loss": ClientMetric(1.5, 2.5, 2, 30), "size": ClientMetric(7.0, None, 2, 30)}
    metrics.on_round_end(replace(DEPLOYED_RECORD, round=5, client_metrics=later))
    samples = parsed(text_of(metrics))

    def values(statistic):
        family = f"fedcomp_client_metric_{statistic}"
        return {
            dict(labels)["metric"]: v for (name, labels), v in samples.items() if name == family
        }

    assert values("mean") == {"accuracy": 0.75, "train_loss": 1.5, "size": 7.0}
    assert values("worst_decile") == {"accuracy": 0.5, "train_loss": 2.5}


def test_the_number_of_metrics_of_clients_is_bounded():
    metrics = Metrics()
    for round in range(4):
        names = [f"{round}/{i}" for i in range(64)]
        reported = {name: ClientMetric(float(round), None, 1, 1) for name in names}
        metrics.on_round_end(replace(DEPLOYED_RECORD, client_metrics=reported))
    samples = parsed(text_of(metrics))
    means = [v for (name, _), v in samples.items() if name == "fedcomp_client_metric_mean"]
    assert means == [2.0] * 64 + [3.0] * 64


def test_suspicion_stays_in_rounds_without_votes():
    metrics = Metrics()
    metrics.on_run_start(RESUMED)
    metrics.on_port_open(lambda: PORT)
    metrics.on_round_end(replace(DEPLOYED_RECORD, suspicion={2: 0.75}))
    metrics.on_round_end(replace(DEPLOYED_RECORD, round=5))
    assert parsed(text_of(metrics))["fedcomp_client_suspicion", of(2)] == 0.75


def test_a_deployment_also_has_metrics_of_its_clients_and_its_port():
    metrics = Metrics()
    metrics.on_port_open(lambda: PORT)
    metrics.on_run_start(RESUMED)
    metrics.on_waiting([], 3)
    for client in (0, 2):
        metrics.on_client_joined(client)
    metrics.on_round_end(replace(DEPLOYED_RECORD, suspicion={0: 0.25}))
    metrics.on_client_left(2)
    samples = parsed(text_of(metrics))
    assert (
        samples["fedcomp_clients_connected", ()] == 1 and samples["fedcomp_clients_wanted", ()] == 3
    )
    assert {labels for name, labels in samples if name == "fedcomp_client_connected"} == {of(0)}
    assert (
        samples["fedcomp_client_latency_seconds", of(0)] == 0.5
        and ("fedcomp_client_latency_seconds", of(2)) not in samples
    )
    assert (
        samples["fedcomp_client_versions_behind", of(0)] == 1
        and samples["fedcomp_client_staleness_rounds", of(0)] == 2
    )
    assert (
        samples["fedcomp_client_rejected_total", of(0)],
        samples["fedcomp_client_rejected_total", of(2)],
    ) == (0, 1)
    assert (
        samples["fedcomp_client_downlink_bytes_total", of(2)] == 7
        and samples["fedcomp_client_suspicion", of(0)] == 0.25
    )
    assert samples["fedcomp_client_wire_received_bytes_total", of(2)] == 50
    assert samples["fedcomp_client_wire_sent_bytes_total", of(0)] == 200
    assert (
        samples["fedcomp_wire_received_bytes_total", ()] == 500
        and samples["fedcomp_port_connections", ()] == 3
    )
    assert samples["fedcomp_port_refused_total", (("reason", "key"),)] == 2


def test_the_docs_name_every_metric_family():
    metrics = Metrics()
    metrics.on_port_open(lambda: PORT)
    written = re.findall("^# TYPE (\\S+)", text_of(metrics), re.MULTILINE)
    docs = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md").read_text(
        encoding="utf-8"
    )
    named = re.findall(
        r"`(fedcomp_\w+)(?:\{\w+\})?`",
        docs.partition("| metric |")[2].partition("The metrics from")[0],
    )
    assert named and sorted(named) == sorted(written)
