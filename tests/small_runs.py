"""Small simulations for tests, with callbacks that record or stop a run, and functions that compare run folders."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedcomp import RunConfig, UserError
from fedcomp.callbacks import Callback, Header, RoundRecord
from fedcomp.sim import simulate

TASKS = Path(__file__).with_name("tiny_task.py")
TINY = RunConfig(
    task=f"{TASKS}:task",
    clients=8,
    participation=0.5,
    rounds=6,
    local_steps=2,
    lr=0.1,
    uplink="stc:density=10%",
    downlink="stc:density=10%",
    partition="classes:1",
)


class Records(Callback):
    def __init__(self) -> None:
        self.header: Header | None = None
        self.records: list[RoundRecord] = []
        self.summary = None

    def on_run_start(self, header: Header) -> None:
        self.header = header

    def on_round_end(self, record: RoundRecord) -> None:
        self.records.append(record)

    def on_run_end(self, summary, out) -> None:
        self.summary = summary


class Stop(Exception):
    pass


class StopsAt(Callback):
    """Stops a run when `answered` clients of a round have answered; None: at the end of the round."""

    def __init__(self, round: int, answered: int | None = None):
        self.at, self.answered = round, answered

    def on_progress(self, round: int, answered: int, cohort: int) -> None:
        if (round, answered) == (self.at, self.answered):
            raise Stop

    def on_round_end(self, record: RoundRecord) -> None:
        if self.answered is None and record.round == self.at:
            raise Stop


class StopsAfter(StopsAt):
    """Stops a run after `answered` answers in a round, counted over all of its phases; None: at the end of the round."""

    heard = 0

    def on_progress(self, round: int, answered: int, cohort: int) -> None:
        self.heard += round == self.at
        if self.heard == self.answered:
            raise Stop


def out(tmp_path: Path, name: str) -> str:
    return str(tmp_path / name)


def model_bytes(folder: str) -> bytes:
    return Path(folder, "model.safetensors").read_bytes()


def rounds_of(folder: str) -> list[dict]:
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def lines_in(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def assert_refused(tmp_path: Path, config: RunConfig, text: str) -> None:
    """Assert that a simulation raises a UserError of one line that contains `text`, before anything is written."""
    with pytest.raises(UserError) as error:
        simulate(replace(config, out=out(tmp_path, "refused")))
    assert text in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "refused").exists()


def assert_the_same_when_stopped(tmp_path: Path, config: RunConfig, *moments: Callback) -> None:
    """Assert that a run that is stopped by each of these callbacks in turn, and resumed, has the same results as an uninterrupted run."""
    simulate(replace(config, out=out(tmp_path, "whole")))
    stopped = replace(config, out=out(tmp_path, "stopped"))
    for i, moment in enumerate(moments):
        with pytest.raises(Stop):
            simulate(replace(stopped, resume=i > 0), moment)
    simulate(replace(stopped, resume=True))
    assert model_bytes(out(tmp_path, "whole")) == model_bytes(out(tmp_path, "stopped"))
    assert rounds_of(out(tmp_path, "whole")) == rounds_of(out(tmp_path, "stopped"))
