"""SCAFFOLD on real clients: each keeps its control variate on its disk, and a killed one goes on with it."""

import signal

import pytest
from deployment import TASK, stage
from test_start import OPTIONS, outcome

from fedcomp import RunConfig
from fedcomp.sim import simulate

pytestmark = pytest.mark.timeout(300)
STEERED = OPTIONS | {
    "strategy": "scaffold",
    "local_steps": 4,
    "proximal": 0.1,
    "uplink": "stc:density=10%@layer",
}
FLAGS = [
    word for name, value in STEERED.items() for word in ("--" + name.replace("_", "-"), str(value))
]


def test_a_killed_client_loses_nothing(tmp_path):
    simulate(
        RunConfig(
            task=TASK, engine="serial", device="cpu", out=str(tmp_path / "simulated"), **STEERED
        )
    )
    with stage(tmp_path) as on:
        server = on.server("--insecure", *FLAGS)
        clients = [on.client(i, "--insecure", kill_at=13 * (i == 1)) for i in range(3)]
        assert clients[1].end() == -signal.SIGKILL
        again = on.client(1, "--insecure", name="again")
        assert server.end() == 0, server.said
        assert [client.end() for client in (clients[0], again, clients[2])] == [0, 0, 0]
    assert outcome(tmp_path / "run") == outcome(tmp_path / "simulated")
