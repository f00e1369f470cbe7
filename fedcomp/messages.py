"""The messages between a server and its clients: flat values that any transport can carry.

    Invitation   server → client   the run and its options
    Presence     client → server   the client's id and version, or the reason why it cannot take part
    Assignment   server → client   the broadcasts that the client missed, the proposal that was accepted, and the work of this phase
    Report       client → server   a frame or the reason why there is none, and the client's version
    Farewell     server → client   the run is over

Versions are names in a hash chain: the first is the hash of the initial weights, each next one the hash of its
predecessor and the broadcast that was added. A fingerprint is a hash of the weights themselves.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

from .errors import ProtocolError

# Forms of a download.
UP_TO_DATE, FRAMES, OVERWRITE, DENSE = "up-to-date", "frames", "overwrite", "dense"
UPDATE, NEED_DENSE, FAILED = "update", "need-dense", "failed"  # kinds of a report
TRAIN = "train"  # the phase of strategies that have one
LENGTH = struct.Struct("<I")
compact_json = functools.partial(json.dumps, separators=(",", ":"))  # JSON without spaces


@dataclass
class WireMessage:
    """A message: flat fields of str, int, float, bytes or list[bytes], checked when it is unpacked.

    As bytes: the length of the header (4 bytes, little-endian), the header, and then the bytes of the fields of
    bytes, one after the other. The header is a JSON list: the name of the message and its fields in order; a field of
    bytes is given by its length, a list by its lengths.
    """

    def pack(self) -> bytes:
        header: list[Any] = [type(self).__name__]
        blobs: list[bytes] = []
        for name, _ in _fields(type(self)):
            value = getattr(self, name)
            if isinstance(value, bytes):
                blobs.append(value)
                value = len(value)
            elif isinstance(value, list):
                blobs += value
                value = [len(part) for part in value]
            header.append(value)
        head = compact_json(header).encode()
        return b"".join([LENGTH.pack(len(head)), head, *blobs])

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Parse one whole message. Raises ProtocolError for other fields, and for fields of other types."""
        fields = _fields(cls)
        try:
            start = LENGTH.size + LENGTH.unpack_from(data)[0]
            header = json.loads(data[LENGTH.size : start])
        except (struct.error, ValueError, RecursionError) as error:
            raise ProtocolError(f"the header of the {cls.__name__} cannot be read") from error
        if type(header) is not list or len(header) != len(fields) + 1 or header[0] != cls.__name__:
            raise ProtocolError(
                f"the message is not {cls.__name__}; both sides need the same version of fedcomp"
            )
        values: list[Any] = []
        for (name, kind), value in zip(fields, header[1:], strict=True):
            if kind is bytes and type(value) is int and value >= 0:
                values.append(data[start : start + value])
                start += value
            elif (
                kind == list[bytes]
                and type(value) is list
                and all(type(length) is int and length >= 0 for length in value)
            ):
                ends = list(itertools.accumulate(value, initial=start))
                values.append([data[a:b] for a, b in itertools.pairwise(ends)])
                start = ends[-1]
            elif type(value) is kind:
                values.append(value)
            else:
                raise ProtocolError(
                    f"{cls.__name__}.{name} is not of type {getattr(kind, '__name__', kind)}"
                )
        if start != len(data):
            raise ProtocolError(f"the {cls.__name__} has {len(data)} bytes and claims {start}")
        return cls(*values)


@functools.cache
def _fields(cls: type) -> tuple[tuple[str, Any], ...]:
    return tuple((f.name, f.type) for f in dataclasses.fields(cls))


@dataclass
class Invitation(WireMessage):
    run: str  # name of the run, 32 hex digits; the same when it is resumed
    client: int  # logical id that belongs to the client's key; -1: the client names its own
    options: str  # JSON: the run's options that decide what a client does
    layout: str  # fingerprint of the model's layout
    version: str  # that the run started from


@dataclass
class Presence(WireMessage):
    run: str
    client: int  # logical id
    version: str  # of the client's weights
    reason: str  # why it cannot take part; "" if it can
    key: bytes = b""  # its public key, a compressed P-384 point; b"" if its certificate tells it


@dataclass
class Farewell(WireMessage):
    run: str
    round: int  # the last one


@dataclass
class Assignment(WireMessage):
    round: int
    phase: str  # "train", or one of the strategy's
    client: int  # logical id
    form: str  # of the download: UP_TO_DATE, FRAMES, OVERWRITE or DENSE
    base: str  # version that the download starts from; "" for DENSE
    version: str  # version that it leads to
    fingerprint: str  # of the weights there
    frames: list[bytes]  # the download
    accepted: str  # ticket of the client's last proposal that was accepted, "" for none
    announced: list[bytes] = field(default_factory=list)  # further inputs: name, value, name, …
    density: float = 0.0  # of the uplink codec in this round; 0 = its own
    lr: float = 1.0  # this round's learning rate as a multiple of the client's
    returned: bytes = b""  # the dropped part of the accepted proposal as a frame, b"" for nothing
    steps: int = 0  # of local SGD in this round; 0 = the client's own
    batch_size: int = 0  # examples in a step of this round; 0 = the client's own
    evaluate: int = 0  # 1: the client evaluates the model that it received before it trains


