"""Labelled images from a folder in the parquet schema of the Hugging Face hub.

DIR/mnist/train.parquet, DIR/mnist/test.parquet    DIR/mnist may be DIR itself, a file may be cut into
                                                   train-00000-of-00002.parquet and so on
image: struct<bytes: binary, path: string>         a PNG or JPEG file; the column is `img` in cifar10
label: int64                                       0..9
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import DataError, MissingExtraError
from . import cache
from .data import Data

if TYPE_CHECKING:
    import pyarrow

CLASSES = 10
FLOOR = 0.01  # least deviation that pixels in 0..1 are divided by: a pixel that is always black has none


@dataclass(frozen=True)
class Images:
    """The images of one data set. Reads when asked; raises DataError, naming --data, where that fails."""

    folder: Path | None  # what --data names
    dataset: str  # the folder inside it, and the name in messages
    column: str  # of the images
    shape: tuple[int, ...]  # (channels, height, width); 1 or 3 channels

    def read(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Pixels uint8 [N, *shape] and labels int64 [N] of "train" or "test"; read-only where they come from the cache."""
        files = self._files(split)
        form = f"{self.column} {self.shape}"
        images, labels = cache.arrays(
            files, form, ("images", "labels"), lambda: self._decode(files), self._fits
        )
        return images, labels

    def count(self, split: str) -> int:
        """Images of "train" or "test", as the files say, without reading them."""
        files = self._files(split)
        try:
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            raise MissingExtraError("pyarrow", "sim", f"the data set {self.dataset}") from error
        try:
            return sum(parquet.read_metadata(file).num_rows for file in files)
        except (OSError, ArrowException) as error:
            raise DataError(
                f"--data {files[0]} cannot be read as parquet ({type(error).__name__}); replace it by a whole copy"
            ) from error

    def place(self) -> Path:
        """The folder that the files are in. Raises DataError."""
        return self._files("train")[0].parent

    def per_pixel(self, split: str) -> Data:
        """Inputs float32 [N, pixels]: scaled to 0..1, then each pixel standardised by its own moments over the training set."""
        images, labels = self.read(split)
        return Data(_standardised(images, *self._pixel_moments).flatten(1), torch.tensor(labels))

    def per_channel(self, split: str) -> Data:
        """Inputs float32 [N, *shape]: scaled to 0..1, then each channel standardised by its moments over the training set."""
        images, labels = self.read(split)
        return Data(_standardised(images, *self._channel_moments), torch.tensor(labels))

    def per_dataset(self, split: str) -> Data:
        """Inputs float32 [N, pixels]: scaled to 0..1, then standardised by one mean and deviation over the training set."""
        images, labels = self.read(split)
        return Data(_standardised(images, *self._dataset_moments).flatten(1), torch.tensor(labels))

    @cached_property
    def _pixel_moments(self) -> tuple[np.ndarray, np.ndarray]:
        return _moments(self.read("train")[0], (0,))

    @cached_property
    def _channel_moments(self) -> tuple[np.ndarray, np.ndarray]:
        return _moments(self.read("train")[0], (0, 2, 3))

    @cached_property
    def _dataset_moments(self) -> tuple[np.ndarray, np.ndarray]:
        return _moments(self.read("train")[0], (0, 1, 2, 3))

    def _files(self, split: str) -> list[Path]:
        try:
            return self._found(split)
        except PermissionError as error:
            raise DataError(
                f"--data {self.folder}: no permission to read {error.filename}; change its permissions"
            ) from error

    def _found(self, split: str) -> list[Path]:
        wanted = f"{self.dataset}/train.parquet and {self.dataset}/test.parquet"
        if self.folder is None:
            raise DataError(
                f"{self.dataset} needs its data; give --data DIR, a folder that holds {wanted}, or set FEDCOMP_DATA"
            )
        if not self.folder.is_dir():
            raise DataError(f"--data {self.folder} is not a folder; give one that holds {wanted}")
        for place in (self.folder / self.dataset, self.folder):
            whole = place / f"{split}.parquet"
            files = [whole] if whole.is_file() else sorted(place.glob(f"{split}-*.parquet"))
            if files:
                _check_parts(files, split)
                return files
        state = (
            f"holds no {self.dataset}/{split}.parquet" if any(self.folder.iterdir()) else "is empty"
        )
        raise DataError(f"--data {self.folder} {state}; give a folder that holds {wanted}")

    def _fits(self, arrays: cache.Arrays) -> bool:
        """Whether arrays can be what `_decode` makes."""
        images, labels = arrays
        dtypes = labels.dtype == np.dtype(np.int64) and images.dtype == np.dtype(np.uint8)
        if not dtypes or labels.ndim != 1 or images.shape != (len(labels), *self.shape):
            return False
        return len(labels) > 0 and 0 <= labels.min() and labels.max() < CLASSES

    def _decode(self, files: Sequence[Path]) -> tuple[np.ndarray, np.ndarray]:
        parts = [self._decode_file(file) for file in files]
        return np.concatenate([images for images, _ in parts]), np.concatenate(
            [labels for _, labels in parts]
        )

    def _decode_file(self, file: Path) -> tuple[np.ndarray, np.ndarray]:
        encoded, labels = self._columns(file)
        images = np.empty((len(encoded), *self.shape), np.uint8)
        for i, data in enumerate(
            encoded
        ):  # one thread: more of them wait for the interpreter's lock on images this small
            images[i] = self._image(data, f"--data {file}: image {i}")
        return images, labels

    def _columns(self, file: Path) -> tuple[list[bytes | None], np.ndarray]:
        """The encoded images and the labels of a file, checked against the schema."""
        try:
            import pyarrow as pa
            from pyarrow import compute, parquet
        except ImportError as error:
            raise MissingExtraError("pyarrow", "sim", f"the data set {self.dataset}") from error
        try:
            with parquet.ParquetFile(file) as source:
                self._check_schema(source.schema_arrow, file)
                table = source.read(columns=[self.column, "label"])
        except PermissionError as error:
            raise DataError(
                f"--data {file}: no permission to read it; change its permissions"
            ) from error
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"--data {file} cannot be read as parquet ({type(error).__name__}); replace it by a whole copy"
            ) from error
        labels = table["label"]
        if not len(labels):
            raise DataError(f"--data {file} has no rows; replace it by a whole copy")
        limits = compute.min_max(labels).as_py()
        if labels.null_count or limits["min"] < 0 or limits["max"] >= CLASSES:
            raise DataError(
                f"--data {file} has labels from {limits['min']} to {limits['max']} and {labels.null_count} without a value; "
                f"{self.dataset} needs 0 to {CLASSES - 1} in every row"
            )
        return compute.struct_field(
            table[self.column], "bytes"
        ).to_pylist(), labels.to_numpy().astype(np.int64)

    def _check_schema(self, schema: "pyarrow.Schema", file: Path) -> None:
        import pyarrow as pa

        def fits(name: str) -> bool:
            if schema.names.count(name) != 1:
                return False
            kind = schema.field(name).type
            if name == "label":
                return pa.types.is_integer(kind)
            return pa.types.is_struct(kind) and [f.type for f in kind if f.name == "bytes"] in (
                [pa.binary()],
                [pa.large_binary()],
            )

        for name, kind in (
            (self.column, "struct<bytes: binary, path: string>"),
            ("label", "int64"),
        ):
            if not fits(name):
                found = ", ".join(f"{field.name} ({field.type})" for field in schema) or "none"
                raise DataError(
                    f"--data {file}: {self.dataset} needs a column {name} ({kind}), found {found}; "
                    f"give the hub's {self.dataset} as parquet"
                )

    def _image(self, data: bytes | None, where: str) -> np.ndarray:
        try:
            from PIL import Image
        except ImportError as error:
            raise MissingExtraError("pillow", "sim", f"the data set {self.dataset}") from error
        channels, height, width = self.shape
        try:
            with Image.open(io.BytesIO(data or b""), formats=("PNG", "JPEG")) as image:
                if image.size == (
                    width,
                    height,
                ):  # compared before decoding, so that no image costs more than it should
                    return (
                        np.asarray(image.convert("L" if channels == 1 else "RGB"))
                        .reshape(height, width, channels)
                        .transpose(2, 0, 1)
                    )
                found = "{} x {}".format(*image.size)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(
                f"{where} cannot be decoded as PNG or JPEG; replace the file by a whole copy"
            ) from error
        raise DataError(
            f"{where} is {found} pixels, and {self.dataset} needs {width} x {height}; give the hub's {self.dataset}"
        )


