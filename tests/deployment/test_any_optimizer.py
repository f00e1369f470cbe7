"""A deployment trains with the optimizer of the run, and each client keeps its state: the model is that of the simulation."""

import dataclasses

from one_process import deployed

from fedcomp.sim import simulate


def test_clients_keep_the_state_of_their_optimizer(tmp_path):
    options = {
        "clients": 3,
        "rounds": 3,
        "optimizer": "adamw:lr=0.02,weight_decay=0.1",
        "optimizer_state": "kept",
        "step_schedule": "linear:to=0.1",
        "accumulate": 2,
        "uplink": "topk:density=50%",
    }
    with deployed(tmp_path, **options) as run:
        run.serve([0], [1, 2])
        simulate(dataclasses.replace(run.config, out=str(tmp_path / "simulated"), engine="serial"))
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "simulated")]
    assert models[0] == models[1]
