"""Ctrl-C in a real run: exit status 130, and the sentence holds the command that continues it."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, "-m", "fedcomp"]
# One thread: small steps are quick on one, and slow on several while others use the machine.
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}


def test_control_c_in_a_real_run_and_the_command_that_continues_it(tmp_path):
    start = [*COMMAND, "sim", "--clients", "20", "--rounds", "100000", "--plain", "--out", "run"]
    with subprocess.Popen(start, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            while not re.match(r" +3 ", line := run.stdout.readline()):
                assert line, run.stderr.read()
            run.send_signal(signal.SIGINT)
            _, said = run.communicate(timeout=60)
        finally:
            run.kill()
    assert run.returncode == 130
    done, command = re.fullmatch(r"fedcomp: interrupted after round (\d+) of 100000; continue with: (fedcomp .*)\n", said).groups()

    words = shlex.split(command.replace("--rounds 100000", f"--rounds {int(done) + 2}"))
    assert words[0] == "fedcomp"
    assert subprocess.run([*COMMAND, *words[1:]], cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.DEVNULL).returncode == 0
    rounds = [json.loads(line)["round"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rounds == list(range(1, int(done) + 3))
