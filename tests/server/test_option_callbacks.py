"""The callbacks that options add: their output agrees with the run folder, and their failures do not end a run."""

import json
import socket
import urllib.request

import pytest
from deployment import TASK
from prometheus_text import parsed

from fedcomp import RunConfig
from fedcomp.callbacks import Callback
from fedcomp.deployment.start import Endpoint, serve
from fedcomp.errors import ConfigError
from fedcomp.server.option_callbacks import with_option_callbacks
from fedcomp.sim import simulate

OPTIONS = {
    "task": TASK,
    "clients": 4,
    "rounds": 5,
    "participation": 0.5,
    "batch_size": 10,
    "engine": "serial",
    "device": "cpu",
}


class Reader(Callback):
    """A callback that reads the metrics page after each round."""

    def __init__(self):
        self.pages, self.warnings, self.address = [], [], ""

    def on_run_start(self, header):
        self.address = header.metrics

    def on_round_end(self, record):
        """Read the page. It is a round behind, because this callback is called before the page is updated."""
        if self.address:
            with urllib.request.urlopen(self.address, timeout=20) as answer:
                self.pages.append(parsed(answer.read().decode()))

    def on_warning(self, sentence):
        self.warnings.append(sentence)


def run(folder, callback=None, **options):
    return simulate(RunConfig(**OPTIONS | {"out": str(folder)} | options), callback)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_log_metrics_page_and_tensorboard_agree_with_the_run_folder(tmp_path):
    pytest.importorskip("tensorboard")
    from test_tensorboard import scalars

    reader = Reader()
    summary = run(
        tmp_path / "run", reader, log_json=str(tmp_path / "log"), metrics_port=0, tensorboard=True
    )
    stored, log = lines(tmp_path / "run" / "metrics.jsonl"), lines(tmp_path / "log")
    assert [page["fedcomp_round", ()] for page in reader.pages] == [
        0,
        1,
        2,
        3,
        4,
    ] and not reader.warnings
    assert reader.pages[-1]["fedcomp_uplink_bytes_total", ()] == sum(
        line["uplink_bytes"] for line in stored[:4]
    )
    assert [
        {k: v for k, v in line.items() if k not in ("time", "event")}
        for line in log
        if line["event"] == "round"
    ] == stored
    assert log[-1]["event"] == "finished" and log[-1]["client_updates"] == summary.client_updates
    assert all(line["by_client"] == [] for line in stored), (
        "thousands of clients a round must not fill the disk"
    )
    points = scalars(tmp_path / "run" / "tensorboard")
    assert points["accuracy"] == [
        (line["round"], pytest.approx(line["accuracy"])) for line in stored
    ]
    with pytest.raises(OSError):
        urllib.request.urlopen(reader.address, timeout=20)


def test_callbacks_do_not_change_the_model(tmp_path):
    run(tmp_path / "one")
    run(tmp_path / "two", log_json=str(tmp_path / "log"), metrics_port=0)
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert models[0] == models[1]


def test_a_resumed_run_has_callbacks_only_if_they_are_given_again(tmp_path):
    run(tmp_path / "run", log_json=str(tmp_path / "log"), rounds=2)
    before = (tmp_path / "log").read_bytes()
    run(tmp_path / "run", resume=True, rounds=3)
    assert (tmp_path / "log").read_bytes() == before
    run(tmp_path / "run", resume=True, log_json=str(tmp_path / "log"))
    log = lines(tmp_path / "log")
    assert [line["round"] for line in log if line["event"] == "round"] == [1, 2, 4, 5]
    assert [line["first_round"] for line in log if line["event"] == "started"] == [1, 4]


@pytest.mark.parametrize("start", [simulate, lambda config: serve(config, Endpoint(0))])
@pytest.mark.parametrize("option", ["metrics_port", "log_json", "tensorboard"])
def test_an_invalid_option_is_an_error_before_anything_is_written(
    tmp_path, monkeypatch, option, start
):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wrong = {
            "metrics_port": taken.getsockname()[1],
            "log_json": str(tmp_path / "absent" / "log"),
            "tensorboard": True,
        }[option]
        with pytest.raises(ConfigError, match="^--" + option.replace("_", "-")):
            start(
                RunConfig(
                    **OPTIONS | {"engine": "auto", "out": str(tmp_path / "run"), option: wrong}
                )
            )
    assert not [*tmp_path.iterdir()]


def test_if_the_disk_of_a_log_is_full_the_run_warns_and_continues(tmp_path):
    reader = Reader()
    assert run(tmp_path / "run", reader, log_json="/dev/full").rounds == 5
    assert reader.warnings == [
        "--log-json /dev/full has failed (No space left on device); the run continues without it"
    ]


def test_without_options_no_callback_is_added():
    callback = Callback()
    with with_option_callbacks(RunConfig(), callback) as alone:
        assert alone.first is callback and not alone.others and not alone.metrics


def test_a_failed_run_logs_its_error(tmp_path):
    class Fails(Callback):
        def on_round_end(self, record):
            raise ZeroDivisionError("not enough")

    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "run", Fails(), log_json=str(tmp_path / "log"))
    last = lines(tmp_path / "log")[-1]
    assert (last["event"], last["error"], last["reason"]) == (
        "failed",
        "ZeroDivisionError",
        "not enough",
    )
