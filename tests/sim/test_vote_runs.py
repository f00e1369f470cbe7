"""Runs with votes: Byzantine clients are outvoted and suspected, and interruptions do not change a run."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from small_runs import TINY, StopsAt, assert_the_same_when_stopped, out, rounds_of

from fedcomp.sim import simulate

VOTING = replace(
    TINY,
    strategy="vote",
    uplink="sign",
    downlink="efsign",
    memory="none",
    lr=0.02,
    participation=1.0,
)


def test_byzantine_clients_are_suspected_and_outvoted(tmp_path):
    honest = simulate(replace(VOTING, clients=9, rounds=20, out=out(tmp_path, "honest")))
    simulate(replace(VOTING, clients=9, rounds=20, attack="inverted:2", out=out(tmp_path, "lied")))
    last = rounds_of(out(tmp_path, "lied"))[-1]
    ordered = sorted(last["suspicion"], key=last["suspicion"].get)
    assert last["accuracy"] > honest.accuracy - 0.1
    assert last["suspicion"][ordered[-2]] > 2 * last["suspicion"][ordered[-3]]


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": "vote:momentum=0.9"},
        {"memory": "signum", "weight_decay": 0.1},
        {"uplink": "efsign", "memory": "residual"},
        {"attack": "inverted:2"},
    ],
)
def test_a_run_stopped_in_a_round_equals_an_uninterrupted_one(tmp_path, changes):
    config = replace(VOTING, rounds=5, **changes)
    assert_the_same_when_stopped(tmp_path, config, StopsAt(3, 2))


@pytest.mark.parametrize("strategy", ["vote", "election:byzantine=1"])
def test_weight_decay_changes_the_step_but_not_the_votes(tmp_path, strategy):
    models = {}
    for rounds, decay in ((1, 0.0), (1, 5.0), (2, 5.0)):
        config = replace(VOTING, strategy=strategy, clients=5, weight_decay=decay, rounds=rounds)
        folder = out(tmp_path, f"{rounds} {decay}")
        simulate(replace(config, out=folder))
        tensors = load_file(f"{folder}/model.safetensors")
        models[rounds, decay] = torch.cat([tensors[name].flatten() for name in sorted(tensors)])
    initial = (models[1, 0.0] - models[1, 5.0]) / (0.02 * 5)
    step = models[1, 0.0] - initial
    torch.testing.assert_close(step.abs(), torch.full_like(step, 0.02), rtol=1e-3, atol=0)
    step = models[2, 5.0] - models[1, 5.0] * (1 - 0.02 * 5)
    torch.testing.assert_close(step.abs(), torch.full_like(step, 0.02), rtol=1e-3, atol=0)


WIDE = """
import torch
from fedcomp.tasks import Data, Task

def data() -> Data:
    return Data(torch.eye(40).repeat(1, 500), torch.arange(40) % 10)

task = Task("wide", lambda: torch.nn.Linear(20_000, 10), data, data)
"""


@pytest.mark.parametrize(
    "strategy", ["vote", "election:byzantine=2", "election:byzantine=2,form=ballots"]
)
def test_a_vote_costs_one_bit_per_parameter(tmp_path, strategy):
    """Within 1 %, including headers, for 200,010 parameters."""
    (tmp_path / "wide.py").write_text(WIDE)
    config = replace(
        VOTING,
        task=f"{tmp_path}/wide.py:task",
        clients=5,
        partition="iid",
        rounds=2,
        local_steps=1,
        strategy=strategy,
        out=out(tmp_path, "run"),
    )
    simulate(config)
    bits = 200_010 / 8 * 5 * (2 if "ballots" in strategy else 1)  # ballots, and then votes on them
    for record in rounds_of(out(tmp_path, "run")):
        assert record["accepted"] == 5
        assert bits < record["uplink_bytes"] < 1.01 * bits
