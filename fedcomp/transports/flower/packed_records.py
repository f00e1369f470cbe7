"""The split of a model (a Flower ArrayRecord) into a vector to compress and arrays that are sent uncompressed.

The vector consists of the float arrays, in the order of the record. Three kinds of arrays are sent uncompressed: arrays of other types,
such as integers; arrays that NumPy did not serialise; and arrays whose names match a pattern. The default patterns match the running
statistics of batch normalisation, because a compressed variance could become negative.
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
from ...messages import WireMessage
from .records import MESSAGE, to_records

NUMPY = "numpy.ndarray"  # `stype` (serialisation format) of the arrays that Flower makes from NumPy arrays
FLOATS = ("float16", "float32", "float64")
# Name patterns of the buffers of batch normalisation.
BUFFERS = "*running_mean", "*running_var", "*num_batches_tracked"


@dataclass
class Parcel(WireMessage):
    """A record that replaces the model in a Flower message: an encoded Assignment or Report, and the model's uncompressed arrays."""

    message: bytes  # the packed Assignment or Report
    record: str  # key of the replaced record, or "" if no record is replaced
    array_headers: str  # JSON: name, dtype, shape and stype of each array
    array_data: list[bytes]

    @classmethod
    def of(
        cls, message: WireMessage, record: str = "", uncompressed: Mapping[str, Array] | None = None
    ) -> Self:
        arrays = (uncompressed or {}).items()
        heads = json.dumps([[name, a.dtype, list(a.shape), a.stype] for name, a in arrays])
        return cls(message.pack(), record, heads, [array.data for _, array in arrays])

    def put(self, content: RecordDict, key: str) -> RecordDict:
        """Return `content` with this Parcel in place of the record `key`, or at the end if `content` has no such record."""
        packed = to_records(self)[MESSAGE]
        others = [(name, record) for name, record in content.items() if name != MESSAGE]
        put = [(MESSAGE, packed) if name == key else (name, record) for name, record in others]
        return RecordDict(dict(put if key in content else [*others, (MESSAGE, packed)]))

    def unpacked(self, content: RecordDict, arrays: ArrayRecord | None) -> RecordDict:
        """Return `content` with `arrays` under the key `record` in place of this Parcel, or without the Parcel if `arrays` is None.

        Raises ProtocolError if `content` already has a record with this key.
        """
        if self.record in content:
            raise ProtocolError(
                f"the message already has a record '{self.record}'; give it another name, because the model's arrays have this name"
            )
        records = [
            (self.record, arrays) if key == MESSAGE else (key, r) for key, r in content.items()
        ]
        return RecordDict({key: record for key, record in records if record is not None})

    @cached_property
    def uncompressed(self) -> dict[str, Array]:
        """The uncompressed arrays by name. Raises ProtocolError for malformed arrays."""
        try:
            arrays = {}
            for head, body in zip(json.loads(self.array_headers), self.array_data, strict=True):
                name, dtype, shape, stype = head
                arrays[name] = Array(dtype, tuple(shape), stype, body)
            return arrays
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(
                f"the arrays that the message contains without compression are malformed ({error})"
            ) from error


