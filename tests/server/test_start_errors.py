"""Errors of a deployment before the first round, which write no files, and a warning about missing keys."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from fedcomp import RunConfig, UserError
from fedcomp.callbacks import Callback
from fedcomp.deployment.start import Deployment, Endpoint
from fedcomp.keys import key_folder as keys

TINY = Path(__file__).parents[1] / "tiny_task.py"
CONFIG = RunConfig(task=f"{TINY}:task", clients=3, rounds=1)


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_port_in_use_is_an_error_before_anything_is_written(tmp_path, taken):
    with pytest.raises(UserError, match=f"port {taken} .*choose another port with --port"):
        Deployment(replace(CONFIG, out=str(tmp_path / "run")), Endpoint(taken), Callback())
    assert list(tmp_path.iterdir()) == []


def test_port_and_metrics_port_must_differ(tmp_path):
    with pytest.raises(UserError, match="--metrics-port and --port are both 18999"):
        Deployment(
            replace(CONFIG, out=str(tmp_path / "run"), metrics_port=18999),
            Endpoint(18999),
            Callback(),
        )


@pytest.mark.parametrize(("enrolled", "without"), [(3, None), (2, "client 2"), (1, "clients 1, 2")])
def test_clients_without_a_valid_key_are_warned_about(tmp_path, enrolled, without):
    keys.make(tmp_path / "keys", enrolled)
    messages = []
    watch = type(
        "Told", (Callback,), {"on_warning": lambda self, sentence: messages.append(sentence)}
    )()
    Deployment(
        replace(CONFIG, out=str(tmp_path / "run")), Endpoint(0, keys=tmp_path / "keys"), watch
    )._warn_about_missing_keys()
    assert len(messages) == (without is not None)
    if without:
        assert (
            f"{without} cannot join without a valid key; enrol new clients with fedcomp keys add --count {3 - enrolled} --keys"
            in messages[0]
        )