def _check_parts(files: Sequence[Path], split: str) -> None:
    """Raise DataError where the names of files, "train-00000-of-00002.parquet", are not those of a whole set."""
    parts = sorted(
        (int(part), int(total))
        for file in files
        for part, total in re.findall(r"-(\d+)-of-(\d+)", file.stem)
    )
    total = parts[-1][1] if parts else 0
    if parts and (len(files) != total or parts != [(part, total) for part in range(total)]):
        raise DataError(
            f"--data {files[0].parent} holds {len(files)} files {split}-*.parquet, which are not the {total} parts of one set; "
            "give each of them once"
        )


def _moments(images: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation over `axes`, kept as axes of length 1, of pixels scaled to 0..1. Summed as integers: exact in any order."""
    total: Any = 0
    squares: Any = 0
    for start in range(0, len(images), 512):
        block = images[start : start + 512].astype(np.int32)
        total = total + block.sum(axes, np.int64, keepdims=True)
        squares = squares + (block * block).sum(axes, np.int64, keepdims=True)
    count = images.size // np.size(total)
    mean = total / count
    deviation = np.sqrt(np.maximum(squares / count - mean**2, 0))
    return mean / 255, np.maximum(deviation / 255, FLOOR)


def _standardised(images: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> torch.Tensor:
    values = images.astype(np.float32)
    values /= np.float32(255)
    values -= mean.astype(np.float32)
    values /= deviation.astype(np.float32)
    return torch.from_numpy(values)
