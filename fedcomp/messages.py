"""The messages between a server and its clients, which every transport can carry.

    Invitation (server → client):   the run and its options;
    Presence (client → server):     the client's id and the version of its weights, or the reason why it cannot take part;
        Assignment (server → client):   a download, the ticket (hash) of the last accepted update, and settings of this phase of a round;
        Report (client → server):       a frame (encoded update) or the reason why there is none, and the version of the client's weights;
    Farewell (server → client):     the end of the run

A round has one or more phases, which the strategy defines. In each phase, the server sends assignments, and the clients answer with
reports. The following terms are used:

logical id    the number of a client in the run (0, 1, …), which stays the same when the client reconnects or its key is renewed
version       the name of the model's weights: initially a hash of the model's layout and weights; each broadcast (encoded change of the
              model) replaces it with a hash of the previous version and the broadcast
fingerprint   a hash of the model's weights
proposal      a frame (encoded update) that a client sends; the client's error-feedback memory keeps its old state until the client learns
              whether the server accepted the proposal
ticket        a hash that identifies a proposal
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

from .errors import ProtocolError

# Forms of a download, which updates a client's weights to the current version of the model.
# They are: nothing, broadcasts, new values of changed coordinates, and all weights.
UP_TO_DATE, FRAMES, OVERWRITE, DENSE = "up-to-date", "frames", "overwrite", "dense"
UPDATE, NEED_DENSE, FAILED = "update", "need-dense", "failed"  # kinds of a client's report
TRAIN = "train"  # name of the phase in strategies with a single phase per round
LENGTH = struct.Struct("<I")
# Placeholder for fingerprints (hashes) in messages that never leave this process.
NOT_COMPUTED = "not computed"
_in_process: ContextVar[bool] = ContextVar("in_process", default=False)
compact_json = functools.partial(json.dumps, separators=(",", ":"))  # JSON without spaces


@dataclass
class WireMessage:
    """Base class of messages, which are dataclasses with fields of type str, int, float, bytes or list[bytes].

    A packed message consists of the length of the header (4 bytes, little-endian), the header, and the contents of all bytes and
    list[bytes] fields. The header is a JSON list with the name of the message class and the values of its fields; for bytes and list[bytes]
    fields, it contains the lengths instead of the contents.
    """

    def pack(self) -> bytes:
        return b"".join(self.pack_parts())

    def pack_parts(self) -> list[bytes]:
        """Return the packed message as parts to be concatenated, so that the contents of the fields are not copied."""
        header: list[Any] = [type(self).__name__]
        blobs: list[bytes] = []
        for name, _ in fields_of(type(self)):
            value = getattr(self, name)
            if isinstance(value, bytes):
                blobs.append(value)
                value = len(value)
            elif isinstance(value, list):
                blobs += value
                value = [len(part) for part in value]
            header.append(value)
        head = compact_json(header).encode()
        return [LENGTH.pack(len(head)), head, *blobs]

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Parse a packed message. Raises ProtocolError for a message of another class, and for fields of the wrong type or length."""
        fields, message = fields_of(cls), cls.__name__
        try:
            start = LENGTH.size + LENGTH.unpack_from(data)[0]
            header = json.loads(data[LENGTH.size : start])
        except (struct.error, ValueError, RecursionError) as error:
            raise ProtocolError(f"the header of the {message} cannot be read") from error
        if type(header) is not list or len(header) != len(fields) + 1 or header[0] != message:
            advice = "use the same version of fedcomp on both sides"
            raise ProtocolError(f"a message of type {message} was expected; {advice}")
        values: list[Any] = []
        for (name, kind), value in zip(fields, header[1:], strict=True):
            if kind is bytes and _is_length(value):
                values.append(data[start : start + value])
                start += value
            elif kind == list[bytes] and type(value) is list and all(map(_is_length, value)):
                ends = list(itertools.accumulate(value, initial=start))
                values.append([data[a:b] for a, b in itertools.pairwise(ends)])
                start = ends[-1]
            elif type(value) is kind:
                values.append(value)
            else:
                wanted = getattr(kind, "__name__", kind)
                raise ProtocolError(f"the field {name} of the {message} is not of type {wanted}")
        if start != len(data):
            raise ProtocolError(
                f"the {message} has {len(data)} bytes, but its header specifies {start}"
            )
        return cls(*values)


def _is_length(value: object) -> bool:
    return type(value) is int and value >= 0


def fields_of(cls: type) -> list[tuple[str, Any]]:
    """Return the name and the type of each field of a dataclass."""
    return [(f.name, f.type) for f in dataclasses.fields(cls)]


