"""Runs are the same after interruptions, an error of a client rejects its reply, and an error of the user is one line."""

import gc
import json
import os
import shutil
import signal
import sqlite3
import time
from dataclasses import replace

import pytest
import torch
from federation import Federation
from forks import FORKS
from safetensors.torch import load_file
from small_runs import (
    TASKS,
    TINY,
    Records,
    Stop,
    StopsAt,
    assert_refused,
    assert_the_same_when_stopped,
    lines_in,
    model_bytes,
    out,
    rounds_of,
)

from fedcomp import RunConfig, UserError
from fedcomp.callbacks import Callback, RoundRecord
from fedcomp.config import inherited_options, read_run
from fedcomp.errors import CheckpointError
from fedcomp.messages import skips_checksums
from fedcomp.server import checkpoint
from fedcomp.sim import simulate
from fedcomp.sim.batched import BatchedEngine
from fedcomp.sim.clients import VirtualClients
from fedcomp.strategies import StrategyConfig
from fedcomp.tasks import Data
from fedcomp.training.engine import SerialEngine


@pytest.mark.parametrize("attack, expected", [(None, True), ("inverted:1", False)])
def test_messages_inside_a_process_have_no_checksums_unless_clients_attack(
    tmp_path, attack, expected
):
    skips: list[bool] = []

    class Recorded(Callback):
        def on_round_end(self, record: RoundRecord) -> None:
            skips.append(skips_checksums())

    simulate(replace(TINY, rounds=2, attack=attack, out=str(tmp_path / "run")), Recorded())
    assert skips == [expected] * 2 and not skips_checksums()


def test_a_run_writes_the_documented_files(tmp_path):
    watched = Records()
    summary = simulate(replace(TINY, out=out(tmp_path, "run")), watched)
    folder = tmp_path / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keys = """round accuracy loss train_loss cohort accepted rejected uplink_bytes downlink_bytes dense_uplink_bytes
              dense_downlink_bytes seconds"""
    assert all(set(keys.split()) <= set(line) for line in lines)
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5, 6]
    stored = json.loads((folder / "summary.json").read_text())
    keys = """accuracy loss uplink_bytes downlink_bytes dense_uplink_bytes dense_downlink_bytes rounds clients client_updates seconds
              client_updates_per_s device seed version wire_bytes_in wire_bytes_out warnings rejections"""
    assert set(stored) == set(keys.split())
    assert stored | {
        "simulated_hours": None,
        "metrics": {},
        "client_metrics": {},
    } == summary.__dict__ | {"warnings": list(summary.warnings), "rejections": []}
    assert stored["uplink_bytes"] == sum(line["uplink_bytes"] for line in lines)
    assert stored["client_updates"] == 24 and stored["accuracy"] == lines[-1]["accuracy"]
    config = read_run(folder)
    assert config["clients"] == 8 and config["resolved"]["engine"] == "batched"
    assert {
        name: tuple(t.shape) for name, t in load_file(folder / "model.safetensors").items()
    } == {"0.weight": (8, 2), "0.bias": (8,), "2.weight": (2, 8), "2.bias": (2,)}
    assert watched.summary == summary


def test_the_tiny_task_is_learned_with_compression_in_both_directions(tmp_path):
    summary = simulate(replace(TINY, rounds=20, out=out(tmp_path, "run")))
    assert summary.accuracy > 0.85
    assert summary.dense_uplink_bytes / summary.uplink_bytes > 6


