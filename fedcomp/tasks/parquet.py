"""Labelled images in parquet files, as on the Hugging Face hub.

For example, MNIST has the files train.parquet and test.parquet, in the subfolder mnist of the --data folder or in the folder itself. A
file may be split into parts such as train-00000-of-00002.parquet. The column `image` (`img` in CIFAR-10) has the type struct<bytes: binary,
path: string> and contains PNG or JPEG files. The column `label` has the type int64 and contains classes from 0 to 9.
"""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..errors import DataError, MissingExtraError
from .base import find_files, read_errors
from .data import Data

if TYPE_CHECKING:
    import pyarrow

CLASSES = 10
# Minimum of the standard deviation by which pixels, scaled to 0..1, are divided. Without it, always black pixels would divide by 0.
MIN_DEVIATION = 0.01
# Axes over which images [N, channels, height, width] are standardised.
PER_PIXEL = (0,)
PER_CHANNEL = (0, 2, 3)
PER_DATASET = (0, 1, 2, 3)


@dataclass(frozen=True)
class ImageDataset:
    """The images and labels of a data set, read on first use. Methods raise DataError, which names --data, if files cannot be read."""

    folder: Path | None  # the folder of --data
    dataset: str  # name of the data set and of its subfolder
    column: str  # name of the column with the images
    shape: tuple[int, ...]  # (channels, height, width), with 1 or 3 channels
    axes: tuple[int, ...] = PER_CHANNEL  # axes over which the images are standardised
    _moments: list[np.ndarray] = field(default_factory=list, init=False, repr=False, compare=False)

    def read(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the pixels (uint8 [N, *shape]) and labels (int64 [N]) of the "train" or "test" data."""
        images, labels = zip(*map(self._decode, self._files(split)), strict=True)
        return np.concatenate(images), np.concatenate(labels)

    def standardised(self, split: str) -> Data:
        """Return the images as float32 [N, *shape], standardised by the training set's mean and standard deviation over `axes`."""
        images, labels = self.read(split)
        if not self._moments:
            training = images if split == "train" else self.read("train")[0]
            self._moments.extend(_moments(training, self.axes))
        mean, deviation = self._moments
        values = images.astype(np.float32)
        values /= np.float32(255)
        values -= mean.astype(np.float32)
        values /= deviation.astype(np.float32)
        return Data(torch.from_numpy(values), torch.from_numpy(labels))

    def flat(self, split: str) -> Data:
        """Return the same data as `standardised`, but with flattened images: float32 [N, pixels]."""
        data = self.standardised(split)
        return replace(data, inputs=data.single_input.flatten(1))

    def count(self, split: str) -> int:
        """Return the number of images in the "train" or "test" data, from the metadata of the files."""
        total = 0
        for file in self._files(split):
            with self._opened(file) as source:
                total += source.metadata.num_rows
        return total

    def data_folder(self) -> Path:
        """Return the folder that contains the parquet files."""
        return self._files("train")[0].parent

    def _files(self, split: str) -> list[Path]:
        def find(folder: Path) -> list[Path]:
            whole = folder / f"{split}.parquet"
            files = [whole] if whole.is_file() else sorted(folder.glob(f"{split}-*.parquet"))
            _check_parts(files, split)
            return files

        name = self.dataset
        contents = f"{name}/train.parquet and {name}/test.parquet"
        return find_files(self.folder, name, f"{name}/{split}.parquet", contents, find)

    def _decode(self, file: Path) -> tuple[np.ndarray, np.ndarray]:
        """Return the images and labels of a file. Raises DataError if the file is malformed."""
        with self._opened(file) as source:
            table = source.read(columns=[self.column, "label"])
            encoded = [image["bytes"] for image in table[self.column].to_pylist()]
            labels = table["label"].to_numpy()  # floats if a label is null
            if not len(labels):
                raise ValueError("the file has no rows")
            if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= CLASSES:
                raise ValueError(f"a label is not a whole number from 0 to {CLASSES - 1}")
            images = np.empty((len(encoded), *self.shape), np.uint8)
            # Several threads would not be faster: for small images, they mostly wait for Python's global interpreter lock.
            for i, data in enumerate(encoded):
                images[i] = self._pixels(data, f"image {i}")
        return images, labels.astype(np.int64)

    def _pixels(self, data: bytes, name: str) -> np.ndarray:
        """Return the pixels [*shape] of a PNG or JPEG file. Raises ValueError if `data` is not such a file or has another shape."""
        from PIL import Image

        channels, height, width = self.shape
        try:
            with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
                pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
            return pixels.reshape(height, width, channels).transpose(2, 0, 1)
        except Exception as error:  # Pillow raises various exceptions for damaged files
            raise ValueError(
                f"{name} is not a PNG or JPEG file of {width} x {height} pixels"
            ) from error

    @contextmanager
    def _opened(self, file: Path) -> Iterator["pyarrow.parquet.ParquetFile"]:
        """Open a parquet file. Raises DataError if the file is malformed, and MissingExtraError if a package is not installed."""
        try:
            from PIL import Image  # noqa: F401 — used by `_pixels`
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            package = "pillow" if error.name == "PIL" else "pyarrow"
            raise MissingExtraError(package, "sim", f"the data set {self.dataset}") from error
        wanted = (
            f"a complete copy of {self.dataset} from the Hugging Face hub as parquet, with the columns {self.column} (struct<bytes: "
            "binary, path: string>) and label (int64)"
        )
        malformed = ArrowException, KeyError, TypeError, ValueError
        with read_errors(file, wanted, *malformed), parquet.ParquetFile(file) as source:
            yield source


def _check_parts(files: Sequence[Path], split: str) -> None:
    """Raise DataError unless files with names such as "train-00000-of-00002.parquet" are a complete set."""
    totals = [int(total) for file in files for total in re.findall(r"-of-(\d+)$", file.stem)]
    if totals and totals != [len(files)] * len(files):
        raise DataError(
            f"--data {files[0].parent} contains {len(files)} files {split}-*.parquet, which are not the {max(totals)} parts of one set; "
            "give each part once"
        )


def _moments(images: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation over `axes` of pixels scaled to 0..1. In the results, these axes have the length 1."""
    # Sums of pixels and of their squares are integers below 2⁵³, for which float64 is exact.
    mean = images.mean(axes, np.float64, keepdims=True)
    squares = np.square(images, dtype=np.uint16).mean(axes, np.float64, keepdims=True)
    deviation = np.sqrt(np.maximum(squares - mean**2, 0))
    return mean / 255, np.maximum(deviation / 255, MIN_DEVIATION)
