"""Client states do not change in the checkpoint, after a kill, or on a full disk."""

import os
import resource
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from every_codec import layout_of, same_bits
from forks import FORKS
from small_runs import TASKS, TINY, Records, Stop, StopsAt, lines_in, model_bytes, out, rounds_of
from typer.testing import CliRunner

from fedcomp import available_memories, codec, memory
from fedcomp.cli.main import app
from fedcomp.codecs import Context
from fedcomp.config import read_run
from fedcomp.errors import CheckpointError, ConfigError
from fedcomp.memories import Memory
from fedcomp.memories.sketched import CANDIDATES, MARKS, SKETCH, VALUES
from fedcomp.server import checkpoint
from fedcomp.server.checkpoint import FILES, Checkpoint
from fedcomp.server.run_folder import CHECKPOINT
from fedcomp.sim import placement, simulate
from fedcomp.sim.clients import ClientStore
from fedcomp.sim.placement import (
    DEVICE,
    FILE,
    HOST,
    IN_MEMORY,
    Placement,
    choose_placement,
    free_memory,
)

NUMEL = 401
CODECS = (
    "stc:density=1/10",
    "fp16",
    "qsgd:levels=16@layer",
    "powersgd:rank=1",
    "sketch",
    "topk:density=1/10",
)
ON_DISK = Placement(
    FILE, 0.0
)  # without a budget, only the states of training clients are in memory
PHASES = {
    "sketched": [
        Context(phase=SKETCH),
        Context(
            phase=VALUES,
            announced={CANDIDATES: MARKS.encode((torch.arange(NUMEL) % 10 == 0).float())},
        ),
    ]
}


def make_memory(name: str) -> Memory:
    """Return an error-feedback memory with the first codec that it accepts."""
    for spec in CODECS:
        try:
            return memory(name, codec(spec), NUMEL, layout_of(NUMEL))
        except ConfigError:
            continue
    raise AssertionError(f"no codec here suits memory '{name}'")


def bounded(folder: Path, home: Placement = ON_DISK, name: str = "residual") -> ClientStore:
    store = ClientStore(lambda: make_memory(name), "v0", home)
    store.checkpoint = Checkpoint(folder)
    return store


def run_round(store: ClientStore, client: int, round: int) -> list[bytes | None]:
    """Return the frames of a client in a round, after its previous update was accepted or, every fourth time, rejected."""
    state, own = store.at(client), 1000 * client + round
    if state.memory.pending is not None:
        if (client + round) % 4:
            state.memory.commit()
        else:
            state.memory.rollback()
    generator = torch.Generator().manual_seed(own)
    x, moments = torch.randn(NUMEL, generator=generator), torch.rand(2, NUMEL, generator=generator)
    first, *more = PHASES.get(state.memory.name, [Context()])
    frames = [
        state.memory.propose(
            x, seed=own, context=replace(first, round=round, moments=(moments[0], moments[1]))
        )
    ]
    frames += [state.memory.proceed(seed=own, context=context) for context in more]
    state.version, state.ticket, state.momentum = (
        f"v{round}",
        f"{own}",
        moments[0] if client % 2 else None,
    )
    return frames


def kept(store: ClientStore, client: int) -> dict:
    state = store.at(client)
    return state.memory.state_dict() | {
        name: getattr(state, name) for name in ("version", "ticket", "committed", "momentum")
    }


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(
        same_bits(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a
    )


@pytest.mark.parametrize("name", available_memories())
def test_every_memory_has_the_same_bits_in_memory_and_in_the_checkpoint(tmp_path, name):
    """Also with a training device to which vectors are moved, for every second memory."""
    training_device = torch.device("cpu") if list(available_memories()).index(name) % 2 else None
    here, away = (
        ClientStore(lambda: make_memory(name), "v0"),
        bounded(tmp_path, Placement(FILE, 4 * 4 * NUMEL, training_device), name),
    )
    cohorts = [
        np.random.default_rng(round).choice(9, 3, replace=False).tolist() for round in range(7)
    ]
    for round, cohort in enumerate(cohorts):
        for client in cohort:
            for store in (here, away):
                store.ensure_loaded([client])
            assert run_round(here, client, round) == run_round(away, client, round)
            for store in (here, away):
                store.mark_changed([client])
        assert len(away.by_client) <= 4
        if round % 3 == 0:
            away.checkpoint.save(*away.take_changes())
    assert all(same(kept(here, client), kept(away, client)) for client in range(9))
    away.checkpoint.close()


@pytest.fixture
def in_files(monkeypatch):
    """Store every vector in its own file. Without this fixture, only vectors of at least 262,144 elements have their own file."""
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 100)