def test_equal_seeds_give_equal_runs_and_other_seeds_other_runs(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        simulate(replace(TINY, seed=seed, out=out(tmp_path, name)))
    assert (
        model_bytes(out(tmp_path, "a"))
        == model_bytes(out(tmp_path, "b"))
        != model_bytes(out(tmp_path, "c"))
    )
    assert rounds_of(out(tmp_path, "a")) == rounds_of(out(tmp_path, "b"))


@pytest.mark.parametrize(
    ("stop", "every"),
    [(StopsAt(1, 1), 1), (StopsAt(3, 2), 1), (StopsAt(3, 4), 4), (StopsAt(5), 4)],
)
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(tmp_path, stop, every):
    config = replace(TINY, checkpoint_every=every)
    assert_the_same_when_stopped(tmp_path, config, stop)


@pytest.mark.parametrize(("memory", "call"), [("residual", 5), ("none", 8), ("residual", 11)])
def test_after_a_failed_checkpoint_a_run_can_be_resumed(tmp_path, monkeypatch, call, memory):
    config = replace(TINY, memory=memory, checkpoint_every=1)
    simulate(replace(config, out=out(tmp_path, "whole")))
    calls, save_file = [], checkpoint.save_file

    def fails_once(tensors, path):
        calls.append(path)
        if len(calls) == call:
            raise OSError(28, "No space left on device")
        save_file(tensors, path)

    monkeypatch.setattr(checkpoint, "FILE_BYTES", 100)  # so that each vector has its own file
    monkeypatch.setattr(checkpoint, "save_file", fails_once)
    with pytest.raises(CheckpointError):
        simulate(replace(config, out=out(tmp_path, "stopped")))
    monkeypatch.undo()
    simulate(replace(config, out=out(tmp_path, "stopped"), resume=True))
    assert model_bytes(out(tmp_path, "whole")) == model_bytes(out(tmp_path, "stopped"))
    assert rounds_of(out(tmp_path, "whole")) == rounds_of(out(tmp_path, "stopped"))


@pytest.mark.deploy
def test_a_run_killed_repeatedly_equals_an_uninterrupted_one(tmp_path):
    config = replace(TINY, rounds=70, eval_every=30)
    simulate(replace(config, out=out(tmp_path, "whole")))
    folder = tmp_path / "killed"

    def go_on() -> RunConfig:
        return RunConfig(**inherited_options(folder), out=str(folder), resume=True)

    kills = 0
    for after in (4, 14, 28):
        process = FORKS.Process(
            target=simulate, args=(go_on() if kills else replace(config, out=str(folder)),)
        )
        process.start()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.exitcode is None and lines_in(folder) < after:
            time.sleep(0.001)
        process.kill()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
    assert kills == 3
    simulate(go_on())
    assert model_bytes(str(folder)) == model_bytes(out(tmp_path, "whole"))
    assert rounds_of(str(folder)) == rounds_of(out(tmp_path, "whole"))


def test_a_finished_run_can_be_continued_with_more_rounds(tmp_path):
    simulate(replace(TINY, rounds=9, out=out(tmp_path, "whole")))
    simulate(replace(TINY, rounds=4, out=out(tmp_path, "extended")))
    summary = simulate(replace(TINY, rounds=9, out=out(tmp_path, "extended"), resume=True))
    assert summary.rounds == 9
    assert model_bytes(out(tmp_path, "whole")) == model_bytes(out(tmp_path, "extended"))


def test_resuming_a_finished_run_does_not_change_it(tmp_path):
    simulate(replace(TINY, out=out(tmp_path, "run")))
    before = model_bytes(out(tmp_path, "run")), rounds_of(out(tmp_path, "run"))
    simulate(replace(TINY, out=out(tmp_path, "run"), resume=True))
    assert (model_bytes(out(tmp_path, "run")), rounds_of(out(tmp_path, "run"))) == before


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_virtual_and_real_clients_compute_the_same_model(tmp_path, engine):
    rules = StrategyConfig(
        participation=0.5, uplink="stc:density=10%", downlink="stc:density=10%", seed=5
    )
    federation = Federation(rules, clients=8)
    federation.use_partition()
    list(federation.loop.rounds(range(1, 7)))
    simulate(
        replace(
            TINY, engine=engine, partition="iid", batch_size=10, seed=5, out=out(tmp_path, "run")
        )
    )
    federation.assert_same_model(tmp_path / "run", 0 if engine == "serial" else 1e-6)


@pytest.mark.slow
def test_virtual_clients_that_missed_rounds_download_the_same_as_real_ones(tmp_path):
    """Virtual clients have one copy of the model. After one has downloaded the dense model, the copy is newer than the others expect."""
    rules = StrategyConfig(
        participation=0.15, uplink="stc:density=10%", downlink="stc:density=10%", seed=5
    )
    federation = Federation(rules, clients=40)
    federation.use_partition()
    outcomes = list(federation.loop.rounds(range(1, 31)))
    simulate(
        replace(
            TINY,
            clients=40,
            participation=0.15,
            rounds=30,
            engine="serial",
            partition="iid",
            batch_size=10,
            seed=5,
            out=out(tmp_path, "run"),
        )
    )
    records = rounds_of(out(tmp_path, "run"))
    assert [record["downlink_bytes"] for record in records] == [
        sum(outcome.traffic.downlink.values()) for outcome in outcomes
    ]
    assert [record["uplink_bytes"] for record in records] == [
        sum(outcome.traffic.uplink.values()) for outcome in outcomes
    ]


def test_both_engines_compute_the_same_model(tmp_path):
    for engine in ("serial", "batched"):
        simulate(
            replace(
                TINY,
                engine=engine,
                uplink="identity",
                downlink="identity",
                out=out(tmp_path, engine),
            )
        )
    serial, batched = (
        load_file(tmp_path / engine / "model.safetensors") for engine in ("serial", "batched")
    )
    for name in serial:
        torch.testing.assert_close(serial[name], batched[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_a_client_whose_update_is_nan_is_rejected_and_the_run_continues(tmp_path, engine):
    watched = Records()
    config = replace(
        TINY,
        task=f"{TASKS}:one_is_nan",
        participation=1.0,
        partition="iid",
        engine=engine,
        local_epochs=1,
    )
    simulate(replace(config, out=out(tmp_path, "run")), watched)
    assert all(r.rejected == 1 and r.accepted == 7 for r in watched.records)
    (rejection,) = watched.records[-1].rejections
    assert rejection.stage == "encode"
    assert "this client's training data contains NaN" in rejection.reason
    assert rounds_of(out(tmp_path, "run"))[-1]["rejections"][0]["client"] == rejection.client


@pytest.mark.parametrize("task", ["one_raises", "one_asserts"])
def test_only_the_client_whose_training_raises_is_rejected(tmp_path, task):
    watched = Records()
    config = replace(
        TINY,
        task=f"{TASKS}:{task}",
        participation=1.0,
        partition="iid",
        engine="serial",
        local_epochs=1,
    )
    simulate(replace(config, out=out(tmp_path, "run")), watched)
    assert all(r.rejected == 1 and r.accepted == 7 for r in watched.records)
    assert {r.rejections[0].stage for r in watched.records} == {"train"} and watched.records[
        0
    ].rejections[0].reason


def test_if_a_stack_fails_its_clients_are_trained_one_by_one(tmp_path, monkeypatch):
    train, watched = BatchedEngine.train_together, Records()

    def fails_with_example_7(self, start, data, jobs, *given):
        if any(7 in batch for job in jobs for batch in job.batches):
            raise RuntimeError("example 7 is unreadable")
        return train(self, start, data, jobs, *given)

    monkeypatch.setattr(BatchedEngine, "train_together", fails_with_example_7)
    simulate(replace(TINY, participation=1.0, local_epochs=1, out=out(tmp_path, "run")), watched)
    assert all(r.rejected == 1 and r.accepted == 7 for r in watched.records)
    assert "example 7" in watched.records[0].rejections[0].reason


def test_a_run_without_compression_sends_dense_bytes_and_headers(tmp_path):
    summary = simulate(
        replace(
            TINY,
            uplink="identity",
            downlink="identity",
            participation=1.0,
            out=out(tmp_path, "run"),
        )
    )
    frames = 6 * 8
    assert summary.uplink_bytes == summary.dense_uplink_bytes + frames * 10
    assert summary.downlink_bytes == 5 * 8 * (4 * 42 + 10)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"uplink": "stk"}, "did you mean 'stc'"),
        ({"uplink": "stc:densty=1%"}, "did you mean 'density'"),
        ({"downlink": "topk:density=0"}, "density"),
        ({"uplink": "topk:density=1.5"}, "density"),
        ({"memory": "residuals"}, "did you mean 'residual'"),
        ({"strategy": "mean"}, "known: asynchronous, average"),
        ({"partition": "class:2"}, "did you mean 'classes'"),
        ({"attack": "invert:3"}, "did you mean 'inverted'"),
        ({"attack": "inverted:9"}, "--clients is 8"),
        ({"attack": "code-aware:2"}, "allocation matrix"),
        ({"task": "digit"}, "did you mean 'digits'"),
        ({"task": "nowhere.py:task"}, "nowhere.py"),
        ({"device": "tpu"}, "--device"),
        ({"clients": 1000}, "--clients"),
        ({"task": "mnist-logreg", "data": "/no/such/folder"}, "--data"),
    ],
)
def test_errors_in_options_are_raised_before_anything_is_written(tmp_path, change, says):
    assert_refused(tmp_path, replace(TINY, **change), says)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_cuda_without_a_gpu_is_refused(tmp_path):
    with pytest.raises(UserError, match="--device cpu"):
        simulate(replace(TINY, device="cuda", out=out(tmp_path, "run")))


