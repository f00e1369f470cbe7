"""The JSON log: one object for each event, with its time in UTC. A log that cannot be written is an error."""

import json
import math
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from example_records import HEADER, RECORD

from fedcomp.callbacks import ClientRecord, LogMessage, Rejection, Summary
from fedcomp.errors import ConfigError
from fedcomp.server.logs import JsonLog

ODD_RECORD = replace(
    RECORD,
    accuracy=None,
    loss=math.nan,
    train_loss=math.inf,
    rejections=(Rejection(2, "reply", "odd\nreason\x1b[2J \udcff"),),
    by_client=(ClientRecord(0, 1, 2, 3, 4, 0.5, None),),
)
SUMMARY = Summary(0.5, None, 1, 2, 3, 4, 9, 3, 18, 1.5, 12.0, "cpu", 0, "0.1.0")
MOMENT = datetime(2026, 11, 21, 18, 33, 8, 125_999, timezone(timedelta(hours=2)))


def lines(path):
    text = path.read_text(encoding="ascii")
    assert (
        text.endswith("\n") and text.isascii() and all(c == "\n" or c.isprintable() for c in text)
    )
    return [
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        for line in text.splitlines()
    ]


def test_every_hook_writes_a_line(tmp_path):
    path = tmp_path / "log.jsonl"
    with JsonLog(str(path), now=lambda: MOMENT) as log:
        log.on_run_start(HEADER)
        log.on_waiting([1], 3)
        log.on_client_joined(2)
        log.on_client_left(2)
        log.on_progress(4, 1, 2)
        log.on_round_end(ODD_RECORD)
        log.on_checkpoint(4, 0.25)
        log.on_warning('it "grows"')
        log.on_run_end(SUMMARY, "runs/x")
    read = lines(path)
    assert [line["event"] for line in read] == [
        "started",
        "waiting",
        "joined",
        "left",
        "progress",
        "rejection",
        "round",
        "checkpoint",
        "warning",
        "finished",
    ]
    assert {line["time"] for line in read} == {"2026-11-21T16:33:08.125Z"}
    by_event = {line["event"]: line for line in read}
    assert (
        by_event["started"]["uplink"] == "stc"
        and by_event["waiting"] | {"here": [1], "wanted": 3} == by_event["waiting"]
    )
    assert (
        by_event["rejection"] | {"round": 4, "client": 2, "reason": "odd\nreason\x1b[2J \udcff"}
        == by_event["rejection"]
    )
    assert (
        by_event["round"]["loss"] is by_event["round"]["train_loss"] is None
        and by_event["round"]["by_client"][0]["latency_s"] == 0.5
    )
    assert (
        by_event["warning"]["sentence"] == 'it "grows"'
        and by_event["finished"]["client_updates"] == 18
    )


def test_progress_is_logged_at_most_once_a_second(tmp_path):
    times = iter([0.0, 0.1, 0.99, 1.0, 1.5, 5.0])
    with JsonLog(str(tmp_path / "log"), clock=lambda: next(times)) as log:
        for answered in range(1, 7):
            log.on_progress(1, answered, 6)
    assert [line["answered"] for line in lines(tmp_path / "log")] == [1, 4, 6]


def test_a_resumed_run_appends_to_its_log(tmp_path):
    for sentence in ("one", "two"):
        with JsonLog(str(tmp_path / "log")) as log:
            log.on_warning(sentence)
    assert [line["sentence"] for line in lines(tmp_path / "log")] == ["one", "two"]


@pytest.mark.parametrize(
    ("error", "event"), [(KeyboardInterrupt(), "interrupted"), (ConfigError("--x is y"), "failed")]
)
def test_the_last_event_of_a_log_is_the_error_that_ended_the_run(tmp_path, error, event):
    with pytest.raises(type(error)), JsonLog(str(tmp_path / "log")):
        raise error
    (line,) = lines(tmp_path / "log")
    assert line["event"] == event and line.get("reason", "--x is y") == "--x is y"


def test_events_have_the_current_time(tmp_path):
    before = datetime.now(UTC).replace(microsecond=0)
    with JsonLog(str(tmp_path / "log")) as log:
        log.on_warning("now")
    assert before <= datetime.fromisoformat(lines(tmp_path / "log")[0]["time"]) <= datetime.now(UTC)


def test_a_log_message_becomes_an_event_with_values(tmp_path):
    with JsonLog(str(tmp_path / "log")) as log:
        log.write_message(LogMessage("round 3: 5 bytes down", "answered", round=3, loss=math.nan))
        log.write_message("plain")
    first, second = lines(tmp_path / "log")
    assert (
        first | {"event": "answered", "sentence": "round 3: 5 bytes down", "round": 3, "loss": None}
        == first
    )
    assert (second["event"], second["sentence"]) == ("said", "plain")


def test_only_the_log_is_written_to_standard_output(capsys):
    with JsonLog("-") as log:
        print("a model says hello")
        log.on_warning("odd")
    out, err = capsys.readouterr()
    assert json.loads(out)["sentence"] == "odd" and err == "a model says hello\n"


@pytest.mark.parametrize("where", [".", "absent/log", "~nosuch/log"])
def test_a_file_that_cannot_be_written_is_one_error_message(tmp_path, monkeypatch, where):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^--log-json {where}") as raised, JsonLog(where):
        pass
    assert "; give a" in str(raised.value)


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_is_an_error_when_a_line_is_written_but_not_on_exit():
    with JsonLog("/dev/full") as log, pytest.raises(OSError, match="No space left"):
        log.on_round_end(RECORD)
