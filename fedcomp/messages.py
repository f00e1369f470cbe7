"""What a server and a client say to each other in a round, as flat values that any transport can carry.

    Assignment   server → client   what the client misses, what was accepted of it, and what to do now
    Report       client → server   a frame, or why there is none; and the version that the client is at

Versions are names in a hash chain: the first is the hash of the initial weights, each next one the hash of its predecessor and the broadcast that
was added. A fingerprint is a hash of the weights themselves.
"""

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from .errors import ProtocolError

UP_TO_DATE, FRAMES, OVERWRITE, DENSE = "up-to-date", "frames", "overwrite", "dense"  # forms of a download
UPDATE, NEED_DENSE, FAILED = "update", "need-dense", "failed"  # kinds of a report


@dataclass(frozen=True)
class Values:
    """A message as a flat dictionary, checked on the way in."""

    def to_values(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Self:
        """Raises ProtocolError when a field is missing, unknown or of another type."""
        fields = {f.name: f.type for f in dataclasses.fields(cls)}
        if set(values) != set(fields):
            raise ProtocolError(f"{cls.__name__} has the fields {sorted(values)}; expected {sorted(fields)}")
        for name, value in values.items():
            if type(value) is not (list if fields[name] == list[bytes] else fields[name]):
                raise ProtocolError(f"{cls.__name__}.{name} is a {type(value).__name__}; expected {fields[name]}")
        return cls(**{name: list(value) if type(value) is list else value for name, value in values.items()})


@dataclass(frozen=True)
class Assignment(Values):
    round: int
    phase: str  # "train"
    client: int  # logical id
    form: str  # of the download: UP_TO_DATE, FRAMES, OVERWRITE or DENSE
    base: str  # version that the download starts from; "" for DENSE
    version: str  # version that it leads to
    fingerprint: str  # of the weights there
    frames: list[bytes]  # the download
    accepted: str  # ticket of the client's last proposal that was accepted, "" for none
    announced: bytes = b""  # what the phase needs besides: candidates, a factor, a shared scale


@dataclass(frozen=True)
class Report(Values):
    round: int
    phase: str
    client: int
    kind: str  # UPDATE, NEED_DENSE or FAILED
    version: str  # that the client is at, and that the frame was made from
    fingerprint: str  # of the client's weights
    frame: bytes  # b"" when there is nothing to send
    ticket: str  # names this proposal
    examples: int  # in the client's data
    loss: float  # mean training loss before each local step
    stage: str  # where a FAILED client failed: "download", "train", "encode"
    reason: str


def failure(assignment: Assignment, stage: str, reason: str, version: str = "", fingerprint: str = "", kind: str = FAILED) -> Report:
    """The report of a client that has no update to give."""
    a = assignment
    return Report(a.round, a.phase, a.client, kind, version, fingerprint, b"", "", 0, 0.0, stage, reason)


def ticket(round: int, client: int, frame: bytes) -> str:
    """The name of a proposal: the same frame of another round or client has another."""
    return hashlib.sha256(f"{round}:{client}:".encode() + frame).hexdigest()[:16]


def fingerprint(weights: Tensor) -> str:
    """32 hex digits of a hash of a float32 vector."""
    return hashlib.sha256(weights.detach().cpu().contiguous().numpy()).hexdigest()[:32]


def first_version(weights: Tensor, layout_fingerprint: str) -> str:
    """The name of the version that a run starts from."""
    return hashlib.sha256(f"{layout_fingerprint}:{fingerprint(weights)}".encode()).hexdigest()[:32]


def next_version(version: str, frame: bytes) -> str:
    """The name of the version that adding `frame` leads to."""
    return hashlib.sha256(version.encode() + frame).hexdigest()[:32]