def test_an_existing_run_folder_is_not_overwritten(tmp_path):
    simulate(replace(TINY, rounds=1, out=out(tmp_path, "run")))
    before = model_bytes(out(tmp_path, "run"))
    with pytest.raises(UserError, match="--resume"):
        simulate(replace(TINY, rounds=1, out=out(tmp_path, "run")))
    assert model_bytes(out(tmp_path, "run")) == before


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path):
    simulate(replace(TINY, rounds=1, out=out(tmp_path, "run")))
    with pytest.raises(UserError, match=r"--lr differs from .* \(there 0.1, now 0.2\)"):
        simulate(replace(TINY, rounds=2, lr=0.2, out=out(tmp_path, "run"), resume=True))


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    source = TASKS.read_text()
    task = tmp_path / "changing.py"
    task.write_text(source)
    config = replace(TINY, task=f"{task}:task", rounds=1, out=out(tmp_path, "run"))
    simulate(config)
    task.write_text(
        source.replace("nn.Linear(2, 8)", "nn.Linear(2, 10)").replace(
            "nn.Linear(8, 2)", "nn.Linear(10, 2)"
        )
    )
    with pytest.raises(UserError, match="another model"):
        simulate(replace(config, rounds=2, resume=True))


def test_a_checkpoint_of_other_examples_is_refused(tmp_path):
    source = TASKS.read_text()
    task = tmp_path / "changing.py"
    task.write_text(source)
    config = replace(TINY, task=f"{task}:task", rounds=1, partition="iid", out=out(tmp_path, "run"))
    simulate(config)
    task.write_text(source.replace("torch.arange(examples) % 2", "torch.arange(examples) // 2 % 2"))
    with pytest.raises(UserError, match="other examples"):
        simulate(replace(config, rounds=2, resume=True))