@dataclass
class Report(WireMessage):
    round: int
    phase: str
    client: int
    kind: str  # UPDATE, NEED_DENSE or FAILED
    version: str  # that the client is at, and that the frame was made from
    fingerprint: str  # of the client's weights
    frame: bytes  # b"" when there is nothing to send
    ticket: str  # names this proposal
    examples: int  # that the update counts for: those of the client's data, or as its train_fn says
    loss: float  # mean training loss before each local step
    stage: str  # where a FAILED client failed: "phase", "download", "evaluate", "train", "encode"
    reason: str
    after: str = ""  # ticket of the proposal that the client's memory last committed, "" for none
    metrics: bytes = b""  # packed ReportedMetrics, b"" for none


@dataclass(frozen=True)
class ClientRoundConfig:
    """The settings of a client for one round, which an Assignment carries."""

    density: float = 0.0  # of the uplink codec; 0: its own
    lr: float = 1.0  # multiple of the client's learning rate
    steps: int = 0  # of local SGD; 0: the client's own
    batch_size: int = 0  # examples; 0: the client's own


MAX_METRICS = 64  # from training, and likewise from evaluation
MAX_NAME_BYTES = 64  # bytes of UTF-8
METRICS_HEAD, DOUBLE = struct.Struct("<QB"), struct.Struct("<d")
MAX_EXAMPLES = 1 << 53  # in one report: float64 holds every integer up to here
MAX_METRICS_BYTES = METRICS_HEAD.size + 2 * MAX_METRICS * (
    1 + MAX_NAME_BYTES + DOUBLE.size
)  # bytes


@dataclass(frozen=True)
class ReportedMetrics:
    """Named numbers that a client reports, as bytes in `Report.metrics`.

    The examples of the evaluation (8 bytes, little-endian), the number of training metrics (1 byte), and for each metric, those of
    training first: the length of its name (1 byte), the name in UTF-8, the number (float64, little-endian).
    """

    training: Mapping[str, float] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)
    examples: int = 0  # that the client evaluated the model on

    def pack(self) -> bytes:
        """Return the metrics as bytes, b"" for none. Raises ProtocolError for names that are not allowed."""
        if not self.training and not self.evaluation:
            return b""
        check_metric_names(self.training)
        check_metric_names(self.evaluation)
        pieces = [METRICS_HEAD.pack(self.examples, len(self.training))]
        for name, value in (*self.training.items(), *self.evaluation.items()):
            encoded = name.encode()
            pieces += [bytes([len(encoded)]), encoded, DOUBLE.pack(value)]
        return b"".join(pieces)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the metrics that `pack` packed. Raises ProtocolError for other bytes."""
        if not data:
            return cls()
        if len(data) > MAX_METRICS_BYTES:
            raise ProtocolError(
                f"the metrics have {len(data)} bytes; at most {MAX_METRICS_BYTES} are allowed"
            )
        try:
            examples, training = METRICS_HEAD.unpack_from(data)
            at, found = METRICS_HEAD.size, []
            while at < len(data):
                end = at + 1 + data[at]
                found.append((data[at + 1 : end].decode(), *DOUBLE.unpack_from(data, end)))
                at = end + DOUBLE.size
        except (struct.error, UnicodeDecodeError) as error:
            raise ProtocolError("the metrics cannot be read") from error
        made = cls(dict(found[:training]), dict(found[training:]), examples)
        check_metric_names(made.training)
        check_metric_names(made.evaluation)
        count = len(made.training) + len(made.evaluation)
        if not found or (len(made.training), count) != (training, len(found)):
            raise ProtocolError("the metrics name a number twice, or fewer than they claim")
        if not bool(made.evaluation) <= examples <= MAX_EXAMPLES * bool(made.evaluation):
            raise ProtocolError(f"the metrics are of {examples} examples")
        return made


def check_metric_names(names: Collection[str]) -> None:
    """Raise ProtocolError for more than 64 names, and for a name that is not 1 to 64 printable bytes of UTF-8."""
    if len(names) > MAX_METRICS:
        raise ProtocolError(f"there are {len(names)} metrics; give at most {MAX_METRICS}")
    for name in names:
        if not name.isprintable() or not 0 < len(name.encode()) <= MAX_NAME_BYTES:
            raise ProtocolError(
                f"the metric {name[:MAX_NAME_BYTES]!r} has no printable name of 1 to {MAX_NAME_BYTES} bytes"
            )


def failure(
    assignment: Assignment,
    stage: str,
    reason: str,
    version: str = "",
    fingerprint: str = "",
    kind: str = FAILED,
) -> Report:
    """Return the report of a client that has no update."""
    a = assignment
    return Report(
        a.round, a.phase, a.client, kind, version, fingerprint, b"", "", 0, 0.0, stage, reason
    )


def ticket(round: int, client: int, frame: bytes) -> str:
    """Return the name of a proposal, which depends on its round, client and frame; "" if there is nothing to send."""
    return _digest(f"{round}:{client}:", frame)[:16] if frame else ""


def fingerprint(weights: Tensor) -> str:
    """Return the hash of a float32 vector, 32 hex digits."""
    return hashlib.sha256(weights.detach().cpu().contiguous().numpy()).hexdigest()[:32]


def initial_version(weights: Tensor, layout_fingerprint: str) -> str:
    """Return the name of the version that a run starts from."""
    return hashlib.sha256(f"{layout_fingerprint}:{fingerprint(weights)}".encode()).hexdigest()[:32]


def next_version(version: str, frame: bytes) -> str:
    """Return the name of the version after `frame` is added."""
    return _digest(version, frame)[:32]


def _digest(name: str, frame: bytes) -> str:
    """Return the SHA-256 of a name and a frame, without a copy of the frame."""
    digest = hashlib.sha256(name.encode())
    digest.update(frame)
    return digest.hexdigest()
