"""Deployments with torch optimizers or a task's own loop, whose state clients keep, give the same model as simulations."""

from pathlib import Path

import pytest
from one_process import TASK, deployed, simulated
from run_files import model

from fedcomp import load
from fedcomp.errors import ConfigError

KEYWORDS = Path(__file__).parents[1] / "keyword_task.py"
OPTIMIZER = {
    "optimizer": "adamw:lr=0.02,weight_decay=0.1",
    "optimizer_state": "kept",
    "step_schedule": "linear:to=0.1",
    "accumulate": 2,
}


@pytest.mark.parametrize(
    ("task", "optimizer"),
    [(TASK, OPTIMIZER), (f"{KEYWORDS}:task", OPTIMIZER), (f"{KEYWORDS}:own_loop", {})],
    ids=["tiny", "keywords", "loop"],
)
def test_clients_keep_the_state_of_their_optimizer(tmp_path, task, optimizer):
    options = {"task": task, "clients": 3, "rounds": 2, "uplink": "topk:density=50%"}
    with deployed(tmp_path, **options, **optimizer) as run:
        run.serve([0], [1, 2])
        assert model(tmp_path / "run") == model(simulated(run))


def test_a_server_refuses_options_that_the_training_loop_of_the_task_replaces(tmp_path):
    said = "--accumulate 2 has no effect, because task 'own loop' has its own train_fn"
    with (
        pytest.raises(ConfigError, match=said),
        deployed(tmp_path, task=f"{KEYWORDS}:own_loop", accumulate=2) as run,
    ):
        run.serve([0, 1])


def test_sparse_loco_gives_the_same_model_deployed_and_simulated(tmp_path):
    options = {
        "clients": 3,
        "local_steps": 5,
        "optimizer": "adamw:lr=0.02",
        "optimizer_state": "kept",
        "uplink": "topk:density=1/8,values=2bit@chunk=16",
        "memory": "residual:decay=0.95",
        "downlink": "identity",
    }
    with deployed(tmp_path, **options) as run:
        run.serve([0], [1, 2])
        runs = [load(tmp_path / "run"), load(simulated(run))]
    assert model(tmp_path / "run") == model(tmp_path / "simulated")
    assert all(run.options["uplink"] == options["uplink"] for run in runs)
    sent = [run.metrics["uplink_bytes"].tolist() for run in runs]
    assert sent[0] == sent[1] and all(sent[0])