@dataclass
class Invitation(WireMessage):
    """The name and the options of the run, sent to a client that connects."""

    run: str  # name of the run, 32 hex digits; a resumed run keeps its name
    client: int  # logical id that belongs to the client's key, or -1 if the client chooses its id
    options: str  # the options of the run that clients need, as JSON
    layout: str  # hash of the model's layout (tensor names and shapes)
    version: str  # version (hash) of the initial model


@dataclass
class Presence(WireMessage):
    """A client's answer to an invitation."""

    run: str  # name of the run, as in the invitation
    client: int  # logical id
    version: str  # version of the client's weights
    reason: str  # why the client cannot take part, or "" if it can
    # Public key of the client (elliptic curve P-384, compressed form), or b"" if the client's certificate contains it.
    key: bytes = b""


@dataclass
class Farewell(WireMessage):
    """The notice that the run is over."""

    run: str  # name of the run, as in the invitation
    round: int  # the last round


@dataclass
class Assignment(WireMessage):
    """The work of a client in one phase of a round, and a download that updates the client's weights to the current model."""

    round: int  # from 1
    phase: str  # name of the phase, such as "train"
    client: int  # logical id
    form: str  # download form, such as FRAMES (encoded broadcasts) or DENSE (all weights)
    base: str  # version to which the client applies the download, or "" if any version will do (DENSE)
    version: str  # version of the client's weights after the download
    fingerprint: str  # fingerprint of the weights after the download
    frames: list[bytes]  # frames (encoded vectors) of the download
    accepted: str  # ticket (hash) of the client's last accepted update, or ""
    # Data that the strategy announces to clients, as a flat list: name, value, name, value, …
    announced: list[bytes] = field(default_factory=list)
    density: float = 0.0  # fraction of coordinates to send; 0 = as in the options of the run
    lr: float = 1.0  # number by which the client multiplies its learning rate in this round
    # Frame with the coordinates of the client's accepted update that the server did not use, or b"" if it used all coordinates.
    returned: bytes = b""
    steps: int = 0  # number of local steps in this round; 0 = as in the options of the run
    batch_size: int = 0  # number of examples in a local step; 0 = as in the options of the run
    evaluate: int = 0  # 1 if the client must evaluate the received model before training, else 0

    @property
    def announcements(self) -> dict[str, bytes]:
        """The data that the strategy announces to clients, by name."""
        names, values = self.announced[::2], self.announced[1::2]
        return {name.decode(): value for name, value in zip(names, values, strict=True)}


@dataclass
class Report(WireMessage):
    """A client's answer to an assignment."""

    round: int  # round, phase and client are as in the assignment
    phase: str
    client: int
    kind: str  # UPDATE, NEED_DENSE (all weights needed) or FAILED
    version: str  # version of the weights from which the client computed the update
    fingerprint: str  # fingerprint of the client's weights
    frame: bytes = b""  # the encoded update; b"" if there is nothing to send
    ticket: str = ""  # ticket (hash) of the encoded update in `frame`
    # Number of the client's examples, or the number of examples that the task's train_fn returned.
    examples: int = 0
    loss: float = 0.0  # training loss, averaged over the local steps
    stage: str = ""  # stage of the failure: phase, download, evaluate, train or encode
    reason: str = ""  # why the client failed, as one sentence
    # Ticket (hash) of the last update that the client's error-feedback memory recorded as accepted, or "".
    committed: str = ""
    metrics: bytes = b""  # result of `ReportedMetrics.pack`


@dataclass(frozen=True)
class ClientRoundConfig:
    """The settings of a client for one round, with the meaning of the fields of the same names in Assignment."""

    density: float = 0.0
    lr: float = 1.0
    steps: int = 0
    batch_size: int = 0


MAX_METRICS = 64  # maximum number of training metrics, and of evaluation metrics, in a report
MAX_NAME_BYTES = 64  # maximum bytes of a metric's name in UTF-8
# The head of packed metrics (number of evaluation examples, number of training metrics), and a metric's value.
METRICS_HEAD, DOUBLE = struct.Struct("<QB"), struct.Struct("<d")
# Maximum number of examples in a report. float64 represents every integer up to this number.
MAX_EXAMPLES = 1 << 53
MAX_METRICS_BYTES = METRICS_HEAD.size + 2 * MAX_METRICS * (1 + MAX_NAME_BYTES + DOUBLE.size)


