"""Schedules over a real SuperLink and guard: clients train as each round says, and the model is that of a simulation."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from deployment import stage
from networked import network
from safetensors.torch import load_file

from fedcomp import RunConfig
from fedcomp.config import read_run
from fedcomp.sim import simulate

pytestmark = pytest.mark.timeout(300)
TINY = f"{Path(__file__).parents[1] / 'tiny_task.py'}:task"
CONFIG = RunConfig(
    task=TINY,
    clients=3,
    participation=1.0,
    partition="dirichlet:1",
    batch_size=10,
    seed=5,
    rounds=3,
    engine="serial",
    device="cpu",
    uplink="topk:density=1/10",
    local_steps_schedule="1,6@3",
    batch_size_schedule="linear:to=40",
    density_schedule="1/4,1/20@2",
    lr_schedule="cosine:to=0.01",
)


def test_a_deployment_makes_the_model_that_a_simulation_makes(tmp_path):
    simulate(replace(CONFIG, out=str(tmp_path / "run")))
    expected = load_file(tmp_path / "run" / "model.safetensors")
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    (tmp_path / "network").mkdir()
    with network(tmp_path / "network") as net, net.federation(CONFIG) as run:
        outcomes = run.rounds()
        run.dismiss()
        assert {
            name: view.tolist()
            for name, view in run.layout.views(run.strategy.broadcasts.weights).items()
        } == {name: value.tolist() for name, value in expected.items()}
    assert all(not o.rejections for o in outcomes)
    assert [
        (sum(o.traffic.uplink.values()), sum(o.traffic.downlink.values())) for o in outcomes
    ] == [(line["uplink_bytes"], line["downlink_bytes"]) for line in lines]


def test_a_server_that_was_killed_goes_on_by_the_curve_that_it_began_with(tmp_path):
    """By the commands: the horizon of the first server holds for the second, which is asked for more rounds."""
    options = "--clients 2 --participation 1 --seed 5 --lr-schedule cosine:to=0.01 --local-steps-schedule 1,4@3".split()
    with stage(tmp_path) as s:
        for rounds, more in (("3", ["--insecure"]), ("5", ["--insecure", "--resume"])):
            server = s.server("--rounds", rounds, *options, *more)
            server.wait_for("^0 of 2 clients")
            clients = [s.client(i, "--insecure", "--state-dir", f"state{i}") for i in range(2)]
            assert server.end() == 0, server.said
            assert [client.end() for client in clients] == [0, 0]
    assert read_run(tmp_path / "run")["horizon"] == 3
    simulate(
        replace(
            RunConfig(
                task=TINY,
                clients=2,
                participation=1,
                seed=5,
                lr_schedule="cosine:to=0.01",
                local_steps_schedule="1,4@3",
                device="cpu",
                engine="serial",
            ),
            rounds=5,
            horizon=3,
            out=str(tmp_path / "simulated"),
        )
    )
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (
        tmp_path / "simulated" / "model.safetensors"
    ).read_bytes()
