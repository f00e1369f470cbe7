"""`fedcomp bench codecs`: its output describes the frames of the codecs."""

import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from cases import for_each
from command_line import error_message, fedcomp

from fedcomp import available_codecs, codec
from fedcomp.cli import bench_codecs


@pytest.mark.slow
def test_every_codec_has_a_line():
    head, *lines = [
        line.split("\t")
        for line in fedcomp("bench", "codecs", "--numel", "2k", "--repeats", 1).stdout.splitlines()
    ]
    assert [line[0] for line in lines] == [str(cls()) for cls in available_codecs().values()]
    assert all(len(line) == len(head) == len(set(head)) for line in lines)


def test_json_has_the_size_and_error_of_each_frame():
    words = [
        "--numel",
        "3000",
        "--codec",
        "stc:density=1/100",
        "--codec",
        "identity@layer",
        "--repeats",
        2,
    ]
    done = fedcomp("bench", "codecs", *words, "--json")
    found = json.loads(done.stdout)
    vector = bench_codecs.normal(3000)
    assert found["vector"] == "3,000 normal values" and found["device"] == "cpu"
    for row, spec in zip(found["codecs"], ["stc:density=0.01", "identity@layer"], strict=True):
        c = codec(spec)
        frame = c.encode(vector.values, seed=1, layout=vector.layout)
        y = c.decode(frame, numel=3000, layout=vector.layout)
        assert (
            row["codec"] == spec
            and row["frame_bytes"] == len(frame)
            and row["bits_per_parameter"] == 8 * len(frame) / 3000
        )
        assert row["error"] == pytest.approx(
            float((vector.values - y).square().sum() / vector.values.square().sum()), rel=1e-5
        )
        assert 0 < row["encode_s"] == pytest.approx(3000 / row["encode_values_per_s"])


@pytest.mark.slow
def test_an_update_of_a_task_is_compressed():
    found = json.loads(
        fedcomp(
            "bench", "codecs", "--task", "digits", "--codec", "identity", "--repeats", 1, "--json"
        ).stdout
    )
    assert found["vector"] == "an update of digits, 9,610 parameters"
    assert found["codecs"][0]["error"] == 0 and found["codecs"][0]["frame_bytes"] > 4 * 9610


@for_each(
    "values, bits",
    [
        ([0.0] * 8, 0.0),
        ([1.0, -1.0] * 64, 128.0),
        ([1.0, 0, 0, 0] * 64, 256 * (0.25 * 2 + 0.75 * np.log2(4 / 3))),
        (list(np.arange(1, 257)), None),
        (list(np.arange(1, 17)) + [0] * 48, 64 * (0.25 * 2 + 0.75 * np.log2(4 / 3)) + 16 * 32),
    ],
)
def test_the_bound_in_bits_is_the_entropy_of_levels_and_positions(values, bits):
    assert bench_codecs._bound_bits(torch.tensor(values, dtype=torch.float32)) == pytest.approx(
        bits
    )


def test_the_picture_is_svg_with_every_name(tmp_path):
    path = tmp_path / "codecs.svg"
    fedcomp("bench", "codecs", "--numel", "1k", "--repeats", 1, "--picture", path)
    text = "".join(ElementTree.parse(path).getroot().itertext())
    assert all(str(cls()) in text for cls in available_codecs().values())


def test_a_picture_of_a_single_lossless_codec_is_valid():
    rows = list(bench_codecs.measure(bench_codecs.normal(100), [codec("identity")], 1))
    assert (
        "identity" in bench_codecs.chart("<&>", rows)
        and ElementTree.fromstring(bench_codecs.chart("<&>", rows)) is not None
    )


@for_each(
    "words, output",
    [
        (["--numel", "x"], "--numel is 'x'; give a whole number such as 1000000, 25M or 1G"),
        (["--numel", "0"], "--numel is '0'; give a whole number"),
        (["--codec", "stcc"], "unknown codec 'stcc'; did you mean 'stc'"),
        (["--device", "tpu"], "--device tpu is not known; give auto, cpu, cuda or cuda:N"),
        (["--numel", "1.5"], "--numel is '1.5'; give a whole number"),
        (
            ["--numel", "10", "--task", "digits"],
            "--numel compresses a random vector and --task a model update; give one of them",
        ),
        (
            ["--task", "digits", "--data", "nowhere"],
            "--data nowhere is not a folder; give the folder that contains the task's data",
        ),
        (["--data", "."], "--data is the folder of a task's data; give --task as well"),
        (["--task", "nothing"], "unknown task 'nothing'"),
        (
            ["--picture", "x.png"],
            "--picture x.png cannot be written; name a file that ends in .svg",
        ),
        (["--repeats", "0"], "invalid value for '--repeats'"),
    ],
)
def test_a_user_error_is_one_error_message(words, output):
    assert output in error_message(fedcomp("bench", "codecs", *words))


def test_bench_without_a_command_shows_its_help():
    assert "codecs" in fedcomp("bench").stdout
