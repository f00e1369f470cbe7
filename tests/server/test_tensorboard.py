"""The scalars for TensorBoard, read with TensorBoard's own reader."""

from contextlib import closing
from dataclasses import replace

import pytest
from example_records import HEADER, RECORD

from fedcomp.errors import ConfigError
from fedcomp.server.option_callbacks import FOLDER, HOURS, RATIO, SCALARS, TensorBoard


def record(number):
    """Return the record of a round. Every third round was not evaluated."""
    evaluated = number % 3 != 0
    return replace(
        RECORD,
        round=number,
        accuracy=number / 10 if evaluated else None,
        loss=1 / number if evaluated else None,
        train_loss=float("nan"),
        accepted=2,
        uplink_bytes=10 * number,
        downlink_bytes=0,
    )


def scalars(folder):
    """Return the points (round, value) of each scalar, by name."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(folder))
    read.Reload()
    return {
        name: [(e.step, e.value) for e in read.Scalars(name)] for name in read.Tags()["scalars"]
    }


def tell(folder, rounds):
    pytest.importorskip("tensorboard")
    with closing(TensorBoard()) as board:
        board.on_run_start(replace(HEADER, out=str(folder), first_round=rounds[0]))
        for number in rounds:
            board.on_round_end(record(number))


def test_each_round_is_a_point_and_missing_values_are_left_out(tmp_path):
    tell(tmp_path, range(1, 6))
    read = scalars(tmp_path / FOLDER)
    assert set(read) == {*SCALARS, RATIO} - {"train_loss"}
    assert [step for step, _ in read["accuracy"]] == [1, 2, 4, 5]
    assert dict(read["accuracy"])[5] == pytest.approx(0.5) and dict(read["loss"])[4] == 0.25
    assert read["uplink_bytes"] == [(number, 10.0 * number) for number in range(1, 6)]
    assert read["accepted"] == [(number, 2.0) for number in range(1, 6)]
    assert dict(read["rejected"])[3] == 1
    assert read[RATIO] == [(number, 16.0 / number) for number in (1, 2)] + [
        (number, pytest.approx(16.0 / number)) for number in (3, 4, 5)
    ]


def test_a_resumed_run_hides_points_after_its_checkpoint(tmp_path):
    tell(tmp_path, range(1, 6))
    tell(tmp_path, range(4, 8))
    assert [step for step, _ in scalars(tmp_path / FOLDER)["uplink_bytes"]] == [1, 2, 3, 4, 5, 6, 7]


def test_a_missing_package_is_one_error_message(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        ConfigError,
        match="^--tensorboard needs the package tensorboard; install it with: pip install tensorboard$",
    ):
        TensorBoard()


def test_virtual_hours_are_written_if_the_run_has_a_virtual_network(tmp_path):
    pytest.importorskip("tensorboard")
    with closing(TensorBoard()) as board:
        board.on_run_start(replace(HEADER, out=str(tmp_path)))
        for number in (1, 2):
            board.on_round_end(
                replace(record(number), simulated_s=900.0, simulated_hours=number / 4)
            )
    assert scalars(tmp_path / FOLDER)[HOURS] == [(1, 0.25), (2, 0.5)]
