from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked_workers import fork_workers
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedcomp.cli.main import app
from fedcomp.config import RunConfig
from fedcomp.deployment.handshake import pack_options, unpack_options
from fedcomp.messages import Invitation
from fedcomp.sim import simulate
from fedcomp.training.local_sgd import LocalSGD

PICTURES = """
import torch
from torch import nn
from fedcomp import Data, Task
from fedcomp.tasks.augment import CROP_AND_FLIP

def data():
    return Data(torch.randn(60, 3, 8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 4)

def model():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4))

task = Task("pictures", model, data, data, augment=CROP_AND_FLIP)
plain = Task("plain pictures", model, data, data)
"""


def pictures(folder: Path) -> Path:
    path = folder / "pictures.py"
    path.write_text(PICTURES)
    return path


def weights(folder: Path) -> torch.Tensor:
    return torch.cat(
        [tensor.flatten() for _, tensor in sorted(load_file(folder / "model.safetensors").items())]
    )


@pytest.mark.deploy
def test_all_engines_train_on_the_same_augmented_examples(tmp_path, monkeypatch):
    fork_workers(monkeypatch)
    config = RunConfig(
        task=f"{pictures(tmp_path)}:task",
        clients=4,
        participation=1.0,
        rounds=2,
        batch_size=5,
        device="cpu",
        augment=True,
        uplink="identity",
        downlink="identity",
        memory="none",
        downlink_memory="none",
    )
    ways = {"unchanged": {"engine": "serial", "augment": False}} | {
        name: {"engine": name} for name in ("serial", "batched", "processes")
    }
    for name, way in ways.items():
        simulate(replace(config, out=str(tmp_path / name), **way))
    unchanged, serial, batched, processes = (weights(tmp_path / name) for name in ways)
    for other in (batched, processes):
        torch.testing.assert_close(other, serial, rtol=1e-3, atol=1e-5)
    assert (unchanged - serial).norm() > 1e-3 * serial.norm()


def test_augmentation_in_an_election_depends_on_the_partition(tmp_path):
    config = RunConfig(
        task=f"{pictures(tmp_path)}:task",
        clients=6,
        participation=1.0,
        rounds=2,
        batch_size=5,
        lr=0.01,
        device="cpu",
        augment=True,
        strategy="election:byzantine=1",
    )
    ways = {name: {"engine": name} for name in ("serial", "batched")} | {
        "unchanged": {"engine": "serial", "augment": False}
    }
    for name, way in ways.items():
        simulate(replace(config, out=str(tmp_path / name), **way))
    serial, batched, unchanged = (weights(tmp_path / name) for name in ways)
    assert (
        (batched != serial).float().mean() < 0.01 < (unchanged != serial).float().mean()
    )  # rounding can change close votes


def test_a_task_without_augmentation_refuses_the_flag(tmp_path):
    task, run = f"{pictures(tmp_path)}:plain", tmp_path / "run"
    result = CliRunner().invoke(
        app, ["sim", "--augment", "--task", task, "--plain", "--out", str(run)]
    )
    assert (
        result.exit_code == 2
        and "task 'plain pictures' has no augmentation; leave --augment out"
        in " ".join(result.output.split())
    )
    assert not run.exists()


def test_the_invitation_of_a_server_includes_the_option():
    invitation = Invitation("run", 0, pack_options(RunConfig(augment=True)), "", "")
    assert LocalSGD.from_config(unpack_options(invitation)).augment
