"""Strategies and downloads over gRPC: the same model as in a simulation, and only downloads that a client needs."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny_task
import torch
from run_files import records
from safetensors.torch import load_file

from fedcomp import RunConfig
from fedcomp.sim import simulate

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(300)]
TINY = f"{Path(__file__).parents[1] / 'tiny_task.py'}:task"
CONFIG = RunConfig(
    task=TINY,
    clients=3,
    participation=1.0,
    partition="dirichlet:1",
    batch_size=10,
    seed=5,
    rounds=2,
    engine="serial",
    device="cpu",
)
STRATEGIES = {
    "average": {
        "rounds": 3,
        "uplink": "topk:density=1/10",
        "local_steps_schedule": "1,6@3",
        "batch_size_schedule": "linear:to=40",
        "density_schedule": "1/4,1/20@2",
        "lr_schedule": "cosine:to=0.01",
    },
    "fetchsgd": {"uplink": "sketch:rows=3,columns=12", "downlink": "topk:density=10%"},
    "gtopk": {"uplink": "topk:density=10%"},
    "powersgd:rank=1": {},
    "scaffold": {"local_steps": 4, "proximal": 0.1, "uplink": "stc:density=10%@layer"},
    "shared-scale": {},
    "sketched-sgd:density=10%,candidates=2": {"uplink": "sketch:rows=3,columns=12"},
}


def clients_have_the_servers_model(run) -> bool:
    server = run.loop.broadcasts.weights
    return all(torch.equal(run.weights_of(client), server) for client in range(3))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_deployed_strategy_gives_the_same_model_as_a_simulation(network, tmp_path, strategy):
    config = replace(CONFIG, strategy=strategy, **STRATEGIES[strategy])
    simulate(replace(config, out=str(tmp_path / "run")))
    expected = load_file(tmp_path / "run" / "model.safetensors")
    with network.federation(config) as run:
        if strategy == "scaffold":  # a restarted client still has its control variate
            run.faults.fail_at(1, 2, "train", "killed before its reply")
        outcomes = run.rounds()
        assert not run.faults.planned
        run.send_farewell()
        views = run.layout.views(run.loop.broadcasts.weights)
        assert views.keys() == expected.keys()
        assert all(torch.equal(views[name], expected[name]) for name in views)
        assert clients_have_the_servers_model(run)
    for result, record in zip(outcomes, records(tmp_path / "run"), strict=True):
        assert sum(result.traffic.uplink.values()) == record["uplink_bytes"]
        assert sum(result.traffic.downlink.values()) == record["downlink_bytes"]
        assert not result.rejections


def test_an_asynchronous_run_finishes(network):
    with network.federation(replace(CONFIG, strategy="asynchronous:wait=1/3", rounds=4)) as run:
        outcomes = run.rounds()
        run.send_farewell()
        assert len(outcomes) == 4 and all(not o.rejections and o.broadcast for o in outcomes)
        assert clients_have_the_servers_model(run)


def test_a_reconnected_client_downloads_missed_broadcasts_or_the_model(network):
    # The cache has room for five broadcasts, so a client that has lost its state downloads the model.
    config = replace(CONFIG, deadline=60.0, rounds=9, cache=0.016)
    with network.federation(config, tiny_task.wide) as run:
        dense = 4 * run.layout.numel
        run.rounds(1, 2)
        run.clients.end(2)
        # Rounds continue without a client that missed a deadline.
        run.connected_clients.mark_silent([2])
        missed = run.rounds(3, 5)
        assert all([a.client for a in outcome.accepted] == [0, 1] for outcome in missed)
        run.clients.begin(2)
        run.wait_until_responsive(2)
        carried = run.clients.proxies[2].bytes_down
        (back,) = run.rounds(6, 6)
        assert [a.client for a in back.accepted] == [0, 1, 2]
        usual = back.traffic.downlink[0]
        assert back.traffic.downlink[1] == usual == len(missed[-1].broadcast.frame)
        frames = len(missed[0].broadcast.frame) * 4
        assert usual < back.traffic.downlink[2] <= 1.2 * frames < dense / 10
        assert back.traffic.catch_up_bytes == back.traffic.downlink[2] - usual
        over_the_line = run.clients.proxies[2].bytes_down - carried
        assert back.traffic.downlink[2] < over_the_line < dense / 2

        run.clients.end(1)
        run.clients.forget(1)
        run.connected_clients.mark_silent([1])
        run.rounds(7, 7)
        run.clients.begin(1)
        run.wait_until_responsive(1)
        carried = run.clients.proxies[1].bytes_down
        (anew,) = run.rounds(8, 8)
        assert [a.client for a in anew.accepted] == [0, 1, 2]
        over_the_line = run.clients.proxies[1].bytes_down - carried
        assert dense < anew.traffic.downlink[1] < over_the_line < 1.01 * dense
        run.rounds(9, 9)
        assert [sentence.partition(" (")[0] for sentence in run.callback.warnings] == [
            f"rounds continue with 2 clients instead of 3, without client {away}" for away in (2, 1)
        ]
        run.send_farewell()
        assert clients_have_the_servers_model(run)
