"""--log-json on the command line: standard output holds only JSON, and the log has the reason why a command stopped."""

import json
from pathlib import Path

from command_line import error_message, fedcomp
from deployment import TASK, free_port

OPTIONS = "--clients 4 --rounds 2 --engine serial --device cpu --batch-size 10".split()
SIM = ("sim", "--task", TASK, *OPTIONS)


def test_a_simulation_prints_json_in_place_of_plain_lines(tmp_path):
    shown = ["--log-json", "-", "--metrics-port", 0]
    done = fedcomp(*SIM, "--out", tmp_path / "run", *shown, "--checkpoint-every", 1)
    assert done.exit_code == 0 and done.stderr == ""
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["event"] for line in lines if line["event"] != "progress"] == [
        "started",
        "round",
        "checkpoint",
        "round",
        "checkpoint",
        "finished",
    ]
    assert lines[0]["metrics"].startswith("http://127.0.0.1:") and lines[0]["metrics"].endswith(
        "/metrics"
    )


def test_what_a_task_prints_is_not_in_the_log(tmp_path):
    file = tmp_path / "loud.py"
    path, _, name = TASK.rpartition(":")
    file.write_text(
        f"print('importing')\nimport sys\nsys.path.insert(0, {str(Path(path).parent)!r})\n"
        f"from {Path(path).stem} import {name} as task\nprint('imported')\n"
    )
    done = fedcomp(
        *("sim", "--task", f"{file}:task", *OPTIONS), "--out", tmp_path / "run", "--log-json", "-"
    )
    assert done.exit_code == 0 and "imported" in done.stderr
    assert json.loads(done.stdout.splitlines()[0])["event"] == "started"


def test_with_a_log_file_plain_lines_are_still_printed(tmp_path):
    done = fedcomp(
        *SIM, "--out", tmp_path / "run", "--log-json", tmp_path / "log", "--metrics-port", 0
    )
    assert "metrics   http://127.0.0.1:" in done.stdout and "model       " in done.stdout
    assert json.loads((tmp_path / "log").read_text().splitlines()[-1])["event"] == "finished"


def test_an_invalid_port_is_refused_in_one_error_message():
    assert (
        error_message(fedcomp("sim", "--metrics-port", 65536))
        == "--metrics-port is 65536; give at most 65535"
    )


def test_the_json_log_has_the_reason_why_a_client_stopped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    where = f"127.0.0.1:{free_port()}"
    words = ("client", "--server", where, "--task", TASK)
    words += (*"--insecure --client-id 0 --device cpu --patience 0.1".split(),)
    done = fedcomp(*words, "--log-json", "-")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert (
        done.exit_code == 2
        and {line["event"] for line in lines[:-1]} == {"cut_off"}
        and lines[0]["pause_s"] == 0.2
    )
    assert (
        lines[-1]["event"] == "failed"
        and done.stderr == f"fedcomp: {lines[-1]['reason']}\n"
        and where in done.stderr
    )
    done = fedcomp(*words, "--log-json", "absent/log")
    assert error_message(done).startswith("--log-json absent/log cannot be written")
