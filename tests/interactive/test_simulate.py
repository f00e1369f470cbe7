"""`fedcomp.simulate`: tasks as objects, options as Python values, and runs that are loaded and resumed."""

import asyncio
import dataclasses
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedcomp
from fedcomp.callbacks import Callback
from fedcomp.errors import ConfigError, RunFolderError, TaskError
from fedcomp.interactive import call
from fedcomp.interactive.call import run_config
from fedcomp.run_display import LineDisplay
from fedcomp.sim import simulate as run_of

FILE = f"{Path(__file__).parents[1] / 'tiny_task.py'}:task"
X = np.random.default_rng(0).normal(size=(240, 4))
Y = (X.sum(1) > 0).astype(np.int32)
SMALL = {
    "clients": 6,
    "rounds": 3,
    "participation": 0.5,
    "lr": 0.2,
    "uplink": "stc:density=25%",
    "progress": False,
}


class Linear(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)


MINE = fedcomp.Task("mine", Linear, train=(X, Y), test=(X[:50], Y[:50]))


@pytest.mark.slow
def test_a_run_of_a_task_object_is_loaded_with_its_own_module(tmp_path):
    run = fedcomp.simulate(MINE, out=tmp_path / "run", **SMALL)
    assert isinstance(run, fedcomp.Run) and run.folder == tmp_path / "run"
    model = run.model()
    assert type(model) is Linear and not model.training
    right = (model(torch.tensor(X[:50], dtype=torch.float32)).argmax(1).numpy() == Y[:50]).mean()
    assert run.metrics["accuracy"][-1] == pytest.approx(right) and len(run.metrics["accuracy"]) == 3
    assert run.options["task"] == "object:mine" and run.resolved["engine"] in ("serial", "batched")


def test_a_loaded_run_of_a_task_object_needs_the_object_again(tmp_path):
    out, trained = tmp_path / "run", fedcomp.simulate(MINE, out=tmp_path / "run", **SMALL).model()
    run = fedcomp.load(out)
    with pytest.raises(
        TaskError,
        match=r"the task 'mine' is an object of a Python program; .* run.model\(task\)",
    ):
        run.model()
    assert all(
        torch.equal(a, b)
        for a, b in zip(run.model(MINE).parameters(), trained.parameters(), strict=True)
    )
    for model, says in (
        (
            lambda: nn.Linear(5, 2),
            r"has a tensor 'weight' of shape \[2, 4\], but the model's tensor has the shape \[2, 5\]",
        ),
        (lambda: nn.Sequential(nn.Linear(4, 2)), "has no tensor '0.weight'"),
    ):
        with pytest.raises(RunFolderError, match=says):
            run.model(dataclasses.replace(MINE, model=model))


def test_a_run_of_a_named_task_equals_that_of_the_command(tmp_path):
    run = fedcomp.simulate(FILE, out=tmp_path / "called", **SMALL)
    options = {name: value for name, value in SMALL.items() if name != "progress"}
    run_of(fedcomp.RunConfig(task=FILE, out=str(tmp_path / "commanded"), **options))
    same = ("model.safetensors",)
    assert all(
        (tmp_path / "called" / name).read_bytes() == (tmp_path / "commanded" / name).read_bytes()
        for name in same
    )
    assert (
        run.metrics["uplink_bytes"].tolist()
        == fedcomp.load(tmp_path / "commanded").metrics["uplink_bytes"].tolist()
    )
    assert isinstance(run.model(), nn.Module)


def test_a_resumed_run_ends_with_the_same_bytes(tmp_path):
    whole = fedcomp.simulate(MINE, out=tmp_path / "whole", **SMALL | {"rounds": 5})
    fedcomp.simulate(MINE, out=tmp_path / "parts", **SMALL)
    run = fedcomp.simulate(MINE, out=tmp_path / "parts", resume=True, rounds=5, progress=False)
    assert run.metrics["uplink_bytes"].tolist() == whole.metrics["uplink_bytes"].tolist()
    assert (run.folder / "model.safetensors").read_bytes() == (
        whole.folder / "model.safetensors"
    ).read_bytes()
    with pytest.raises(RunFolderError, match="was started with another model"):
        fedcomp.simulate(
            dataclasses.replace(MINE, model=lambda: nn.Linear(4, 3)),
            out=run.folder,
            resume=True,
            rounds=6,
            progress=False,
        )
    with pytest.raises(
        RunFolderError, match=r"--task differs from .* \(there object:mine, now object:yours\)"
    ):
        fedcomp.simulate(
            dataclasses.replace(MINE, name="yours"), out=run.folder, resume=True, progress=False
        )


class Stop(Callback):
    def on_round_end(self, record):
        if record.round == 2:
            signal.raise_signal(signal.SIGINT)