def test_fewer_rounds_than_finished_ones_are_refused(tmp_path):
    simulate(replace(TINY, rounds=4, out=out(tmp_path, "run")))
    with pytest.raises(UserError, match="--rounds 4 or more"):
        simulate(replace(TINY, rounds=2, out=out(tmp_path, "run"), resume=True))
    assert read_run(tmp_path / "run")["rounds"] == 4


def test_a_run_with_a_deleted_checkpoint_is_not_started_again(tmp_path):
    simulate(replace(TINY, rounds=2, out=out(tmp_path, "run")))
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        simulate(replace(TINY, rounds=4, out=out(tmp_path, "run"), resume=True))
    assert len(rounds_of(out(tmp_path, "run"))) == 2


def test_damaged_metrics_raise_an_error_before_the_first_round(tmp_path):
    simulate(replace(TINY, rounds=3, out=out(tmp_path, "run")))
    path = tmp_path / "run" / "metrics.jsonl"
    text = path.read_text()
    for damaged in ("", text[:-50], "{}\n" + text):
        path.write_text(damaged)
        with pytest.raises(UserError, match="metrics.jsonl is damaged"):
            simulate(replace(TINY, rounds=6, out=out(tmp_path, "run"), resume=True))


def test_a_damaged_engine_choice_in_the_config_raises_an_error(tmp_path):
    simulate(replace(TINY, rounds=1, out=out(tmp_path, "run")))
    path = tmp_path / "run" / "config.toml"
    options = path.read_text().split("[resolved]")[0]
    for values in ("", 'engine = "serial"\n', 'device = "cpu"\nengine = "foo"\nat_once = 1\n'):
        path.write_text(f"{options}[resolved]\n{values}")
        with pytest.raises(UserError, match="resolved"):
            simulate(replace(TINY, rounds=2, out=out(tmp_path, "run"), resume=True))


def test_a_run_is_not_resumed_on_another_type_of_device(tmp_path):
    simulate(replace(TINY, rounds=1, device="cpu", out=out(tmp_path, "run")))
    path = tmp_path / "run" / "config.toml"
    text = path.read_text()
    path.write_text(
        text.split("[resolved]")[0]
        + '[resolved]\ndevice = "cuda:0 (a GPU)"\nengine = "batched"\nat_once = 9\n'
    )
    with pytest.raises(UserError, match="give the same --device as before"):
        simulate(replace(TINY, rounds=2, device="cpu", out=out(tmp_path, "run"), resume=True))


@pytest.mark.parametrize("name", ["run", "server/1", "client/1"])
def test_a_checkpoint_with_damaged_values_raises_an_error(tmp_path, name):
    config = replace(TINY, rounds=2, participation=1.0, out=out(tmp_path, "run"))
    simulate(config)
    with sqlite3.connect(tmp_path / "run" / "checkpoint" / "state.sqlite") as state:
        state.execute("UPDATE entry SET data = ? WHERE name = ?", (b"[1", name))
    state.close()
    with pytest.raises(CheckpointError, match="damaged"):
        simulate(replace(config, rounds=3, resume=True))


class Nested(Callback):
    """A callback that starts a second run in the folder of the first."""

    def __init__(self, config: RunConfig):
        self.config, self.error = config, None

    def on_round_end(self, record: RoundRecord) -> None:
        with pytest.raises(UserError) as self.error:
            simulate(replace(self.config, resume=True))


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    config = replace(TINY, rounds=1, out=out(tmp_path, "run"))
    nested = Nested(config)
    simulate(config, nested)
    assert "another process" in str(nested.error.value)