@dataclass(frozen=True)
class ReportedMetrics:
    """The metrics that a client reports, packed in `Report.metrics`.

    The packed form consists of the number of evaluation examples (8 bytes, little-endian), the number of training metrics (1 byte), the
    training metrics and the evaluation metrics. Each metric is packed as the length of its name (1 byte), the name in UTF-8, and the value
    (float64, little-endian).
    """

    training: Mapping[str, float] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)
    examples: int = 0  # number of examples on which the client evaluated the model

    def pack(self) -> bytes:
        """Return the metrics as bytes, or b"" if there are none. Raises ProtocolError for too many metrics or invalid names."""
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
        """Return the metrics that `pack` packed. Raises ProtocolError if `data` is malformed."""
        if not data:
            return cls()
        if (size := len(data)) > (most := MAX_METRICS_BYTES):
            raise ProtocolError(f"the metrics have {size} bytes; at most {most} are allowed")
        try:
            examples, training = METRICS_HEAD.unpack_from(data)
            offset, items = METRICS_HEAD.size, []
            while offset < len(data):
                end = offset + 1 + data[offset]
                items.append((data[offset + 1 : end].decode(), *DOUBLE.unpack_from(data, end)))
                offset = end + DOUBLE.size
        except (struct.error, UnicodeDecodeError) as error:
            raise ProtocolError(
                "the metrics of the report are malformed; use the same version of fedcomp on both sides"
            ) from error
        metrics = cls(dict(items[:training]), dict(items[training:]), examples)
        if metrics.pack() != data:
            raise ProtocolError(
                "the metrics have a duplicate name, or fewer training metrics than their header specifies"
            )
        if not bool(metrics.evaluation) <= examples <= MAX_EXAMPLES * bool(metrics.evaluation):
            n = len(metrics.evaluation)
            raise ProtocolError(
                f"the report has {n} evaluation metrics, but its number of evaluation examples is {examples}"
            )
        return metrics


def check_metric_names(names: Collection[str]) -> None:
    """Raise ProtocolError for more than 64 names, or for a name that is not 1 to 64 bytes of printable UTF-8 text."""
    if len(names) > MAX_METRICS:
        raise ProtocolError(f"there are {len(names)} metrics; report at most {MAX_METRICS}")
    for name in names:
        if not name.isprintable() or not 0 < len(name.encode()) <= MAX_NAME_BYTES:
            raise ProtocolError(
                f"the metric name {name[:MAX_NAME_BYTES]!r} is not printable text of 1 to {MAX_NAME_BYTES} bytes"
            )


def failure(
    a: Assignment,
    stage: str,
    reason: str,
    version: str = "",
    fingerprint: str = "",
    kind: str = FAILED,
) -> Report:
    """Return the report of a client that cannot answer the assignment `a` with an update."""
    about = (a.round, a.phase, a.client, kind, version, fingerprint)
    return Report(*about, stage=stage, reason=reason)


def ticket(round: int, client: int, frame: bytes) -> str:
    """Return the ticket of the proposal (encoded update) `frame`: a hash of round, client and frame, or "" for an empty frame."""
    return _digest(f"{round}:{client}:", frame)[:16] if frame else ""


@contextmanager
def in_process() -> Iterator[None]:
    """In a `with` block, compute no checksums of frames and no hashes of weights, because messages do not leave this process."""
    token = _in_process.set(True)
    try:
        yield
    finally:
        _in_process.reset(token)


def skips_checksums() -> bool:
    """Return whether the caller runs in a `with in_process()` block."""
    return _in_process.get()


def fingerprint(weights: Tensor) -> str:
    """Return the hash of a float32 vector as 32 hex digits, or NOT_COMPUTED in a `with in_process()` block."""
    if skips_checksums():
        return NOT_COMPUTED
    return hashlib.sha256(weights.detach().cpu().contiguous().numpy().data).hexdigest()[:32]


def initial_version(weights: Tensor, layout_fingerprint: str) -> str:
    """Return the version of a run's initial model: a hash of the layout and the weights, as 32 hex digits."""
    return hashlib.sha256(f"{layout_fingerprint}:{fingerprint(weights)}".encode()).hexdigest()[:32]


def next_version(version: str, frame: bytes) -> str:
    """Return the version (32 hex digits) that results from applying the broadcast `frame` to the model with version `version`."""
    return _digest(version, frame)[:32]


def _digest(name: str, frame: bytes) -> str:
    digest = hashlib.sha256(name.encode())
    digest.update(frame)  # not concatenated, because this would copy the frame
    return digest.hexdigest()
