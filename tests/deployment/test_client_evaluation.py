"""Clients of a deployment evaluate the model like virtual clients, directly and behind a relay."""

from pathlib import Path

from one_process import TASK, Clients, deployed, simulated
from run_files import model, records


def metrics(folder: Path) -> list[dict]:
    """Return the metrics of each round: summaries by name, and values by client."""
    return [
        record["client_metrics"] | {c["client"]: c.get("metrics") for c in record["by_client"]}
        for record in records(folder)
    ]


def test_clients_report_the_metrics_of_the_simulation(tmp_path):
    options = {"clients": 3, "rounds": 2, "uplink": "topk:density=50%", "evaluate": "both"}
    with deployed(tmp_path, holdout=0.3, **options) as run:
        run.serve([0], behind=[[1, 2]])
        found = metrics(tmp_path / "run")
        assert found == metrics(simulated(run))
    assert found[1]["accuracy"]["clients"] == 3 and found[1]["accuracy"]["mean"] > 0


def test_the_server_needs_no_data(tmp_path):
    options = {"clients": 2, "rounds": 2, "evaluate": "clients", "holdout": 0.3}
    with deployed(tmp_path, task=f"{TASK}_without_data", **options) as run:

        def start_clients() -> None:
            run.clients.append(Clients())
            run.clients[-1].start(run.port, [0, 1], None, f"{TASK}_without_test_data")

        run.serve(then=start_clients)
        folder = simulated(run, task=f"{TASK}_without_test_data")
    assert metrics(tmp_path / "run") == metrics(folder)
    assert model(tmp_path / "run") == model(folder)
