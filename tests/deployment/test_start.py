"""Deployed runs: server and client processes on loopback, also if they are killed, send the same bytes as a simulation."""

import re
import signal
from dataclasses import replace
from pathlib import Path

import normalized_task
import pytest
import torch
from cases import for_each
from deployment import TASK, WIDE, free_port, stage
from run_files import SAME, flags, outcome, records
from typer.testing import CliRunner

import fedcomp
from fedcomp import RunConfig
from fedcomp.cli import deployment_commands
from fedcomp.cli.main import app
from fedcomp.config import read_run
from fedcomp.deployment.start import Endpoint, serve
from fedcomp.errors import ConfigError, RunFolderError, UserError
from fedcomp.keys.key_folder import make, revoke
from fedcomp.run_display import RunDisplay
from fedcomp.server.evaluation import NO_TRAINING_DATA
from fedcomp.sim import simulate

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(300)]
OPTIONS = {
    "clients": 3,
    "rounds": 6,
    "participation": 1.0,
    "partition": "dirichlet:1",
    "batch_size": 10,
    "seed": 5,
}


FLAGS = flags(OPTIONS)
# Fields that are equal in a deployment and its simulation if no process was killed.
UNDISTURBED = [*SAME, "downlink_bytes", "catch_up_bytes", "first_download_bytes"]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Return the config of a simulation that has run with the same options."""
    folder = tmp_path_factory.mktemp("simulated") / "run"
    config = RunConfig(task=TASK, engine="serial", device="cpu", out=str(folder), **OPTIONS)
    simulate(config)
    return config


def test_a_run_with_tls_equals_its_simulation_and_refuses_unknown_clients(tmp_path, simulated):
    keys = tmp_path / "keys"
    make(keys, 4)
    make(tmp_path / "others", 3)
    revoke(keys, 3)
    with stage(tmp_path) as on:
        server = on.server("--keys", str(keys), "--host", "127.0.0.1", *FLAGS)
        server.wait_for("^round  ")
        unknown = {
            "revoked": ("--enrolment", str(keys / "clients" / "3.toml")),
            "foreign": ("--enrolment", str(tmp_path / "others" / "clients" / "0.toml")),
            "plain": ("--insecure",),
        }
        refused = [
            on.client(0, *words, "--state-dir", name, name=name) for name, words in unknown.items()
        ]
        clients = [
            on.client(i, "--enrolment", str(keys / "clients" / f"{i}.toml")) for i in range(3)
        ]
        assert [client.end() for client in refused] == [2, 2, 2]
        assert server.end() == 0, server.output
        assert [client.end() for client in clients] == [0, 0, 0]
    assert "client 3 is revoked" in refused[0].output
    for client in refused:
        assert client.output.count("fedcomp: ") == 1 and "Traceback" not in client.output
    assert outcome(tmp_path / "run", UNDISTURBED) == outcome(Path(simulated.out), UNDISTURBED)
    assert "at the port " in server.output
    last = records(tmp_path / "run")[-1]
    assert last["wire_bytes_in"] > last["uplink_bytes"]
    assert last["wire_bytes_out"] > last["downlink_bytes"]
    files = "config.toml metrics.jsonl summary.json model.safetensors checkpoint report.html"
    assert {file.name for file in (tmp_path / "run").iterdir()} == {*files.split()}


def test_an_invalid_server_certificate_is_refused_before_anything_is_written(tmp_path):
    make(tmp_path / "keys", 1)
    (tmp_path / "keys" / "server.key").write_bytes((tmp_path / "keys" / "ca.key").read_bytes())
    with pytest.raises(UserError, match="server.key is not the key of"):
        serve(
            RunConfig(task=TASK, device="cpu", out=str(tmp_path / "run"), **OPTIONS),
            Endpoint(port=0, keys=tmp_path / "keys"),
        )
    assert not (tmp_path / "run").exists()


def test_a_killed_client_and_a_killed_server_lose_nothing(tmp_path):
    """Residuals and optimizer moments survive, and the second server continues the schedule of the first."""
    steered = OPTIONS | {
        "rounds": 7,
        "server_optimizer": "adam:beta1=0.5",
        "server_lr": 0.02,
        "lr_schedule": "cosine:to=0.01",
        "local_steps_schedule": "1,4@3",
    }
    simulated = replace(
        RunConfig(task=TASK, engine="serial", device="cpu", out=str(tmp_path / "simulated")),
        **steered,
        horizon=6,
    )
    simulate(simulated)
    with stage(tmp_path) as on:
        server = on.server("--insecure", *flags(steered | {"rounds": 6}))
        clients = [on.client(i, "--insecure", kill_at=5 * (i == 1)) for i in range(3)]
        assert clients[1].end() == -signal.SIGKILL
        assert "round 2: " in clients[1].output and "round 3: " not in clients[1].output
        again = on.client(1, "--insecure", name="dies again", kill_at=6)  # killed in round 4
        assert again.end() == -signal.SIGKILL
        server.kill()
        server = on.server("--insecure", *flags(steered), "--resume")
        again = on.client(1, "--insecure", name="again")
        assert server.end() == 0, server.output
        assert [client.end() for client in (clients[0], again, clients[2])] == [0, 0, 0]
    assert read_run(tmp_path / "run")["horizon"] == 6
    assert outcome(tmp_path / "run") == outcome(tmp_path / "simulated")
    assert "trying again" in clients[0].output  # the client reports the cause and tries again


def test_a_server_without_training_data_exports_the_model_that_it_evaluated(tmp_path):
    normalized_task.write(tmp_path / "devices" / "train.npy", 200, seed=1)
    normalized_task.write(tmp_path / "here" / "test.npy", 100, seed=2)
    shared = ["--insecure", "--task", f"{normalized_task.__file__}:task", "--data"]
    rounds = ["--clients", "1", "--participation", "1", "--rounds", "1"]
    with stage(tmp_path) as on:
        server = on.server(*shared, "here", *rounds)
        client = on.client(0, *shared, "devices")
        assert server.end() == 0 == client.end(), server.output
    assert server.output.count("the server has no training data") == 1
    run = fedcomp.load(tmp_path / "run")
    assert NO_TRAINING_DATA in run.summary.warnings
    task = normalized_task.task(tmp_path / "here")
    model, test = run.model(task), task.test()
    with torch.no_grad():
        right = (model(test.inputs).argmax(1) == test.targets).float().mean().item()
    assert right == pytest.approx(run.accuracy, abs=1e-6) and model[1].num_batches_tracked == 1


def test_a_client_with_another_model_is_refused_and_an_interrupted_server_names_resume(tmp_path):
    with stage(tmp_path) as on:
        server = on.server("--insecure", *FLAGS)
        other = on.client(0, "--insecure", *WIDE)
        assert other.end() == 2
        server.wait_for("^warning: client 0 cannot take part: the run has another model ")
        server.wait_for("0 of 3 clients are connected")
        assert server.interrupt(signal.SIGINT) == 128 + signal.SIGINT
    assert "fedcomp: the run has another model" in other.output
    assert "give the task that the server was started with" in other.output
    command = r"continue with: fedcomp server start .*--insecure .*--resume\n"
    assert re.search(f"interrupted before the end of round 1; {command}", server.output)
    assert "--insecure: no TLS and no keys" in server.output


def test_a_server_needs_keys_or_insecure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    missing = "the folder of keys keys does not exist; make it with: fedcomp keys init --out keys"
    with pytest.raises(UserError, match=missing):
        deployment_commands.serve(RunConfig(), RunDisplay())
    with pytest.raises(ConfigError, match="--insecure uses no keys"):
        deployment_commands.serve(RunConfig(), RunDisplay(), insecure=True, keys="keys")
    done = CliRunner().invoke(app, ["server", "start", "--insecure", "--port", "65536"])
    assert done.exit_code == 2 and "65536 is not in the range" in done.stderr
    assert not [*tmp_path.iterdir()]


def client(*words: object):
    return CliRunner().invoke(app, ["client", *map(str, words)], prog_name="fedcomp")


INSECURE = ["--insecure", "--server", "localhost:1", "--client-id", "1"]


@for_each(
    "words, sentence",
    [
        ([], "this client has no enrolment"),
        (["--insecure"], "give --server host:port"),
        (["--insecure", "--server", "localhost:1"], "needs an id; give --partition-id"),
        (
            ["--insecure", "--server", "localhost", "--client-id", "1"],
            "--server cannot be 'localhost'; give host:port",
        ),
        ([*INSECURE, "--partitions", "2"], "--partitions needs --partition-id"),
        (["--insecure", "--enrolment", "0.toml"], "leave one of them out"),
        (["--enrolment", "absent.toml"], "absent.toml cannot be read"),
        ([*INSECURE, "--task", "digit"], "unknown task 'digit'"),
        ([*INSECURE, "--data", "absent"], "--data absent is not a folder"),
        ([*INSECURE, "--patience", "inf"], "inf is not in the range"),
        ([*INSECURE, "--patience", "nan"], "'--patience': nan is not a number of seconds"),
    ],
)
def test_a_client_that_cannot_start_reports_one_sentence(tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDCOMP_ENROLMENT", "nobody.toml")
    done = client(*words)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1 and sentence in done.stderr
    assert not [*tmp_path.iterdir()]


def test_a_client_gives_up_after_its_patience(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    where = f"127.0.0.1:{free_port()}"
    words = ["--insecure", "--server", where, "--client-id", 0, "--task", TASK, "--device", "cpu"]
    done = client(*words, "--patience", 0.3)
    assert done.exit_code != 0 and f"nothing listens on {where}" in done.stderr
    assert "trying again in 0.2 s" in done.stdout


@for_each(
    "options, sentence",
    [
        ({"attack": "inverted:1"}, "leave --attack out"),
        ({"engine": "batched"}, "--engine applies to simulations only"),
        ({"checkpoint_every": 3}, "--checkpoint-every applies to simulations only"),
    ],
)
def test_options_of_simulations_are_refused_in_one_sentence(tmp_path, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        serve(RunConfig(task=TASK, out=str(tmp_path / "run"), **options), Endpoint(0))
    assert not (tmp_path / "run").exists()


def test_a_simulated_run_is_not_continued_by_a_server(simulated):
    with pytest.raises(RunFolderError, match="continue it with fedcomp sim"):
        serve(replace(simulated, resume=True), Endpoint(0))