def test_without_memory_only_training_clients_are_loaded_and_vectors_are_written_once(
    tmp_path, in_files, monkeypatch
):
    written, save_file = [], checkpoint.save_file

    def counted(tensors, path):
        written.append(sum(tensor.dtype == torch.float32 for tensor in tensors.values()))
        save_file(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", counted)
    store = bounded(tmp_path)
    for round in range(3):
        for piece in ([0, 1], [2, 3], [4, 5]):
            store.ensure_loaded(piece)
            assert list(store.by_client) == piece
            for client in piece:
                run_round(store, client, round)
            store.mark_changed(piece)
        store.checkpoint.save(*store.take_changes())
    vectors = 3 * (6 + 3)  # six clients, three of which have a momentum
    assert sum(written) == vectors
    store.checkpoint.close()


def test_the_budget_holds_in_a_first_round_of_all_clients_and_after_a_restart(tmp_path):
    home = Placement(FILE, 10 * (4 * 2 * NUMEL + 4096), None, 4 * 2 * NUMEL)
    store = bounded(tmp_path, home)
    for first in range(0, 40, 2):
        store.ensure_loaded([first, first + 1])
        for client in (first, first + 1):
            run_round(store, client, 0)
        store.mark_changed([first, first + 1])
        assert len(store.by_client) <= 10
    store.checkpoint.save(*store.take_changes())
    again = ClientStore(store.make_memory, "v0", home)
    again.checkpoint = store.checkpoint
    for client in range(40):
        again.ensure_loaded([client])
        assert len(again.by_client) <= 10
    assert again.at(39).ticket == "39000"
    store.checkpoint.close()


def test_a_damaged_file_of_a_client_raises_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 100)
    store = bounded(tmp_path, Placement(FILE, 1e9))
    store.ensure_loaded([7])
    run_round(store, 7, 0)
    store.mark_changed([7])
    store.checkpoint.save(*store.take_changes())
    store.by_client.clear()
    for path in (tmp_path / FILES).iterdir():
        os.truncate(path, 20)
    with pytest.raises(CheckpointError, match="damaged"):
        store.ensure_loaded([7])
    store.checkpoint.close()


# Whole runs.

PARTS = replace(
    TINY, clients=12, engine="batched", cohort_batch=2, rounds=6
)  # a cohort is trained in three parts
VARIANTS = {
    "residual": {},
    "momentum": {"momentum": 0.9, "keep_momentum": True, "uplink": "sbc:density=10%", "lr": 0.02},
    "a counterpart": {"memory": "ef21"},
    "two phases": {"strategy": "sketched-sgd", "uplink": "sketch:rows=3,columns=10"},
    "factors": {"strategy": "powersgd:rank=1", "uplink": "powersgd:rank=1"},
    "as they come": {"strategy": "asynchronous"},
    "a Byzantine client": {"attack": "inverted:2"},
    "relays": {"relays": 2, "uplink": "identity"},
}


@pytest.fixture
def no_room(monkeypatch):
    monkeypatch.setattr(placement, "CACHE_FRACTION", 0.0)
    monkeypatch.setattr("fedcomp.sim.run.STACK_BYTES", 0)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_run_does_not_depend_on_the_placement_of_its_clients(tmp_path, no_room, variant):
    config = replace(PARTS, **variant, checkpoint_every=3)
    simulate(replace(config, out=out(tmp_path, "host"), residuals="host"))
    simulate(replace(config, out=out(tmp_path, "file"), residuals="file"))
    assert model_bytes(out(tmp_path, "host")) == model_bytes(out(tmp_path, "file"))
    assert rounds_of(out(tmp_path, "host")) == rounds_of(out(tmp_path, "file"))


def test_the_placement_is_recorded_and_shown_if_it_is_the_disk(tmp_path, no_room):
    for home in ("host", "file"):
        watched = Records()
        simulate(replace(PARTS, out=out(tmp_path, home), residuals=home), watched)
        assert read_run(tmp_path / home)["resolved"]["residuals"] == home
        assert ("checkpoint on disk" in watched.header.residuals) == (home == "file")


