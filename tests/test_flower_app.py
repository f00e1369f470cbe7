"""An existing Flower App with two added lines: `flwr run` on Flower's own SuperLink and SuperNodes, one of which is killed."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flower_deployment import flower_stage, until
from flower_grid import AppGrid
from flwr.app import ArrayRecord
from safetensors.torch import load_file

import fedcomp

APP = Path(__file__).resolve().parent / "flower_app"
ROOT = APP.parents[1]
TEMPLATE = ROOT / "examples" / "flower-app"
pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(400),  # processes that import torch start slowly on a busy machine
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Return a function that runs the same app in this process. It returns the model, the accuracies and the grid."""
    monkeypatch.syspath_prepend(str(APP))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(rounds, compressed, before=lambda round, grid: None, partitions=(0, 1)):
        monkeypatch.setenv("CLOUDS_STATE", str(tmp_path / f"here-{compressed}"))
        for name in [name for name in sys.modules if name.split(".")[0] == "clouds"]:
            monkeypatch.delitem(sys.modules, name)
        client, server = (
            importlib.import_module(f"clouds.{half}_app") for half in ("client", "server")
        )
        grid = AppGrid(lambda: client.app, 2)
        grid.here = set(partitions)

        def measured(round, arrays):
            found = server.measured(round, arrays)
            before(round + 1, grid)
            return found

        config = {
            "compressed": compressed,
            "density": "1/100",
            "fraction-evaluate": 0.0,
            "min-nodes": len(partitions),
        }
        result = server.make_strategy(config).start(
            grid, ArrayRecord(server.model().state_dict()), num_rounds=rounds, evaluate_fn=measured
        )
        accuracies = {
            round: metrics["accuracy"]
            for round, metrics in result.evaluate_metrics_serverapp.items()
        }
        return result.arrays.to_torch_state_dict(), accuracies, grid

    yield run
    torch.set_num_threads(threads)
    for name in [name for name in sys.modules if name.split(".")[0] == "clouds"]:
        del sys.modules[name]


def done(out: Path) -> dict[str, float]:
    """Return the accuracies after the finished rounds."""
    path = out.with_suffix(".json")
    return json.loads(path.read_text()) if path.exists() else {}


@pytest.mark.slow
def test_compression_keeps_the_accuracy_with_a_fraction_of_the_bytes(here):
    _, plain, plainly = here(10, False)
    _, compressed, briefly = here(10, True)
    assert compressed[10] > plain[10] - 0.02 and plain[10] > 0.85 > 0.2 > plain[0]
    assert sum(briefly.bytes_up()) < sum(plainly.bytes_up()) / 50
    assert (
        sum(briefly.bytes_down()[2:]) < sum(plainly.bytes_down()[2:]) / 50
    )  # after the first download


@pytest.mark.slow
@pytest.mark.deploy
def test_flwr_run_gives_the_same_model_if_a_supernode_is_killed(tmp_path, here):
    """A SuperNode is killed after its first update. Its replacement has another node id and the residual of the first."""

    def restart(round, grid):
        if round == 2:
            grid.restart(1)

    expected, accuracies, _ = here(2, True, before=restart, partitions=[1])
    with flower_stage(tmp_path) as stage:
        stage.environment["CLOUDS_STATE"] = str(tmp_path / "state")
        stage.link()
        first = stage.node(1)
        out, go = tmp_path / "result", tmp_path / "go"
        stage.submit(APP, num_server_rounds=2, min_nodes=1, wait_for=str(go), out=str(out))
        until(lambda: "1" in done(out), first, lambda: stage.output("superlink"))
        stage.end(first)
        stage.flwr(
            "supernode", "unregister", stage.id_of("node1"), "here"
        )  # otherwise it would get messages until its heartbeat times out
        again = stage.node(1, "node1-again")
        until(lambda: stage.id_of("node1-again"), again, lambda: stage.output("node1-again"))
        assert stage.id_of("node1-again") != stage.id_of("node1")
        go.touch()
        until(lambda: "2" in done(out), again, lambda: stage.output("superlink"))
    found = load_file(out.with_suffix(".safetensors"))
    assert done(out) == {str(round): value for round, value in accuracies.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].to(value.dtype), value) for name, value in expected.items())


@pytest.mark.slow
@pytest.mark.deploy
def test_flower_installs_the_wheel_and_the_template_app_reaches_the_accuracy_of_its_readme(
    tmp_path,
):
    """Flower installs the wheel offline. The dependencies of fedcomp are found in the environment that runs Flower."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", tmp_path / "wheels", ROOT], check=True)
    page = (ROOT / "docs" / "tutorials" / "flower-app.md").read_text()
    (wheel,) = re.findall(r'^\+dependencies = \["(fedcomp @ [^"]*)"', page, flags=re.MULTILINE)
    wheel = wheel.replace("/srv/wheels", f"{tmp_path}/wheels")
    app = shutil.copytree(TEMPLATE, tmp_path / "app", ignore=shutil.ignore_patterns("__pycache__"))
    project = (app / "pyproject.toml").read_text()
    assert project.count("dependencies = []") == 1
    project = project.replace("dependencies = []", f'dependencies = ["{wheel}"]')
    metadata = f'name = "fedcomp"\nversion = "{fedcomp.__version__}"\nrequires-dist = []\n'
    project += f"\n[[tool.uv.dependency-metadata]]\n{metadata}"
    (app / "pyproject.toml").write_text(project)
    figures = re.compile(
        r"accuracy ([\d.]+) after (\d+) rounds\s+\d+ updates: (\d+) bytes of frames, (\d+) bytes"
    )
    accuracy, rounds, _, _ = map(
        float, figures.search((TEMPLATE / "README.md").read_text()).groups()
    )
    with flower_stage(tmp_path) as stage:
        stage.environment |= {"UV_OFFLINE": "1", "UV_CACHE_DIR": str(tmp_path / "uv")}
        stage.link("--simulation", installs=True)
        log = stage.answer("flwr", "run", str(app), "here", "--stream")
    assert f"Installed: [fedcomp=={fedcomp.__version__}" in log
    reached = list(map(float, figures.search(log).groups()))
    assert reached[0] > accuracy - 0.03 and reached[1] == rounds
    assert reached[2] < reached[3] / 100
    assert not (tmp_path / "user-state").exists()