class CtrlC(Callback):
    """A callback that sends Ctrl-C during a round."""

    def __init__(self, round: int):
        self.round = round

    def on_progress(self, round: int, answered: int, cohort: int) -> None:
        if (round, answered) == (self.round, 1):
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_finishes_and_saves_the_round(tmp_path):
    config = replace(TINY, rounds=8, checkpoint_every=100)
    simulate(replace(config, out=out(tmp_path, "whole")))
    stopped = replace(config, out=out(tmp_path, "stopped"))
    with pytest.raises(KeyboardInterrupt):
        simulate(stopped, CtrlC(3))
    assert len(rounds_of(out(tmp_path, "stopped"))) == 3
    header = []
    watching = Callback()
    watching.on_run_start = header.append
    simulate(replace(stopped, resume=True), watching)
    assert header[0].first_round == 4
    assert model_bytes(out(tmp_path, "whole")) == model_bytes(out(tmp_path, "stopped"))


def test_a_run_ended_by_an_error_of_a_callback_loses_no_round(tmp_path):
    simulate(replace(TINY, out=out(tmp_path, "whole")))
    stopped = replace(TINY, out=out(tmp_path, "stopped"))
    assert stopped.checkpoint_every == "auto"
    watched = Records()
    with pytest.raises(Stop):
        simulate(stopped, StopsAt(5))
    simulate(replace(stopped, resume=True), watched)
    assert watched.records[0].round == 6
    assert model_bytes(out(tmp_path, "whole")) == model_bytes(out(tmp_path, "stopped"))


def test_a_model_that_cannot_be_mapped_is_trained_by_the_serial_engine(tmp_path):
    config = replace(TINY, task=f"{TASKS}:unmappable", rounds=2, out=out(tmp_path, "run"))
    watched = Records()
    simulate(config, watched)
    assert read_run(tmp_path / "run")["resolved"]["engine"] == "serial"
    said = [sentence for record in watched.records for sentence in record.warnings]
    assert (
        len(said) == 1
        and "'unmappable' cannot be trained by the batched engine" in said[0]
        and said[0].endswith("the engine is serial instead")
    )
    with pytest.raises(UserError, match="--engine serial"):
        simulate(replace(config, engine="batched", out=out(tmp_path, "other")))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("partition", ["iid", "natural"])
def test_a_loss_that_branches_only_on_large_batches_is_trained_serially(tmp_path, partition):
    """The first client has too few examples to reach the branch. The trial of the engine uses the client with the most examples."""
    config = replace(TINY, task=f"{TASKS}:mined", partition=partition, participation=1.0, rounds=4)
    watched = Records()
    simulate(replace(config, out=out(tmp_path, "whole")), watched)
    assert (
        watched.header.engine.startswith("serial")
        and read_run(tmp_path / "whole")["resolved"]["engine"] == "serial"
    )
    said = [
        sentence
        for record in watched.records
        for sentence in record.warnings
        if "cannot be trained by the batched engine" in sentence
    ]
    assert said == [
        "the model of task 'mined' cannot be trained by the batched engine: its forward pass or loss depends on the values of "
        "tensors (.item(), or an if statement on a tensor); the engine is serial instead"
    ]
    assert all(record.accepted == 8 for record in watched.records)


def test_a_run_without_accepted_updates_warns(tmp_path):
    sentences = []
    watching = Callback()
    watching.on_warning = sentences.append
    simulate(replace(TINY, lr=1e30, rounds=2, out=out(tmp_path, "run")), watching)
    assert any("no client's update was accepted" in sentence for sentence in sentences)


def test_resume_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="contains no run"):
        simulate(replace(TINY, out=out(tmp_path, "run"), resume=True))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_run_folder_that_cannot_be_written_raises_an_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot be written"):
        simulate(replace(TINY, out=out(tmp_path, "run")))


@pytest.mark.slow
def test_a_finished_run_is_freed_without_the_garbage_collector(tmp_path):
    simulate(replace(TINY, out=out(tmp_path, "first")))  # loads objects that stay in memory
    kinds = (VirtualClients, Data, SerialEngine, BatchedEngine)
    gc.collect()
    before = {id(each) for each in gc.get_objects() if type(each) in kinds}
    gc.disable()
    try:
        simulate(replace(TINY, out=out(tmp_path, "second")))
        left = [
            type(each).__name__
            for each in gc.get_objects()
            if type(each) in kinds and id(each) not in before
        ]
    finally:
        gc.enable()
    assert not left
