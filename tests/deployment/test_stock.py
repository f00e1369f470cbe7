"""A client under Flower's own SuperNode, beside one of ours."""

import json
import re
import signal

import pytest
from deployment import TASK, children, gone, stage

from fedcomp import RunConfig
from fedcomp.cli import deployed
from fedcomp.errors import ConfigError
from fedcomp.keys.key_folder import make
from fedcomp.sim import simulate

pytestmark = pytest.mark.timeout(400)
OPTIONS = {
    "clients": 2,
    "rounds": 2,
    "participation": 1.0,
    "partition": "dirichlet:1",
    "batch_size": 10,
    "seed": 5,
}
FLAGS = [
    word for name, value in OPTIONS.items() for word in ("--" + name.replace("_", "-"), str(value))
]
SAME = (
    "round",
    "accuracy",
    "loss",
    "train_loss",
    "cohort",
    "accepted",
    "rejected",
    "uplink_bytes",
    "uplink_nonzeros",
    "downlink_bytes",
)


def outcome(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in SAME} for line in lines], (
        folder / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
@pytest.mark.deploy
def test_a_stock_client_with_a_key_and_one_of_ours_have_the_simulated_outcome(tmp_path):
    keys = tmp_path / "keys"
    make(keys, 2)
    with stage(tmp_path) as on:
        server = on.server("--keys", str(keys), "--host", "127.0.0.1", *FLAGS)
        server.wait_for("^round  ")
        ours = on.client(0, "--enrolment", str(keys / "clients" / "0.toml"))
        stock = on.client(
            1,
            "--enrolment",
            str(keys / "clients" / "1.toml"),
            "--stock",
            "--state-dir",
            "stock",
            name="stock",
        )
        stock.wait_for("takes part as client 1")
        below = children(stock.process.pid)
        assert server.end(300) == 0, server.said + stock.said
        stock.interrupt(
            signal.SIGTERM
        )  # one that is slower than the server is patient does not hear that the run is over
        ours.interrupt(signal.SIGTERM)
    assert re.search(r"round 2: \d+ bytes down, \d+ bytes up, loss", stock.said)
    assert "--stock: Flower's SuperNode runs what the server names" in stock.said
    assert below and gone(below)
    simulate(
        RunConfig(
            task=TASK, engine="serial", device="cpu", out=str(tmp_path / "simulated"), **OPTIONS
        )
    )
    assert outcome(tmp_path / "run") == outcome(tmp_path / "simulated")


def test_it_is_one_client():
    with pytest.raises(ConfigError, match="--stock is one client"):
        deployed.take_part(
            "h:1",
            None,
            True,
            None,
            0,
            None,
            None,
            TASK,
            None,
            "cpu",
            None,
            False,
            count=2,
            stock=True,
        )
