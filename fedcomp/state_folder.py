"""The folder in which a client stores its state: one file with named vectors and byte strings.

Each save replaces the whole file atomically. If the process is killed at any moment, the folder contains the last complete state. The file
consists of three parts:

    length   of the header, 8 bytes, little-endian
    header   JSON: the name, kind and length in bytes of each value, and the CRC-32 of all values
    bodies   the values, one after the other, in the order of the header; vectors as float32

Pickle is not used, because loading a pickle can execute code.
"""

import fcntl
import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import durable_files
from .errors import CheckpointError, UserError, os_errors

FILE, LOCK = "state.bin", "lock"
LENGTH = struct.Struct("<Q")

State = Mapping[
    str, Tensor | bytes | list[bytes]
]  # values by name; a list is stored as one byte string


class StateFolder:
    """The state folder of one client, which this object locks. Raises UserError if the folder cannot be used or is locked already."""

    def __init__(self, path: Path):
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            advice = "wait until it ends, or give another folder"
            raise UserError(f"another client uses --state-dir {path}; {advice}") from None
        except OSError as error:
            found = f"--state-dir {path} cannot be used ({error.strerror})"
            raise UserError(f"{found}; give a folder that can be written") from error

    def close(self) -> None:
        os.close(self._lock)

    def save(self, state: State, name: str = FILE) -> None:
        """Replace the stored state and flush it to disk. On failure, keep the previous state and raise CheckpointError."""
        advice = (
            "free disk space, and start the client again, which continues from its previous state"
        )
        with os_errors(CheckpointError, f"--state-dir {self.path} cannot be written", advice):
            durable_files.replace(self.path / name, packed(state), 0o600)

    def load(self, name: str = FILE) -> dict[str, Any]:
        """Return the stored vectors and byte strings by name, or {} if nothing was saved yet.

        Raises CheckpointError for a damaged file, and UserError for a file that cannot be read.
        """
        path = self.path / name
        try:
            data = bytearray(path.stat().st_size)
            with path.open("rb") as file:
                del data[file.readinto(data) :]
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise UserError(
                f"{path} cannot be read ({error.strerror}); make it readable, or give another --state-dir"
            ) from error
        try:
            return unpacked(data)
        except ValueError as error:
            raise CheckpointError(
                f"{path} is damaged; remove this file to start as a new client"
            ) from error


def packed(state: State) -> list[bytes | memoryview]:
    """Return the content of a state file as parts to be concatenated. Vectors on the CPU are not copied."""
    crc, table = 0, []
    bodies: list[bytes | memoryview] = []
    for key, value in state.items():
        kind = "vector" if isinstance(value, Tensor) else "bytes"
        parts: Sequence[bytes | memoryview] = value if isinstance(value, list) else [_raw(value)]
        for part in parts:
            crc = zlib.crc32(part, crc)
        table.append([key, kind, sum(map(len, parts))])
        bodies += parts
    header = json.dumps({"crc": crc, "bodies": table}).encode()
    return [LENGTH.pack(len(header)), header, *bodies]


def unpacked(data: bytearray) -> dict[str, Any]:
    """Parse the content of a state file, and return its vectors and byte strings by name. Raises ValueError for damaged data."""
    try:
        start = LENGTH.size + LENGTH.unpack_from(data)[0]
        header = json.loads(data[LENGTH.size : start])
        state: dict[str, Any] = {}
        if zlib.crc32(memoryview(data)[start:]) != header["crc"]:
            raise ValueError("the checksum of the values does not match")
        for key, kind, length in header["bodies"]:
            body = memoryview(data)[start : start + length]
            state[key] = bytes(body) if kind == "bytes" else _vector(body)
            start += length
        return state
    except (struct.error, KeyError, TypeError) as error:
        raise ValueError(f"the header of the state file cannot be read ({error})") from error


def _raw(value: Tensor | bytes) -> bytes | memoryview:
    if isinstance(value, bytes):
        return value
    return value.detach().cpu().contiguous().numpy().view(np.uint8).data


def _vector(body: memoryview) -> Tensor:
    return torch.frombuffer(body, dtype=torch.float32).clone() if body else torch.empty(0)
