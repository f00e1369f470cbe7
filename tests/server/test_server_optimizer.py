"""A deployed run with a server optimizer is the simulated one, the server killed and resumed."""

import pytest
from deployment import TASK, children, gone, stage
from test_start import OPTIONS, outcome

from fedcomp import RunConfig
from fedcomp.sim import simulate

pytestmark = pytest.mark.timeout(300)
STEERED = OPTIONS | {"server_optimizer": "adam:beta1=0.5", "server_lr": 0.02}
FLAGS = [
    word for name, value in STEERED.items() for word in ("--" + name.replace("_", "-"), str(value))
]


def test_a_killed_server_goes_on_with_the_moments_of_its_optimizer(tmp_path):
    simulate(
        RunConfig(
            task=TASK, engine="serial", device="cpu", out=str(tmp_path / "simulated"), **STEERED
        )
    )
    with stage(tmp_path) as on:
        server = on.server("--insecure", *FLAGS)
        clients = [on.client(i, "--insecure") for i in range(3)]
        server.wait_for(r"^ +3 ")
        below = children(server.process.pid)
        server.kill()
        assert gone(below)
        server = on.server("--insecure", *FLAGS, "--resume")
        assert server.end() == 0, server.said
        assert [client.end() for client in clients] == [0, 0, 0]
    assert outcome(tmp_path / "run") == outcome(tmp_path / "simulated")
