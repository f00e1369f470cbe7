"""A real run on Flower's Ray engine: the serial one's to the bit, though it was interrupted and its actors were killed; and quiet."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedcomp import RunConfig
from fedcomp.errors import ConfigError
from fedcomp.sim import ray_engine, simulate

pytestmark = [pytest.mark.slow, pytest.mark.deploy]

TINY = Path(__file__).parents[1] / "tiny_task.py"
DEADLY = Path(__file__).parents[1] / "deadly_task.py"
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(str(Path(__file__).resolve().parents[i]) for i in (1, 2)),
    "OMP_NUM_THREADS": "1",
}
NEVER = 10**9  # steps
LOOPBACK = {
    "0100007F",
    "0000000000000000FFFF00000100007F",
    "00000000000000000000000001000000",
}  # as /proc writes it
RUN = RunConfig(
    task=f"{DEADLY}:task",
    clients=8,
    participation=0.5,
    local_steps=2,
    lr=0.1,
    uplink="stc:density=10%",
    downlink="stc:density=10%",
    partition="classes:1",
    engine="ray",
    rounds=100_000,
    plain=True,
)

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed; pip install 'fedcomp[ray]' brings the version that Flower needs",
)


@contextmanager
def running(folder: Path, **variables: str) -> Iterator[subprocess.Popen]:
    """The run in `folder`/ray, with two actors where there are as many cores."""
    flags = [
        "task",
        "clients",
        "participation",
        "local_steps",
        "lr",
        "uplink",
        "downlink",
        "partition",
        "engine",
        "rounds",
    ]
    given = [
        word for name in flags for word in (f"--{name.replace('_', '-')}", str(getattr(RUN, name)))
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "fedcomp", "sim", *given, "--plain", "--out", "ray"],
        cwd=folder,
        env=ENVIRONMENT | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2]),
    ) as run:
        try:
            yield run
        finally:
            run.kill()


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def descendants(process: int) -> Iterator[int]:
    """Of a process, those that are there now."""
    for tasks in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            for child in map(int, tasks.read_text().split()):
                yield child
                yield from descendants(child)


def listening(processes: list[int]) -> set[str]:
    """The addresses, in hexadecimal, of TCP sockets on which these wait for connections."""
    inodes = set()
    for process in processes:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            for file in list(Path(f"/proc/{process}/fd").iterdir()):
                with suppress(FileNotFoundError):
                    inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(file)))
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


def rounds_of(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


@needs_ray
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
@pytest.mark.timeout(600)
def test_a_run_is_the_serial_one_though_its_actors_died_and_it_was_interrupted(
    tmp_path, monkeypatch
):
    with running(
        tmp_path, KILL_AT="12"
    ) as run:  # two actors make four steps a round each: all have died once after the fourth
        heard = []
        while not heard or not re.match(r" +5 ", heard[-1]):
            heard.append(run.stdout.readline())
            assert heard[-1], run.stderr.read()
        started = list(descendants(run.pid))
        addresses = listening([run.pid, *started])
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does
        _, said = run.communicate(timeout=300)
    assert run.returncode == 130
    done = int(
        re.fullmatch(
            r"fedcomp: interrupted after round (\d+) of 100000; continue with: fedcomp sim .*\n",
            said,
        )[1]
    )
    assert re.search(
        r" ray, \d+ actors?$", next(line for line in heard if line.startswith("engine"))
    )
    assert len(started) > 3 and addresses and addresses <= LOOPBACK
    until = time.monotonic() + 120
    while left := [process for process in started if Path(f"/proc/{process}").exists()]:
        assert time.monotonic() < until, f"{left} are left"
        time.sleep(0.1)

    monkeypatch.setenv("KILL_AT", str(NEVER))
    ray, serial, serially = (
        tmp_path / "ray",
        tmp_path / "serial",
        replace(RUN, engine="serial", rounds=done + 1),
    )
    assert not any(line["rejected"] for line in rounds_of(ray))
    with one_thread():
        simulate(replace(serially, out=str(serial)))
        assert rounds_of(ray) == rounds_of(serial)[:done]
        (ray / "config.toml").write_text(
            (ray / "config.toml").read_text().replace('engine = "ray"', 'engine = "serial"')
        )
        simulate(replace(serially, out=str(ray), resume=True))
    assert rounds_of(ray) == rounds_of(serial)
    assert (ray / "model.safetensors").read_bytes() == (serial / "model.safetensors").read_bytes()


def test_ray_that_is_missing_is_named_with_what_brings_it(monkeypatch):
    monkeypatch.setattr(ray_engine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--engine ray needs Ray.*pip install 'fedcomp\[ray\]'"):
        ray_engine.check(RUN)


@needs_ray
def test_ray_deals_out_the_gpus():
    with pytest.raises(ConfigError, match="--device cuda:1 names one GPU.*give --device cuda$"):
        ray_engine.check(replace(RUN, device="cuda:1"))


def test_a_batch_of_clients_is_refused():
    with pytest.raises(ConfigError, match="--cohort-batch"):
        simulate(replace(RUN, task=f"{TINY}:task", cohort_batch=4))


def test_a_task_is_found_from_any_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert ray_engine._from_anywhere("tasks/mine.py:task") == f"{tmp_path}/tasks/mine.py:task"
    assert ray_engine._from_anywhere("digits") == "digits"