@dataclass(frozen=True)
class ArrayLayout:
    """Names, shapes and dtypes of a model's arrays, in order. The dtype is "" for an array that is sent uncompressed."""

    arrays: tuple[tuple[str, tuple[int, ...], str], ...]

    @classmethod
    def of(cls, record: ArrayRecord, uncompressed: Sequence[str] = BUFFERS) -> Self:
        """Return the layout of a record. `uncompressed`: name patterns of float arrays to send uncompressed."""

        def dtype(name: str, array: Array) -> str:
            floats = array.stype == NUMPY and array.dtype in FLOATS
            named = any(fnmatchcase(name, pattern) for pattern in uncompressed)
            return array.dtype if floats and not named else ""

        arrays = record.items()
        return cls(tuple((name, tuple(a.shape), dtype(name, a)) for name, a in arrays))

    def pack(self) -> bytes:
        return json.dumps(self.arrays, separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the layout that `pack` packed. Raises ProtocolError for malformed bytes."""
        try:
            read = json.loads(data)
            arrays = tuple((str(name), tuple(map(int, s)), str(dtype)) for name, s, dtype in read)
        except (ValueError, TypeError, RecursionError) as error:
            problem = "the names and shapes of the model's arrays cannot be read"
            raise ProtocolError(problem) from error
        for _, shape, dtype in arrays:
            if dtype not in ("", *FLOATS) or min(shape, default=0) < 0:
                raise ProtocolError("the model's layout has an invalid dtype or a negative size")
        return cls(arrays)

    @cached_property
    def vector_layout(self) -> Layout:
        """The layout of the vector to compress."""
        return Layout.from_shapes({name: shape for name, shape, dtype in self.arrays if dtype})

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape, _ in self.arrays}

    @cached_property
    def _uncompressed(self) -> set[str]:
        return {name for name, _, dtype in self.arrays if not dtype}

    def as_received(self, vector: Tensor, record: ArrayRecord) -> Tensor:
        """Return the values of a vector as a client's app receives them. `record` has these values, rounded in float16 arrays."""
        rounded = any(dtype == "float16" for _, _, dtype in self.arrays)
        return self.vector(record) if rounded else vector

    def fits(self, record: ArrayRecord) -> bool:
        """Return whether a record has the names and shapes of this layout, in any order."""
        return {name: tuple(array.shape) for name, array in record.items()} == self._shapes

    def vector(self, record: ArrayRecord) -> Tensor:
        """Return the float arrays of a record as a new float32 vector [numel].

        Raises ProtocolError for malformed arrays or other shapes.
        """
        vector = torch.empty(self.vector_layout.numel)
        for entry in self.vector_layout:
            values = values_of(entry.name, record[entry.name])
            if values.shape != entry.shape or values.dtype.kind not in "fiu":
                raise ProtocolError(
                    f"array '{entry.name}' has dtype {values.dtype} and shape {list(values.shape)}; the model's array has "
                    f"a numeric dtype and shape {list(entry.shape)}"
                )
            flat = np.ascontiguousarray(values, np.float32).reshape(-1)
            vector[entry.span] = torch.from_numpy(flat)
        return vector

    def uncompressed(self, record: Mapping[str, Array]) -> dict[str, Array]:
        """Return the arrays of a record that are sent uncompressed."""
        return {name: array for name, array in record.items() if name in self._uncompressed}

    def check_uncompressed(self, arrays: Mapping[str, Array]) -> None:
        """Raise ProtocolError unless `arrays` are exactly the layout's uncompressed arrays, with the right shapes and finite values."""
        if others := sorted(set(arrays) ^ self._uncompressed)[:3]:
            raise ProtocolError(
                "the uncompressed arrays of the reply are not those of the server's model; missing or unexpected are "
                f"{', '.join(others)} (at most 3 are named); use the same model on the server and the clients"
            )
        for name, array in arrays.items():
            if array.stype != NUMPY:
                continue
            values, shape = values_of(name, array), self._shapes[name]
            if values.shape != shape or tuple(array.shape) != shape:
                raise ProtocolError(
                    f"array '{name}' has shape {list(values.shape)}; the model's array has shape {list(shape)}"
                )
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                raise ProtocolError(f"array '{name}' holds NaN or infinity")

    def record(self, vector: Tensor, uncompressed: Mapping[str, Array]) -> ArrayRecord:
        """Combine a vector [numel] and the uncompressed arrays `uncompressed` into a record, in the model's order."""
        views, arrays = self.vector_layout.views(vector), {}
        for name, _, dtype in self.arrays:
            arrays[name] = Array(views[name].numpy().astype(dtype)) if dtype else uncompressed[name]
        return ArrayRecord(arrays)


def values_of(name: str, array: Array) -> np.ndarray:
    """Return a Flower array as a NumPy array. Raises ProtocolError if the array cannot be read."""
    try:
        return array.numpy()
    except (TypeError, ValueError, OSError, EOFError, MemoryError) as error:
        why = str(error) or type(error).__name__
        raise ProtocolError(f"array '{name}' cannot be read ({why})") from error
