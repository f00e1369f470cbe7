import io
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcomp.errors import DataError, MissingExtraError
from fedcomp.tasks import parquet as room
from fedcomp.tasks.parquet import PER_CHANNEL, PER_DATASET, PER_PIXEL, ImageDataset

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")

GREY = (1, 4, 5)
COLOUR = (3, 4, 5)


def encoded(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write(
    path: Path,
    images: list[bytes | None],
    labels: list[int | None],
    column: str = "image",
    label: str = "label",
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    structs = pa.array(
        [{"bytes": data, "path": ""} for data in images],
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    pq.write_table(pa.table({column: structs, label: pa.array(labels, pa.int64())}), path)


def pictures(count: int, seed: int = 0, colour: bool = False) -> np.ndarray:
    return np.random.default_rng(seed).integers(
        0, 256, (count, 4, 5, 3) if colour else (count, 4, 5), dtype=np.uint8
    )


@pytest.fixture
def hub(tmp_path):
    """Return a folder with toy/train.parquet and toy/test.parquet, and the pixels of both files."""
    train, test = pictures(12), pictures(5, seed=1)
    write(
        tmp_path / "toy" / "train.parquet", [encoded(p) for p in train], [i % 10 for i in range(12)]
    )
    write(tmp_path / "toy" / "test.parquet", [encoded(p) for p in test], [9, 8, 7, 6, 5])
    return tmp_path, train, test


def toy(folder: Path | None, axes: tuple[int, ...] = PER_CHANNEL) -> ImageDataset:
    return ImageDataset(folder, "toy", "image", GREY, axes)


@pytest.mark.parametrize("inside", ["", "toy"])
def test_pixels_and_labels_are_read_from_the_folder_or_its_parent(hub, inside):
    folder, train, test = hub
    images, labels = toy(folder / inside).read("train")
    assert np.array_equal(images[:, 0], train) and images.dtype == np.uint8
    assert labels.tolist() == [i % 10 for i in range(12)] and labels.dtype == np.int64
    images, labels = toy(folder / inside).read("test")
    assert np.array_equal(images[:, 0], test) and labels.tolist() == [9, 8, 7, 6, 5]


def test_in_colour_images_channels_are_the_first_axis(tmp_path):
    pixels = pictures(3, colour=True)
    write(tmp_path / "train.parquet", [encoded(p) for p in pixels], [0, 1, 2], column="img")
    images, _ = ImageDataset(tmp_path, "toy", "img", COLOUR).read("train")
    assert np.array_equal(images, pixels.transpose(0, 3, 1, 2))


def test_a_split_in_several_files_is_read_in_the_order_of_their_names(tmp_path):
    pixels = pictures(6)
    for part in (1, 0):
        rows = slice(3 * part, 3 * part + 3)
        write(
            tmp_path / f"train-0000{part}-of-00002.parquet",
            [encoded(p) for p in pixels[rows]],
            [part] * 3,
        )
    images, labels = toy(tmp_path).read("train")
    assert np.array_equal(images[:, 0], pixels) and labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_each_pixel_is_standardised_by_the_training_set_with_a_minimum_deviation(hub):
    folder, train, test = hub
    train[:, 0, 0] = 7  # a pixel that never changes
    write(folder / "toy" / "train.parquet", [encoded(p) for p in train], [0] * 12)
    scaled = train.reshape(12, -1) / 255
    mean, deviation = scaled.mean(0), np.maximum(scaled.std(0), 0.01)
    data = toy(folder, PER_PIXEL)
    assert torch.allclose(
        data.flat("train").inputs.double(),
        torch.tensor((scaled - mean) / deviation),
        atol=1e-5,
    )
    assert torch.allclose(
        data.flat("test").inputs.double(),
        torch.tensor((test.reshape(5, -1) / 255 - mean) / deviation),
        atol=1e-4,
    )


def test_each_channel_is_standardised_by_the_training_set(tmp_path):
    pixels = {
        "train": pictures(8, colour=True) // [1, 2, 4],
        "test": pictures(3, seed=1, colour=True),
    }
    for split, values in pixels.items():
        write(
            tmp_path / f"{split}.parquet",
            [encoded(p.astype(np.uint8)) for p in values],
            [0] * len(values),
            column="img",
        )
    data = ImageDataset(tmp_path, "toy", "img", COLOUR)
    inputs = data.standardised("train").inputs
    assert inputs.shape == (8, *COLOUR) and inputs.dtype == torch.float32
    assert torch.allclose(inputs.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(inputs.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)
    mean, deviation = pixels["train"].mean((0, 1, 2)) / 255, pixels["train"].std((0, 1, 2)) / 255
    expected = (pixels["test"] / 255 - mean) / deviation
    assert torch.allclose(
        data.standardised("test").inputs.double(),
        torch.tensor(expected.transpose(0, 3, 1, 2)),
        atol=1e-5,
    )


def test_all_pixels_are_standardised_by_one_mean_and_deviation_of_the_training_set(hub):
    folder, train, test = hub
    data, mean, deviation = toy(folder, PER_DATASET), train.mean() / 255, train.std() / 255
    for split, pixels in (("train", train), ("test", test)):
        expected = torch.tensor((pixels.reshape(len(pixels), -1) / 255 - mean) / deviation)
        assert torch.allclose(data.flat(split).inputs.double(), expected, atol=1e-5)


def test_moments_are_the_mean_and_deviation_of_scaled_pixels():
    images = np.random.default_rng(3).integers(0, 256, (1500, 2, 3, 3), dtype=np.uint8)
    mean, deviation = room._moments(images, (0, 2, 3))
    assert np.allclose(mean.ravel(), (images / 255).mean((0, 2, 3))) and np.allclose(
        deviation.ravel(), (images / 255).std((0, 2, 3))
    )


GOOD = encoded(pictures(1)[0])


WANTED = (
    "give a complete copy of toy from the Hugging Face hub as parquet, with the columns image "
    "(struct<bytes: binary, path: string>) and label (int64)"
)
NOT_DECODED = "is not a PNG or JPEG file of 5 x 4 pixels"


@pytest.mark.parametrize(
    ("images", "labels", "columns", "says"),
    [
        ([GOOD], [0], {"column": "img"}, "image"),
        ([GOOD], [0], {"label": "fine_label"}, "label"),
        ([], [], {}, "the file has no rows"),
        ([GOOD, GOOD], [0, 10], {}, "a label is not a whole number from 0 to 9"),
        ([GOOD, GOOD], [-1, 3], {}, "a label is not a whole number from 0 to 9"),
        ([GOOD, GOOD], [0, None], {}, "a label is not a whole number from 0 to 9"),
        ([GOOD, b"no picture"], [0, 0], {}, f"image 1 {NOT_DECODED}"),
        ([GOOD, GOOD[:60]], [0, 0], {}, f"image 1 {NOT_DECODED}"),
        ([GOOD, None], [0, 0], {}, f"image 1 {NOT_DECODED}"),
        ([GOOD, encoded(np.zeros((4, 4), np.uint8))], [0, 0], {}, f"image 1 {NOT_DECODED}"),
    ],
)
def test_the_error_for_a_malformed_file_names_the_file_and_the_problem(
    tmp_path, images, labels, columns, says
):
    write(tmp_path / "train.parquet", images, labels, **columns)
    with pytest.raises(
        DataError, match=f"--data .*train.parquet cannot be read: .*{says}.*; {re.escape(WANTED)}"
    ):
        toy(tmp_path).read("train")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.binary(), GOOD),
        (pa.string(), "picture"),
        (pa.int64(), 3),
        (pa.list_(pa.uint8()), [1, 2]),
        (pa.struct([("bytes", pa.string())]), {"bytes": "picture"}),
        (pa.struct([("bytes", pa.int64())]), {"bytes": 3}),
        (pa.struct([("bytes", pa.list_(pa.uint8()))]), {"bytes": [1, 2]}),
    ],
    ids=str,
)
def test_the_error_for_a_column_of_another_type_names_the_expected_type(tmp_path, kind, value):
    pq.write_table(
        pa.table({"image": pa.array([value], kind), "label": [0]}), tmp_path / "train.parquet"
    )
    with pytest.raises(DataError, match=f"train.parquet cannot be read: .*; {re.escape(WANTED)}"):
        toy(tmp_path).read("train")


@pytest.mark.parametrize(
    "parts",
    [
        ["00000-of-00002"],
        ["00001-of-00002"],
        ["00000-of-00002", "00000-of-00001"],
        ["00000-of-00001", "more"],
    ],
)
def test_an_incomplete_set_of_parts_is_refused(tmp_path, parts):
    for part in parts:
        write(tmp_path / f"train-{part}.parquet", [GOOD], [0])
    with pytest.raises(
        DataError,
        match=rf"--data .* contains {len(parts)} files train-\*.parquet, which are not the [12] parts of one set",
    ):
        toy(tmp_path).read("train")


@pytest.mark.parametrize("closed", ["toy", "toy/train.parquet"])
def test_a_file_or_folder_without_read_permission_is_named(unprivileged, closed):
    write(unprivileged / "toy" / "train.parquet", [GOOD], [0])
    (unprivileged / closed).chmod(0)
    try:
        with pytest.raises(
            DataError, match="--data .* no permission to read .*; change its permissions"
        ):
            toy(unprivileged).read("train")
    finally:
        (unprivileged / closed).chmod(0o700)


def test_labels_must_be_whole_numbers(tmp_path):
    pq.write_table(
        pa.table({"image": [{"bytes": GOOD, "path": ""}], "label": [0.5]}),
        tmp_path / "train.parquet",
    )
    with pytest.raises(DataError, match="a label is not a whole number from 0 to 9"):
        toy(tmp_path).read("train")


@pytest.mark.parametrize("content", [b"", b"PAR1 but not more", b"PAR1" + bytes(100) + b"PAR1"])
def test_a_file_that_is_not_parquet_is_refused(tmp_path, content):
    (tmp_path / "train.parquet").write_bytes(content)
    with pytest.raises(
        DataError, match=f"--data .*train.parquet cannot be read: .*; {re.escape(WANTED)}"
    ):
        toy(tmp_path).read("train")


def test_missing_and_empty_folders_are_refused(tmp_path):
    with pytest.raises(
        DataError,
        match="toy needs its data; give --data DIR, .*toy/train.parquet.* or set FEDCOMP_DATA",
    ):
        toy(None).read("train")
    with pytest.raises(DataError, match="--data .*absent is not a folder"):
        toy(tmp_path / "absent").read("train")
    with pytest.raises(DataError, match="--data .* does not contain toy/train.parquet"):
        toy(tmp_path).read("train")
    write(tmp_path / "toy" / "train.parquet", [GOOD], [0])
    with pytest.raises(DataError, match="--data .* does not contain toy/test.parquet"):
        toy(tmp_path).read("test")


@pytest.mark.parametrize(("module", "package"), [("pyarrow", "pyarrow"), ("PIL", "pillow")])
def test_the_error_for_a_missing_package_names_the_extra(hub, monkeypatch, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        MissingExtraError,
        match=rf"the data set toy needs the package {package}; .* 'fedcomp\[sim\]'",
    ):
        toy(hub[0]).read("train")