def test_a_stopped_run_can_continue_with_another_placement(tmp_path, no_room):
    config = replace(PARTS, checkpoint_every=3)
    simulate(replace(config, out=out(tmp_path, "whole")))
    for i, (first, then, stop) in enumerate(
        [
            ("file", "host", StopsAt(4, 1)),
            ("host", "file", StopsAt(4, 5)),
            ("file", "host", StopsAt(4, 5)),
            ("host", "file", StopsAt(5)),
        ]
    ):
        stopped = replace(config, out=out(tmp_path, f"stopped-{i}"), residuals=first)
        with pytest.raises(Stop):
            simulate(stopped, stop)
        simulate(replace(stopped, resume=True, residuals=then))
        assert model_bytes(out(tmp_path, "whole")) == model_bytes(stopped.out)
        assert rounds_of(out(tmp_path, "whole")) == rounds_of(stopped.out)


def test_a_run_that_a_full_disk_ended_can_be_resumed(tmp_path, no_room, in_files, monkeypatch):
    config = replace(PARTS, checkpoint_every=4, residuals="file")
    simulate(replace(config, out=out(tmp_path, "whole")))
    save_file = checkpoint.save_file
    for call in (6, 14):
        calls = []

        def fails(tensors, path, call=call, calls=calls):
            calls.append(path)
            if len(calls) == call:
                raise OSError(28, "No space left on device")
            save_file(tensors, path)

        monkeypatch.setattr(checkpoint, "save_file", fails)
        watched, full = Records(), replace(config, out=out(tmp_path, f"full-{call}"))
        with pytest.raises(CheckpointError, match="continue with --resume") as error:
            simulate(full, watched)
        assert error.value.exit_status == 6 and len(watched.records) < 4
        monkeypatch.setattr(checkpoint, "save_file", save_file)
        simulate(replace(full, resume=True))
        assert model_bytes(out(tmp_path, "whole")) == model_bytes(full.out)


@pytest.mark.slow
def test_a_run_killed_while_it_writes_files_can_be_resumed(
    tmp_path, no_room, in_files, monkeypatch
):
    config = replace(PARTS, checkpoint_every=3, residuals="file", out=out(tmp_path, "whole"))
    left, calls, save_file = [], [], checkpoint.save_file

    def copied(tensors, path):
        """Save a file. Sometimes copy the folder with the file truncated, as a kill would leave it."""
        calls.append(path)
        save_file(tensors, path)
        if len(calls) % 12 == 2:
            left.append(tmp_path / f"killed-{len(calls)}")
            shutil.copytree(tmp_path / "whole", left[-1])
            os.truncate(left[-1] / CHECKPOINT / FILES / path.name, 20)

    monkeypatch.setattr(checkpoint, "save_file", copied)
    simulate(config)
    monkeypatch.setattr(checkpoint, "save_file", save_file)
    assert len(left) >= 3
    for folder in left:
        simulate(replace(config, out=str(folder), resume=True))
        assert model_bytes(str(folder)) == model_bytes(config.out)
        assert rounds_of(str(folder)) == rounds_of(config.out)


PROGRAM = """
from fedcomp import RunConfig
from fedcomp.sim import placement, run, simulate
placement.CACHE_FRACTION, run.STACK_BYTES = 0.0, 0
simulate(RunConfig(task={task!r}, clients=12, participation=0.5, rounds=300, local_steps=2, lr=0.1, uplink="stc:density=10%",
                   downlink="stc:density=10%", partition="classes:1", engine="batched", cohort_batch=2, eval_every=50, residuals="file",
                   checkpoint_every=3, out={folder!r}))
"""


@pytest.mark.deploy
@pytest.mark.timeout(300)
def test_a_killed_run_with_clients_on_disk_can_be_resumed(tmp_path, no_room):
    config = replace(PARTS, rounds=36, eval_every=50, checkpoint_every=3, residuals="file")
    simulate(replace(config, out=out(tmp_path, "whole")))
    folder = tmp_path / "killed"
    process = FORKS.Process(
        target=exec, args=(PROGRAM.format(task=TINY.task, folder=str(folder)), {})
    )
    process.start()
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.exitcode is None and lines_in(folder) < 7:
        time.sleep(0.001)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL and 7 <= lines_in(folder) < 36
    simulate(replace(config, out=str(folder), resume=True))
    assert model_bytes(str(folder)) == model_bytes(out(tmp_path, "whole"))
    assert rounds_of(str(folder)) == rounds_of(out(tmp_path, "whole"))


