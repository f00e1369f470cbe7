"""Clients of a deployment evaluate the model like virtual clients, directly and behind a relay."""

import dataclasses
import json
from pathlib import Path

from one_process import TASK, Clients, deployed

from fedcomp.sim import simulate


def metrics(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    values = [{c["client"]: c.get("metrics") for c in line["by_client"]} for line in lines]
    return [{**line["client_metrics"], **found} for line, found in zip(lines, values, strict=True)]


def test_clients_report_the_metrics_of_the_simulation(tmp_path):
    options = {"clients": 3, "rounds": 2, "uplink": "topk:density=50%", "evaluate": "both"}
    with deployed(tmp_path, holdout=0.3, **options) as run:
        run.serve([0], behind=[[1, 2]])
        simulate(dataclasses.replace(run.config, out=str(tmp_path / "simulated"), engine="serial"))
    found = metrics(tmp_path / "run")
    assert found == metrics(tmp_path / "simulated")
    assert found[1]["accuracy"]["clients"] == 3 and found[1]["accuracy"]["mean"] > 0


def test_the_server_needs_no_data(tmp_path):
    options = {"clients": 2, "rounds": 2, "evaluate": "clients", "holdout": 0.3}
    with deployed(tmp_path, task=f"{TASK}_without_data", **options) as run:

        def start_clients() -> None:
            run.clients.append(Clients())
            run.clients[-1].start(run.port, [0, 1], None, f"{TASK}_without_test_data")

        run.serve(then=start_clients)
        simulated = {"task": f"{TASK}_without_test_data", "out": str(tmp_path / "simulated")}
        simulate(dataclasses.replace(run.config, **simulated, engine="serial"))
    assert metrics(tmp_path / "run") == metrics(tmp_path / "simulated")
    model = "model.safetensors"
    assert (tmp_path / "run" / model).read_bytes() == (tmp_path / "simulated" / model).read_bytes()