def test_the_message_of_an_interruption_names_the_command_to_continue(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(
        KeyboardInterrupt,
        match=r"interrupted .*; continue with: fedcomp.simulate\(task, out='.*', resume=True\)$",
    ):
        fedcomp.simulate(MINE, out=out, **SMALL | {"progress": Stop()})
    run = fedcomp.simulate(MINE, out=out, resume=True, progress=False)
    assert run.metrics["round"].tolist() == [1, 2, 3] and run.summary is not None
    assert (out / "model.safetensors").read_bytes() == (
        fedcomp.simulate(MINE, out=tmp_path / "x", **SMALL).folder / "model.safetensors"
    ).read_bytes()


def test_simulate_works_inside_a_running_event_loop(tmp_path):
    async def cell():
        return fedcomp.simulate(MINE, out=tmp_path / "run", **SMALL)

    assert len(asyncio.run(cell()).records) == 3


def test_runs_in_threads_wait_for_each_other_and_give_the_same_results(tmp_path):
    runs = {}

    def run(name):
        runs[name] = fedcomp.simulate(MINE, out=tmp_path / name, **SMALL)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run("c")
    assert len({(run.folder / "model.safetensors").read_bytes() for run in runs.values()}) == 1


def test_a_process_forked_during_a_run_can_simulate(tmp_path):
    begun, forked = threading.Event(), threading.Event()

    class Holding(Callback):
        def on_round_end(self, record):
            begun.set()
            forked.wait(60)

    thread = threading.Thread(
        target=lambda: fedcomp.simulate(
            MINE, out=tmp_path / "parent", **SMALL | {"progress": Holding()}
        )
    )
    thread.start()
    try:
        assert begun.wait(60)
        child = os.fork()
        if not child:
            os._exit(not call._RUN_LOCK.acquire(timeout=5))
        assert os.waitpid(child, 0)[1] == 0
    finally:
        forked.set()
        thread.join()


def test_an_accuracy_outside_of_0_to_1_ends_the_run(tmp_path):
    counts = dataclasses.replace(
        MINE,
        accuracy=lambda outputs, targets: (outputs.argmax(1) == targets).sum() * (len(targets) > 2),
    )
    with pytest.raises(
        TaskError,
        match="'mine': accuracy.* on the test data; make it return a fraction .* --resume",
    ):
        fedcomp.simulate(counts, out=tmp_path / "run", **SMALL)


def test_runs_started_in_the_same_second_have_different_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = dataclasses.replace(MINE, name="../a task")
    folders = {fedcomp.simulate(task, **SMALL).folder for _ in range(2)}
    assert len(folders) == 2 and all(
        folder.parent == Path("runs") and folder.name.startswith("a-task-") for folder in folders
    )


@pytest.mark.parametrize("engine", ["processes", "ray"])
def test_task_objects_are_refused_with_worker_processes(tmp_path, engine):
    with pytest.raises(
        ConfigError, match=f"--engine {engine} .* the task object 'mine'; put the task into a file"
    ):
        fedcomp.simulate(MINE, out=tmp_path / "run", engine=engine, **SMALL)
    assert not (tmp_path / "run").exists()


def test_options_accept_python_values():
    config = run_config(
        "digits",
        {
            "uplink": fedcomp.codec("topk:density=1%+qsgd:levels=4"),
            "lr": np.float32(0.5),
            "clients": np.int64(7),
            "rounds": 1e2,
            "participation": "1/4",
            "out": Path("runs") / "x",
            "device": torch.device("cpu"),
            "budget": 200_000,
            "seed": torch.tensor(3),
            "bandwidths": [1e5, "1MB"],
            "local_steps": "8",
            "augment": np.True_,
            "momentum": 0,
            "network": None,
        },
    )
    assert fedcomp.codec(config.uplink) == fedcomp.codec("topk:density=1%+qsgd:levels=4")
    assert (config.lr, config.clients, config.rounds, config.participation, config.out) == (
        0.5,
        7,
        100,
        0.25,
        "runs/x",
    )
    assert (config.device, config.budget, config.seed, config.bandwidths) == (
        "cpu",
        "200000",
        3,
        "100000,1MB",
    )
    assert (config.local_steps, config.augment, config.momentum, config.network, config.task) == (
        8,
        True,
        0,
        None,
        "digits",
    )
    assert run_config(None, {}) == fedcomp.RunConfig()


def test_every_option_is_an_argument():
    import inspect

    parameters = inspect.signature(fedcomp.simulate).parameters
    assert list(parameters)[:2] == ["task", "progress"]
    assert {f.name for f in dataclasses.fields(fedcomp.RunConfig)} == parameters.keys() - {
        "progress"
    }


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"client": 3}, "simulate has no option 'client'; did you mean 'clients'?"),
        ({"learning_rate": 3}, "simulate has no option 'learning_rate'; did you mean 'lr'?"),
        ({"num_workers": 3}, "simulate has no option 'num_workers'; see help(fedcomp.simulate)"),
        (
            {"uplink": ["stc", "topk"]},
            "uplink has 2 values, but a run takes only one; call simulate once for each",
        ),
        ({"rounds": 2.5}, "--rounds is 2.5, of type float; give a value of type int"),
        ({"lr": "fast"}, "lr cannot be 'fast'"),
        ({"uplink": object()}, "--uplink is <object"),
        ({"clients": 0}, "--clients is 0; give at least 1"),
        ({"local_steps": 3, "local_epochs": 1}, "local_steps and local_epochs exclude each other"),
        ({"progress": "yes"}, "progress is a str; give None, False"),
        ({"uplink": "stk"}, "unknown codec 'stk'"),
        ({"resume": True}, "--resume needs --out"),
    ],
)
def test_user_errors_are_exceptions_of_one_sentence(tmp_path, monkeypatch, given, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(fedcomp.UserError) as caught:
        fedcomp.simulate(MINE, **{"progress": False} | given)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_function_is_not_accepted_as_a_task():
    with pytest.raises(fedcomp.UserError, match="task is a function; give the Task that it"):
        fedcomp.simulate(lambda folder: MINE, progress=False)


def test_a_callback_of_the_user_is_called(tmp_path, capsys):
    fedcomp.simulate(MINE, out=tmp_path / "run", **SMALL | {"progress": LineDisplay()})
    assert "stc:density=0.25" in capsys.readouterr().out


def test_the_options_of_a_run_can_be_used_for_another_run(tmp_path):
    run = fedcomp.simulate(FILE, out=tmp_path / "a", **SMALL)
    other = fedcomp.simulate(**run.options | {"out": tmp_path / "b", "seed": 1}, progress=False)
    assert other.config == dataclasses.replace(run.config, out=str(tmp_path / "b"), seed=1)
