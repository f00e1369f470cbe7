"""The outputs of a deployed run: the metrics page, JSON logs of server and clients, and the records of each client."""

import json
import re
import signal
import time
import urllib.request

import pytest
from deployment import free_port, stage
from prometheus_text import parsed
from run_files import flags

from fedcomp.keys.key_folder import make

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(300)]
CLIENTS, ROUNDS = 2, 5


def page(port, path="/metrics"):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
        return answer.read().decode()


def page_with(port, true, seconds=100.0):
    """Return the samples of the first metrics page that satisfies a condition."""
    deadline = time.monotonic() + seconds
    while not true(samples := parsed(page(port))):
        assert time.monotonic() < deadline, samples
        time.sleep(0.05)
    return samples


def objects(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run two clients with keys. Client 1 is killed in the second round.

    Pages are read before the run, in its second round, and after client 0 has left.
    """
    folder = tmp_path_factory.mktemp("watched")
    keys, metrics = folder / "keys", free_port()
    make(keys, CLIENTS)
    watching = ["--log-json", "server.jsonl", "--metrics-port", str(metrics)]
    options = {"clients": CLIENTS, "rounds": ROUNDS, "participation": 1, "batch_size": 10}
    with stage(folder) as on:
        server = on.server("--keys", str(keys), "--host", "127.0.0.1", *watching, *flags(options))
        server.wait_for("0 of 2 clients are connected")
        pages = [page_with(metrics, lambda s: s["fedcomp_clients_connected", ()] == 0)]
        first, second = (
            ["--enrolment", str(keys / "clients" / f"{i}.toml"), "--log-json"]
            for i in range(CLIENTS)
        )
        clients = [on.client(0, *first, "client0.jsonl"), on.client(1, *second, "-", kill_at=8)]
        assert clients[1].end() == -signal.SIGKILL
        one_answer = {("fedcomp_round", ()): 1, ("fedcomp_answered", ()): 1}
        pages.append(page_with(metrics, lambda s: one_answer.items() <= s.items()))
        with pytest.raises(OSError):
            page(on.port)
        assert clients[0].interrupt(signal.SIGTERM) == 128 + signal.SIGTERM
        pages.append(
            page_with(metrics, lambda s: ("fedcomp_client_connected", (("client", "0"),)) not in s)
        )
        clients += [
            on.client(0, *first, "client0.jsonl", name="again0"),
            on.client(1, *second, "-", name="again1"),
        ]
        assert server.end() == 0, server.output
        assert [client.end() for client in clients[2:]] == [0, 0]
    return folder, pages, server, clients


def test_the_metrics_page_shows_the_progress_of_the_run(run):
    folder, (before, during, after), *_ = run
    assert before["fedcomp_clients_wanted", ()] == CLIENTS
    assert before["fedcomp_round", ()] == 0 and before["fedcomp_rounds", ()] == ROUNDS
    assert not any(name.startswith("fedcomp_client_") for name, _ in before)
    done = objects(folder / "run" / "metrics.jsonl")[: int(during["fedcomp_round", ()])]
    assert len(done) == 1
    assert during["fedcomp_accuracy", ()] == done[-1]["accuracy"]
    assert during["fedcomp_loss", ()] == done[-1]["loss"]
    sizes = "uplink_bytes downlink_bytes dense_uplink_bytes dense_downlink_bytes".split()
    for name in ("accepted", *sizes):
        assert during[f"fedcomp_{name}_total", ()] == sum(line[name] for line in done)
    assert during["fedcomp_round_seconds_count", ()] == 1
    assert during["fedcomp_round_seconds_sum", ()] == pytest.approx(done[0]["seconds"])
    assert during["fedcomp_checkpoint_seconds_count", ()] == 1
    assert during["fedcomp_checkpoint_seconds_sum", ()] > 0
    assert during["fedcomp_client_connected", (("client", "0"),)] == 1
    assert after["fedcomp_clients_connected", ()] == sum(
        name == "fedcomp_client_connected" for name, _ in after
    )


def test_the_metrics_page_shows_the_traffic_of_each_client(run):
    folder, (_, during, _), *_ = run
    for figures in objects(folder / "run" / "metrics.jsonl")[0]["by_client"]:
        who = (("client", str(figures["client"])),)
        assert during["fedcomp_client_uplink_bytes_total", who] == figures["uplink_bytes"] > 0
        assert during["fedcomp_client_downlink_bytes_total", who] == figures["downlink_bytes"]
        assert during["fedcomp_client_latency_seconds", who] == figures["latency_s"]
        received = during["fedcomp_client_wire_received_bytes_total", who]
        assert received >= figures["wire_bytes_in"] > figures["uplink_bytes"]
        sent = during["fedcomp_client_wire_sent_bytes_total", who]
        assert sent >= figures["wire_bytes_out"] > figures["downlink_bytes"]
    counter = "fedcomp_client_wire_received_bytes_total"
    all_clients = sum(value for (name, _), value in during.items() if name == counter)
    assert all_clients <= during["fedcomp_wire_received_bytes_total", ()]


def test_the_metrics_of_a_round_have_a_record_of_each_client(run):
    folder, *_ = run
    lines = objects(folder / "run" / "metrics.jsonl")
    assert len(lines) == ROUNDS
    for line in lines:
        figures = line["by_client"]
        assert [f["client"] for f in figures] == list(range(CLIENTS))
        assert sum(f["uplink_bytes"] for f in figures) == line["uplink_bytes"]
        assert sum(f["downlink_bytes"] for f in figures) == line["downlink_bytes"]
        assert sum(f["wire_bytes_in"] for f in figures) <= sum(
            earlier["wire_bytes_in"] for earlier in lines[: line["round"]]
        )
        assert all(
            f["latency_s"] > 0 and f["staleness"] == 0 and f["stage"] == f["reason"] == ""
            for f in figures
        )
        assert [f["versions_behind"] for f in figures] == [min(line["round"] - 1, 1)] * CLIENTS
    first, killed = lines[1]["by_client"]  # client 1 answered after its restart
    assert killed["latency_s"] > first["latency_s"]


def test_the_server_logs_what_happens_as_json(run):
    folder, _, server, _ = run
    lines = objects(folder / "server.jsonl")
    events = [line["event"] for line in lines]
    assert events[0] == "started" and "finished" in events
    assert {"waiting", "progress"} <= set(events)
    rounds = [line for line in lines if line["event"] == "round"]
    saved = [line["round"] for line in lines if line["event"] == "checkpoint"]
    assert [line["round"] for line in rounds] == saved == [*range(1, ROUNDS + 1)]
    moves = [line for line in lines if line["event"] in ("joined", "left")]
    moves = [line["event"] for line in moves if line["client"] == 0]
    assert moves[:3] == ["joined", "left", "joined"]
    times = [line["time"] for line in lines]
    assert times == sorted(times)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time) for time in times)
    for line in rounds:
        del line["time"], line["event"]
    assert rounds == objects(folder / "run" / "metrics.jsonl")
    assert "metrics   http://127.0.0.1:" in server.output  # the address of the page


def test_clients_log_their_messages_as_json(run):
    folder, _, _, (first, _, again, alone) = run
    lines = objects(folder / "client0.jsonl")
    events = [line["event"] for line in lines]
    assert events[:2] == ["connected", "joined"] and events[-1] == "over"
    assert events.count("interrupted") == 1
    answers = [
        (line["round"], line["uplink_bytes"]) for line in lines if line["event"] == "answered"
    ]
    stored = objects(folder / "run" / "metrics.jsonl")
    sent = [(line["round"], line["by_client"][0]["uplink_bytes"]) for line in stored]
    # A client that reconnects during a round may get its assignment again, and sends the same frame again.
    assert list(dict.fromkeys(answers)) == sent and len(answers) <= ROUNDS + 1
    for line in lines:
        assert line["event"] == "interrupted" or line["sentence"] in first.output + again.output
    events = [json.loads(line)["event"] for line in alone.output.splitlines()]
    assert events[:2] == ["connected", "joined"] and events[-1] == "over"
