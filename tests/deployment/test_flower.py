"""`--transport flower`: a run with the task's own training loop through Flower's processes, interrupted and resumed."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deployment import children, commands, gone, stage
from typer.testing import CliRunner

import fedcomp
from fedcomp.cli.main import app
from fedcomp.deployment.flower import processes

TASK = ("--task", f"{Path(__file__).parents[1] / 'keyword_task.py'}:own_loop")
RUN = ("--clients", "1", "--participation", "1", "--insecure", *TASK)


@pytest.mark.slow
@pytest.mark.deploy
@pytest.mark.timeout(400)
def test_an_interrupted_run_over_flower_gives_the_same_model_as_a_simulation(tmp_path):
    simulated = tmp_path / "simulated"
    options = {"clients": 1, "participation": 1, "rounds": 2, "progress": False}
    fedcomp.simulate(TASK[1], out=simulated, **options)
    flower = ("--transport", "flower")
    with stage(tmp_path) as here:
        server = here.server(*RUN, *flower, "--rounds", "2")
        client = here.client(0, "--insecure", *TASK, *flower)
        server.wait_for(r"^ +1 ")
        started = set().union(*(children(command.process.pid) for command in (server, client)))
        assert len(started) >= 2
        for command in (server, client):
            command.send(signal.SIGINT)
        assert [command.end() for command in (server, client)] == [128 + signal.SIGINT] * 2
        assert gone(started), f"processes of Flower still run: {commands(started)}"
        server = here.server(*RUN, *flower, "--rounds", "2", "--resume")
        client = here.client(0, "--insecure", *TASK, *flower)
        assert [command.end() for command in (server, client)] == [0, 0], server.output
    models = [tmp_path / "run", simulated]
    assert len({(folder / "model.safetensors").read_bytes() for folder in models}) == 1


# A process whose child ignores signals and is in a session of its own.
STUBBORN = """
import signal, subprocess, sys, time
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ending_a_process_of_flower_ends_all_its_descendants(monkeypatch):
    monkeypatch.setattr(processes, "STOP_S", 0.5)
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"up\n"
        started = children(parent.pid)
        assert len(started) == 1
        processes.end(parent)
    assert gone(started, 5), commands(started)


@pytest.mark.parametrize(
    "words, fix",
    [
        (["--transport", "http"], "'http' is not one of 'grpc', 'flower'"),
        (["--transport", "flower", "--count", "2"], "start each client with a separate command"),
    ],
)
def test_a_client_refuses_options_that_flower_does_not_support(words, fix):
    there = ["client", "--insecure", "--server", "127.0.0.1:1", "--partition-id", "0"]
    done = CliRunner().invoke(app, [*there, *words])
    assert done.exit_code == 2 and fix in done.stderr
