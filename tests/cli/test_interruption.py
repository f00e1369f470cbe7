"""Signals and closed pipes that end a run: the exit status, and the command that continues it."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from deployment import TASK, Command

pytestmark = pytest.mark.deploy
COMMAND = [sys.executable, "-m", "fedcomp"]
# One thread: small steps are fast on one thread, and slow on several while other processes use the cores.
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def running(*words: str, cwd: Path, **variables: str):
    """Start a run of 100,000 rounds in a new process and yield the process after the third round."""
    start, env = (
        [*words, *COMMAND, "sim", "--task", TASK, "--rounds", "100000", "--plain", "--out", "run"],
        ENVIRONMENT | variables,
    )
    with subprocess.Popen(
        start, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        try:
            while not re.match(r" +3 ", line := run.stdout.readline()):
                assert line, run.stderr.read()
            yield run
        finally:
            run.kill()


INTERRUPTED = r"fedcomp: interrupted after round \d+ of 100000; continue with: fedcomp sim .* --out run --resume\n"


@contextmanager
def forked(folder: Path):
    """Yield the process of the same run, forked so that it does not import torch again."""
    words = ("sim", "--task", TASK, "--rounds", "100000", "--plain", "--out", "run")
    run = Command(folder, "run", *words)
    try:
        run.wait_for("^ +3 ")
        yield run
    finally:
        run.kill()


def test_control_c_prints_a_command_that_continues_the_run(tmp_path):
    with forked(tmp_path) as run:
        assert run.interrupt(signal.SIGINT) == 130
    done, command = re.search(
        r"^fedcomp: interrupted after round (\d+) of 100000; continue with: (fedcomp .*)$",
        run.output,
        re.MULTILINE,
    ).groups()
    words = shlex.split(command.replace("--rounds 100000", f"--rounds {int(done) + 2}"))
    assert words[0] == "fedcomp"
    assert Command(tmp_path, "continued", *words[1:]).end() == 0
    rounds = [
        json.loads(line)["round"]
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert rounds == list(range(1, int(done) + 3))


def test_a_closed_terminal_interrupts_the_run(tmp_path):
    with forked(tmp_path) as run:
        assert run.interrupt(signal.SIGHUP) == 128 + signal.SIGHUP
    assert re.search(INTERRUPTED, run.output)


def test_a_second_control_c_while_the_run_ends_leaves_no_traceback(tmp_path):
    with forked(tmp_path) as run:
        for _ in range(20):
            run.send(signal.SIGINT)
        # -SIGINT if a signal arrived after the last message.
        assert run.end() in (130, -signal.SIGINT)
    assert "Traceback" not in run.output and "interrupted after round" in run.output


def test_a_run_under_nohup_survives_its_terminal_and_ends_on_sigterm(tmp_path):
    with running("nohup", cwd=tmp_path) as run:
        run.send_signal(signal.SIGHUP)
        for _ in range(3):
            assert run.stdout.readline()
        run.send_signal(signal.SIGTERM)
        _, output = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM
    assert re.search(INTERRUPTED, output)


def test_a_closed_pipe_ends_the_run_with_the_command_to_continue(tmp_path):
    with running(cwd=tmp_path, PYTHONUNBUFFERED="") as run:
        run.stdout.close()
        run.stdout = None
        output = run.stderr.read()
        run.wait(timeout=60)
    assert run.returncode == 1
    assert re.fullmatch(
        r"fedcomp: standard output cannot be written \(Broken pipe\): stopped after round \d+ of 100000; "
        r"continue with: fedcomp sim .* --out run --resume\n",
        output,
    )
