"""`fedcomp tasks`: the size of each built-in task, and the folder of its data."""

import pyarrow as pa
import pytest
from command_line import fedcomp
from pyarrow import parquet

from fedcomp.tasks import available_tasks


def listed(*words, **variables) -> dict[str, list[str]]:
    done = fedcomp("tasks", *words, **variables)
    assert done.exit_code == 0, done.output
    head, *rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert head == ["task", "parameters", "examples", "test examples", "input size", "data"]
    return {row[0]: row[1:] for row in rows}


def test_every_task_has_a_line_if_there_is_no_data():
    found = listed(FEDCOMP_DATA=None)
    assert set(found) == set(available_tasks())
    assert found["digits"] == ["9,610", "1,437", "360", "64", "comes with scikit-learn"]
    assert found["mnist-cnn"][:4] == ["1,663,370", "–", "–", "1×28×28"]
    assert (
        found["mnist-cnn"][4]
        == "mnist needs its data; give --data DIR, a folder that contains mnist/train.parquet and "
        "mnist/test.parquet, or set FEDCOMP_DATA"
    )


@pytest.mark.parametrize("by_variable", [False, True])
def test_existing_data_is_counted_and_its_folder_named(by_variable, tmp_path):
    (tmp_path / "mnist").mkdir()
    for split, rows in (("train", 7), ("test", 3)):
        images = pa.array(
            [{"bytes": b"", "path": ""}] * rows,
            pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
        )
        parquet.write_table(
            pa.table({"image": images, "label": [0] * rows}),
            tmp_path / "mnist" / f"{split}.parquet",
        )
    speech = "ROLE:\n" + "all that is said. " * 60
    (tmp_path / "input.txt").write_text(f"{speech}\n")
    found = (
        listed(FEDCOMP_DATA=str(tmp_path))
        if by_variable
        else listed("--data", tmp_path, FEDCOMP_DATA=None)
    )
    assert found["mnist-logreg"][1:] == ["7", "3", "1×28×28", f"in {tmp_path / 'mnist'}"]
    assert found["shakespeare-lstm"][1:] == ["12", "1", "80 characters", f"in {tmp_path}"]
    assert (
        found["cifar10-vgg11s"][1:3] == ["–", "–"]
        and f"{tmp_path} does not contain cifar10/train.parquet" in found["cifar10-vgg11s"][4]
    )


def test_a_file_that_is_not_parquet_is_named(tmp_path):
    (tmp_path / "mnist").mkdir()
    for split in ("train", "test"):
        (tmp_path / "mnist" / f"{split}.parquet").write_bytes(b"nothing")
    assert (
        f"{tmp_path / 'mnist' / 'train.parquet'} cannot be read: Parquet file size is 7 bytes"
        in listed("--data", tmp_path)["mnist-cnn"][4]
    )
