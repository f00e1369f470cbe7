"""Labelled images in parquet files with the schema of the Hugging Face hub, and a cache of the decoded arrays.

The images of MNIST are train.parquet and test.parquet in the folder mnist/ of the --data folder, or directly in the --data folder.
A file may be split into parts such as train-00000-of-00002.parquet. The column `image` (`img` in CIFAR-10) has the type struct<bytes:
binary, path: string> and contains PNG or JPEG files. The column `label` has the type int64 and contains classes from 0 to 9.

The cache is a folder of .npy files. The environment variable FEDCOMP_CACHE sets the folder; the default is ~/.cache/fedcomp. The name of a
cached file contains a hash of the paths, sizes and modification times of its source files, so that changed sources are decoded again. If
the cache folder cannot be written, the arrays are decoded in every run.
"""

import hashlib
import io
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import DataError, MissingExtraError
from .base import find_files
from .data import Data

if TYPE_CHECKING:
    import pyarrow

CLASSES = 10
# Lower limit for standard deviations of pixels scaled to 0..1. The limit prevents a division by 0 for pixels that are always black.
MIN_DEVIATION = 0.01


def cache_folder() -> Path | None:
    """Return the folder of the cache, or None if FEDCOMP_CACHE is not set and there is no home directory."""
    try:
        return Path(os.environ.get("FEDCOMP_CACHE") or "~/.cache/fedcomp").expanduser()
    except RuntimeError:
        return None


def _digest(sources: Sequence[Path], key: str) -> str:
    state = [(path.resolve(), path.stat()) for path in sources]
    text = "\n".join([key, *(f"{path}:{stat.st_size}:{stat.st_mtime_ns}" for path, stat in state)])
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:24]


