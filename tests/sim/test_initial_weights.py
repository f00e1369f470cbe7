"""`--init` starts a run from given weights; `--memory auto` chooses the memory that suits the codec."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import TINY, Stop, StopsAt, model_bytes, out, rounds_of

from fedcomp import UserError
from fedcomp.config import read_run
from fedcomp.sim import simulate


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """Return a file with the weights of a trained model."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    simulate(replace(TINY, out=str(folder)))
    return folder / "model.safetensors"


def test_clients_download_the_weights_of_a_file_and_train_on(weights, tmp_path):
    config = replace(TINY, init=str(weights), lr=1e-30, rounds=2, out=out(tmp_path, "run"))
    simulate(config)
    start, end = load_file(weights), load_file(Path(config.out, "model.safetensors"))
    assert all(torch.allclose(end[name], start[name], atol=1e-20) for name in start)
    numel = sum(tensor.numel() for tensor in start.values())
    first = json.loads(Path(config.out, "metrics.jsonl").read_text().splitlines()[0])
    assert first["downlink_bytes"] > 4 * numel * 4  # four clients download the whole model
    assert read_run(config.out)["init"] == str(weights)


def test_a_resumed_run_does_not_need_the_file(weights, tmp_path):
    moved = tmp_path / "start.safetensors"
    moved.write_bytes(weights.read_bytes())
    config = replace(TINY, init=str(moved), out=out(tmp_path, "run"))
    whole = replace(config, out=out(tmp_path, "whole"))
    simulate(whole)
    with pytest.raises(Stop):
        simulate(config, StopsAt(2))
    moved.unlink()
    simulate(replace(config, resume=True))
    assert model_bytes(config.out) == model_bytes(whole.out)
    assert rounds_of(config.out) == rounds_of(whole.out)


def test_weights_of_another_model_are_refused(weights, tmp_path):
    tensors, path = load_file(weights), tmp_path / "start.safetensors"
    name, tensor = next(iter(tensors.items()))
    cases = {
        "has a tensor 'other' that the model lacks": tensors | {"other": tensor.clone()},
        f"has no tensor '{name}', a parameter of the model": {
            key: value for key, value in tensors.items() if key != name
        },
        f"has a tensor '{name}' of shape [3], but the model's tensor has the shape {list(tensor.shape)}": tensors
        | {name: torch.zeros(3)},
    }
    for says, content in cases.items():
        save_file(content, path)
        with pytest.raises(UserError) as caught:
            simulate(replace(TINY, init=str(path), out=out(tmp_path, "run")))
        expected = f"--init {path} {says}; give the weights of a model of this task"
        assert str(caught.value) == expected
    with pytest.raises(UserError, match="--init .*cannot be read"):
        simulate(replace(TINY, init=str(tmp_path / "gone"), out=out(tmp_path, "run")))


def test_auto_chooses_a_memory_that_suits_the_codec(tmp_path):
    for uplink, downlink, given, chosen in [
        ("stc:density=10%", "identity", {}, ("residual", "none")),
        ("qsgd:levels=4", "terngrad", {}, ("none", "none")),
        ("topk:density=10%+qsgd:levels=4", "natural", {}, ("residual", "residual")),
        ("topk:density=50%", "eden", {"memory": "ef21"}, ("ef21", "none")),
    ]:
        config = replace(TINY, rounds=1, uplink=uplink, downlink=downlink, **given)
        config = replace(config, out=out(tmp_path, uplink))
        simulate(config)
        stored = read_run(config.out)
        assert (stored["memory"], stored["downlink_memory"]) == chosen, uplink
        simulate(replace(config, rounds=2, resume=True))