def test_a_file_size_limit_gives_one_error_line_and_an_exit_status(tmp_path):
    config = replace(
        TINY,
        task=f"{TASKS}:wide",
        clients=12,
        rounds=4,
        local_steps=1,
        residuals="file",
        out=out(tmp_path, "run"),
    )
    names = (
        "task clients participation rounds local_steps lr uplink downlink partition residuals out"
    )
    options = [f"--{name.replace('_', '-')}={getattr(config, name)}" for name in names.split()]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        full = CliRunner().invoke(app, ["sim", *options, "--plain"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert full.exit_code == 6 and "Traceback" not in full.stderr
    assert "free disk space or make the folder writable, then continue with --resume" in " ".join(
        full.stderr.split()
    )
    simulate(replace(config, resume=True))
    simulate(replace(config, out=out(tmp_path, "whole")))
    assert model_bytes(config.out) == model_bytes(out(tmp_path, "whole"))


COHORT = """
import torch
from torch import nn

from fedcomp import Data, RunConfig, Task
from fedcomp.callbacks import Callback
from fedcomp.sim import placement, run, simulate

placement.free_memory, run.STACK_BYTES = lambda: 200_000_000, 0  # room for 56 clients
data = Data(torch.randn(1200, 100), torch.arange(1200) % 10)
task = Task("wide", lambda: nn.Sequential(nn.Linear(100, 1000), nn.ReLU(), nn.Linear(1000, 10)), lambda: data, lambda: data)


class Held(Callback):
    def on_progress(self, round: int, answered: int, asked: int) -> None:
        if answered in (100, 260):
            memory = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("RssAnon"))
            print(memory, file=open({said!r}, "a"))


simulate(RunConfig(clients=260, participation=1.0, rounds=1, local_steps=1, batch_size=2, engine="batched", cohort_batch=4,
                   uplink="stc:density=1/100", residuals="file", device="cpu", out={folder!r}), Held(), task)
"""


@pytest.mark.deploy
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_large_cohort_is_not_completely_in_memory(tmp_path):
    """The vectors of 160 clients have 71 MB and are stored on disk."""
    said = tmp_path / "said"
    program = COHORT.format(folder=str(tmp_path / "run"), said=str(said))
    process = FORKS.Process(target=exec, args=(program, {}))
    process.start()
    process.join(120)
    early, late = map(int, said.read_text().split())
    assert process.exitcode == 0 and 1024 * (late - early) < 25e6


# Placement.

CPU = torch.device("cpu")


def test_the_placement_is_chosen_by_the_free_memory(monkeypatch):
    monkeypatch.setattr(placement, "free_memory", lambda: 20 * 10**9)
    assert choose_placement("auto", CPU, 1000, 4 * 10**6) == replace(
        IN_MEMORY, client_bytes=4 * 10**6
    )
    large = choose_placement("auto", CPU, 10_000, 4 * 10**6)
    assert large == Placement(FILE, 2.5e9, None, 4 * 10**6) and "2.50 GB" in str(large)
    assert choose_placement("device", CPU, 10, 40).name == HOST and str(IN_MEMORY) == ""
    with pytest.raises(
        ConfigError, match=r"40.0 GB, but only 20.0 GB of memory are free; .*--residuals file"
    ):
        choose_placement("host", CPU, 10_000, 4 * 10**6)


def test_clients_stay_on_the_gpu_if_they_fit_and_else_move_there_for_training(
    monkeypatch,
):
    cuda = torch.device("cuda:0")
    monkeypatch.setattr(placement, "free_memory", lambda: 100 * 10**9)
    monkeypatch.setattr(
        placement.torch.cuda, "mem_get_info", lambda device: (20 * 10**9, 24 * 10**9)
    )
    assert choose_placement("auto", cuda, 1000, 4 * 10**6) == Placement(
        DEVICE, client_bytes=4 * 10**6
    )
    assert choose_placement("auto", cuda, 10_000, 4 * 10**6) == Placement(
        HOST, training_device=cuda, client_bytes=4 * 10**6
    )
    assert choose_placement("auto", cuda, 100_000, 4 * 10**6) == Placement(
        FILE, 12.5e9, cuda, 4 * 10**6
    )
    with pytest.raises(ConfigError, match=r"20.0 GB of the device.s memory are free"):
        choose_placement("device", cuda, 10_000, 4 * 10**6)


def test_a_control_group_limits_the_free_memory(monkeypatch, tmp_path):
    unbounded = free_memory()
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("4000000\n")
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 500000\n")
    monkeypatch.setattr(placement, "CGROUP", tmp_path)
    assert 0 < unbounded and free_memory() == 1_500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory() > 1_500_000