def _write(path: Path, array: np.ndarray) -> None:
    """Write a file atomically, so that other processes never read a part of the file."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            np.save(file, array, allow_pickle=False)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


@dataclass(frozen=True)
class ImageDataset:
    """The images and labels of a data set, read on first use. Methods raise DataError, which names --data, if files cannot be read."""

    folder: Path | None  # the folder of --data
    dataset: str  # name of the data set in messages, and of its folder inside `folder`
    column: str  # name of the column with the images
    shape: tuple[int, ...]  # (channels, height, width), with 1 or 3 channels
    # Maps axes to the mean and standard deviation of the training set's pixels over these axes.
    _moments: dict[Any, tuple[np.ndarray, np.ndarray]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def read(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the pixels (uint8 [N, *shape]) and labels (int64 [N]) of the "train" or "test" data. Arrays from the cache are
        read-only.
        """
        files, folder = self._files(split), cache_folder()
        if folder is None:
            return self._decode(files)
        digest = _digest(files, f"{self.column} {self.shape}")
        paths = [folder / f"{digest}-{name}.npy" for name in ("images", "labels")]
        try:
            cached = [np.lib.format.open_memmap(path, mode="r") for path in paths]
            if self._is_valid(*cached):
                return cached[0], cached[1]
        except Exception:  # numpy raises various exceptions for a missing or damaged file
            pass
        images, labels = self._decode(files)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path, array in zip(paths, (images, labels), strict=True):
                _write(path, array)
        except OSError:
            pass  # the disk is full or read-only: the next run decodes again
        return images, labels

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

    def per_pixel(self, split: str) -> Data:
        """Return the images as float32 [N, pixels]. Each pixel is standardised by its mean and standard deviation in the training set."""
        return self._standardised(split, (0,), flat=True)

    def per_channel(self, split: str) -> Data:
        """Return the images as float32 [N, *shape]. Each channel is standardised by its mean and standard deviation in the training set."""
        return self._standardised(split, (0, 2, 3), flat=False)

    def per_dataset(self, split: str) -> Data:
        """Return the images as float32 [N, pixels], standardised by one mean and standard deviation of the training set."""
        return self._standardised(split, (0, 1, 2, 3), flat=True)

    def _standardised(self, split: str, axes: tuple[int, ...], flat: bool) -> Data:
        """Return the pixels, scaled to 0..1 and standardised by the training set's mean and standard deviation over `axes`."""
        images, labels = self.read(split)
        if axes not in self._moments:
            self._moments[axes] = _moments(self.read("train")[0], axes)
        mean, deviation = self._moments[axes]
        values = images.astype(np.float32)
        values /= np.float32(255)
        values -= mean.astype(np.float32)
        values /= deviation.astype(np.float32)
        inputs = torch.from_numpy(values)
        return Data(inputs.flatten(1) if flat else inputs, torch.tensor(labels))

    def _files(self, split: str) -> list[Path]:
        def find(folder: Path) -> list[Path]:
            whole = folder / f"{split}.parquet"
            files = [whole] if whole.is_file() else sorted(folder.glob(f"{split}-*.parquet"))
            _check_parts(files, split)
            return files

        name = self.dataset
        contents = f"{name}/train.parquet and {name}/test.parquet"
        return find_files(self.folder, name, f"{name}/{split}.parquet", contents, find)

    def _is_valid(self, images: np.ndarray, labels: np.ndarray) -> bool:
        """Return whether cached arrays have the types, the shapes and the range of labels of arrays that `_decode` returns."""
        dtypes = labels.dtype == np.dtype(np.int64) and images.dtype == np.dtype(np.uint8)
        if not dtypes or labels.ndim != 1 or images.shape != (len(labels), *self.shape):
            return False
        return len(labels) > 0 and 0 <= labels.min() and labels.max() < CLASSES

    def _decode(self, files: Sequence[Path]) -> tuple[np.ndarray, np.ndarray]:
        images, labels = zip(*map(self._decode_file, files), strict=True)
        return np.concatenate(images), np.concatenate(labels)

    def _decode_file(self, file: Path) -> tuple[np.ndarray, np.ndarray]:
        encoded, labels = self._columns(file)
        images = np.empty((len(encoded), *self.shape), np.uint8)
        # Images are decoded in one thread: images of this size are so small that several threads would wait for the interpreter lock.
        for i, data in enumerate(encoded):
            images[i] = self._image(data, f"--data {file}: image {i}")
        return images, labels

    def _columns(self, file: Path) -> tuple[list[bytes | None], np.ndarray]:
        """Return the encoded images and the labels of a file. Raises DataError if the file does not have the schema of the data set."""
        with self._opened(file) as source:
            self._check_schema(source.schema_arrow, file)
            table = source.read(columns=[self.column, "label"])
        from pyarrow import compute

        labels = table["label"]
        if not len(labels):
            raise DataError(f"--data {file} has no rows; replace it with a complete copy")
        limits = compute.min_max(labels).as_py()
        if labels.null_count or limits["min"] < 0 or limits["max"] >= CLASSES:
            raise DataError(
                f"--data {file} has labels from {limits['min']} to {limits['max']}, and {labels.null_count} rows without a label; "
                f"{self.dataset} needs a label from 0 to {CLASSES - 1} in every row"
            )
        encoded = compute.struct_field(table[self.column], "bytes").to_pylist()
        return encoded, labels.to_numpy().astype(np.int64)

    @contextmanager
    def _opened(self, file: Path) -> Iterator["pyarrow.parquet.ParquetFile"]:
        """Open a parquet file. Raises DataError if the file cannot be read, and MissingExtraError if pyarrow is not installed."""
        try:
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            raise MissingExtraError("pyarrow", "sim", f"the data set {self.dataset}") from error
        try:
            with parquet.ParquetFile(file) as source:
                yield source
        except PermissionError as error:
            raise DataError(
                f"--data {file}: no permission to read it; change its permissions"
            ) from error
        except (OSError, ArrowException) as error:
            raise DataError(
                f"--data {file} cannot be read as parquet ({type(error).__name__}); replace it with a complete copy"
            ) from error

    def _check_schema(self, schema: "pyarrow.Schema", file: Path) -> None:
        import pyarrow as pa

        def has_column(name: str) -> bool:
            if schema.names.count(name) != 1:
                return False
            kind = schema.field(name).type
            if name == "label":
                return pa.types.is_integer(kind)
            fields = kind if pa.types.is_struct(kind) else ()
            types = [field.type for field in fields if field.name == "bytes"]
            return types in ([pa.binary()], [pa.large_binary()])

        kinds = {self.column: "struct<bytes: binary, path: string>", "label": "int64"}
        for name, kind in kinds.items():
            if not has_column(name):
                columns = ", ".join(f"{field.name} ({field.type})" for field in schema) or "none"
                raise DataError(
                    f"--data {file}: {self.dataset} needs a column {name} ({kind}), but the columns are {columns}; "
                    f"give {self.dataset} from the Hugging Face hub as parquet"
                )

    def _image(self, data: bytes | None, where: str) -> np.ndarray:
        try:
            from PIL import Image
        except ImportError as error:
            raise MissingExtraError("pillow", "sim", f"the data set {self.dataset}") from error
        channels, height, width = self.shape
        try:
            with Image.open(io.BytesIO(data or b""), formats=("PNG", "JPEG")) as image:
                # The size is checked before decoding, so that huge images are not decoded.
                if image.size == (width, height):
                    pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
                    return pixels.reshape(height, width, channels).transpose(2, 0, 1)
                size = "{} x {}".format(*image.size)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(
                f"{where} cannot be decoded as PNG or JPEG; replace the file with a complete copy"
            ) from error
        raise DataError(
            f"{where} has {size} pixels, but {self.dataset} needs {width} x {height}; give {self.dataset} from the Hugging Face hub"
        )


def _check_parts(files: Sequence[Path], split: str) -> None:
    """Raise DataError unless files with names such as "train-00000-of-00002.parquet" are a complete set."""
    parts = sorted(
        (int(part), int(total))
        for file in files
        for part, total in re.findall(r"-(\d+)-of-(\d+)", file.stem)
    )
    total = parts[-1][1] if parts else 0
    if parts and (len(files) != total or parts != [(part, total) for part in range(total)]):
        raise DataError(
            f"--data {files[0].parent} contains {len(files)} files {split}-*.parquet, which are not the {total} parts of one set; "
            "give each part once"
        )


def _moments(images: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation over `axes` of pixels scaled to 0..1. The reduced axes are kept, with length 1.

    The sums of pixels and of their squares are integers below 2⁵³, so that float64 is exact and the order of summation has no effect.
    """
    mean = images.mean(axes, np.float64, keepdims=True)
    squares = np.square(images, dtype=np.uint16).mean(axes, np.float64, keepdims=True)
    deviation = np.sqrt(np.maximum(squares - mean**2, 0))
    return mean / 255, np.maximum(deviation / 255, MIN_DEVIATION)
