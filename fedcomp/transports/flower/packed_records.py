"""A model as Flower carries it, in a record of named arrays: what of it is one vector that travels compressed, and what travels as it is.

Arrays of floats are the vector, in the order of the record. Integers, arrays in a form of their own, and those that are named by a
pattern (running variances: an approximate one may be negative) stand beside it, untouched.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Self

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor

from ...errors import ProtocolError
from ...layout import Layout
from ...messages import Values
from .records import MESSAGE, from_records, to_records

NUMPY = "numpy.ndarray"  # Flower's own form of an array
FLOATS = ("float16", "float32", "float64")
BUFFERS = (
    "*running_mean",
    "*running_var",
    "*num_batches_tracked",
)  # of torch's batch normalisation


@dataclass
class Parcel(Values):
    """An Assignment or a Report in the place of a record of arrays, with the arrays of it that travel as they are."""

    message: bytes
    record: str  # key of the record, "" where there is none
    heads: str  # JSON: name, dtype, shape and form of each array
    bodies: list[bytes]

    @classmethod
    def of(
        cls, message: Values, record: str = "", whole: Mapping[str, Array] | None = None
    ) -> Self:
        whole = whole or {}
        heads = [
            [name, array.dtype, list(array.shape), array.stype] for name, array in whole.items()
        ]
        return cls(
            message.pack(), record, json.dumps(heads), [array.data for array in whole.values()]
        )

    @classmethod
    def take(cls, content: RecordDict) -> Self:
        """That which a message holds. Raises ProtocolError."""
        return from_records(
            RecordDict({MESSAGE: content[MESSAGE]} if MESSAGE in content else {}), cls
        )

    def put(self, content: RecordDict, instead: str) -> RecordDict:
        """The records of a message with this in the place of the one with the key `instead`, at the end where there is none."""
        mine = to_records(self)[MESSAGE]
        others = [(key, record) for key, record in content.items() if key != MESSAGE]
        put = [(MESSAGE, mine) if key == instead else (key, record) for key, record in others]
        return RecordDict(dict(put if instead in content else [*others, (MESSAGE, mine)]))

    def replaced(self, content: RecordDict, arrays: ArrayRecord | None) -> RecordDict:
        """The records of a message without this, and with `arrays` in its place. Raises ProtocolError where that is taken."""
        if self.record in content:
            raise ProtocolError(f"the message has a record '{self.record}' already")
        named = {
            self.record if key == MESSAGE else key: arrays if key == MESSAGE else record
            for key, record in content.items()
        }
        return RecordDict({key: record for key, record in named.items() if record is not None})

    @cached_property
    def whole(self) -> dict[str, Array]:
        """The arrays that travel as they are. Raises ProtocolError."""
        try:
            pairs = zip(json.loads(self.heads), self.bodies, strict=True)
            return {
                name: Array(dtype, tuple(shape), stype, body)
                for (name, dtype, shape, stype), body in pairs
            }
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(
                f"the arrays that travel as they are cannot be read ({error})"
            ) from error


@dataclass(frozen=True)
class Form:
    """The arrays of a model in their order: name and shape, and the dtype of those in the vector, "" for those that travel as they are."""

    arrays: tuple[tuple[str, tuple[int, ...], str], ...]

    @classmethod
    def of(cls, record: ArrayRecord, whole: Sequence[str] = BUFFERS) -> Self:
        """`whole`: patterns of names that travel as they are, beside all that is no array of floats."""

        def dtype(name: str, array: Array) -> str:
            floats = array.stype == NUMPY and array.dtype in FLOATS
            return (
                array.dtype
                if floats and not any(fnmatchcase(name, pattern) for pattern in whole)
                else ""
            )

        return cls(
            tuple((name, tuple(array.shape), dtype(name, array)) for name, array in record.items())
        )

    def pack(self) -> bytes:
        return json.dumps(self.arrays, separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Raises ProtocolError."""
        try:
            arrays = tuple(
                (str(name), tuple(map(int, shape)), str(dtype))
                for name, shape, dtype in json.loads(data)
            )
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(
                "the names and shapes of the model's arrays cannot be read"
            ) from error
        if not all(
            dtype in ("", *FLOATS) and min(shape, default=0) >= 0 for _, shape, dtype in arrays
        ):
            raise ProtocolError("the model has arrays that do not fit into a vector")
        return cls(arrays)

    @cached_property
    def layout(self) -> Layout:
        return Layout.from_shapes({name: shape for name, shape, dtype in self.arrays if dtype})

    @cached_property
    def _whole(self) -> set[str]:
        return {name for name, _, dtype in self.arrays if not dtype}

    def given(self, vector: Tensor, record: ArrayRecord) -> Tensor:
        """The vector that a record of this vector holds: another one where its arrays are too short for its values."""
        return (
            self.vector(record)
            if any(dtype == "float16" for _, _, dtype in self.arrays)
            else vector
        )

    def fits(self, record: ArrayRecord) -> bool:
        """Whether a record has these names and shapes, in any order."""
        return {name: tuple(array.shape) for name, array in record.items()} == {
            name: shape for name, shape, _ in self.arrays
        }

    def vector(self, record: ArrayRecord) -> Tensor:
        """The vector [numel], float32, fresh. Raises ProtocolError where an array cannot be read or is not what its record says."""
        vector = torch.empty(self.layout.numel)
        for entry in self.layout:
            values = values_of(entry.name, record[entry.name])
            if values.shape != entry.shape or values.dtype.kind not in "fiu":
                given = f"{values.dtype} of shape {list(values.shape)}"
                raise ProtocolError(
                    f"array '{entry.name}' is {given}, the model's has {list(entry.shape)}"
                )
            vector[entry.span] = torch.from_numpy(
                np.ascontiguousarray(values, np.float32).reshape(-1)
            )
        return vector

    def whole(self, record: Mapping[str, Array]) -> dict[str, Array]:
        """The arrays of a record that travel as they are."""
        return {name: array for name, array in record.items() if name in self._whole}

    def check_whole(self, whole: Mapping[str, Array]) -> None:
        """Raises ProtocolError unless these are all the arrays that travel as they are, readable, finite and of their shapes."""
        if set(whole) != self._whole:
            raise ProtocolError(
                f"arrays {sorted(set(whole) ^ self._whole)[:3]} are missing, or not part of the model"
            )
        shapes = {name: shape for name, shape, _ in self.arrays}
        for name, array in whole.items():
            if array.stype != NUMPY:
                continue
            values = values_of(name, array)
            if values.shape != shapes[name] or tuple(array.shape) != shapes[name]:
                raise ProtocolError(
                    f"array '{name}' has the shape {list(values.shape)}, the model's has {list(shapes[name])}"
                )
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                raise ProtocolError(f"array '{name}' holds NaN or infinity")

    def record(self, vector: Tensor, whole: Mapping[str, Array]) -> ArrayRecord:
        """The arrays of a vector [numel] and of what travelled as it is, in the model's order."""
        views = self.layout.views(vector)
        return ArrayRecord(
            {
                name: Array(views[name].numpy().astype(dtype)) if dtype else whole[name]
                for name, _, dtype in self.arrays
            }
        )


def values_of(name: str, array: Array) -> np.ndarray:
    """The values of an array. Raises ProtocolError."""
    try:
        return array.numpy()
    except (TypeError, ValueError, OSError, EOFError, MemoryError) as error:
        raise ProtocolError(
            f"array '{name}' cannot be read ({str(error) or type(error).__name__})"
        ) from error
