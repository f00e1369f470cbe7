"""Programs of Flower as children: none of them outlives what started it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deployment import ENVIRONMENT, gone

from fedcomp.deployment import children
from fedcomp.errors import FedcompError

pytestmark = pytest.mark.deploy

UP = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); print('up', flush=True); time.sleep(1000)"
SLEEP = [sys.executable, "-c", UP, "sleep", "1000"]


def test_a_command_that_is_not_installed_is_one_sentence():
    assert os.access(children.script("flower-superlink"), os.X_OK)
    with pytest.raises(FedcompError, match="the command no-such-program is not installed beside"):
        children.script("no-such-program")


def test_an_ended_child_takes_its_own_along(tmp_path):
    child = children.start(SLEEP, children.environment(tmp_path), subprocess.PIPE)
    with child:
        assert child.stdout.readline() == b"up\n"
        below = {
            int(p) for p in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        }
        children.end(child)
    assert below and gone(below) and child.returncode == -signal.SIGTERM


@pytest.mark.skipif(
    sys.platform != "linux", reason="other systems do not tell a child that its parent is gone"
)
def test_a_child_is_gone_when_its_parent_is_killed(tmp_path):
    code = (
        "import time\nfrom pathlib import Path\nfrom fedcomp.deployment import children\n"
        "child = children.start(['sleep', '1000'], children.environment(Path('.')), None)\n"
        "print(child.pid, flush=True)\ntime.sleep(1000)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE
    ) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
    assert gone({child})
