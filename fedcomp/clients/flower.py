"""Everything that touches the inside of Flower: records of our messages, and the private symbols that an in-process Grid needs.

Checked against flwr 1.41. A message travels as one value: bytes in a ConfigRecord up to 1 MiB, and above that an
Array, which Flower sends in chunks; the Array's `stype` keeps everyone from averaging it by accident.
"""

import itertools
from collections.abc import Iterable
from importlib import metadata
from typing import Any, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from ..errors import ConfigError, ProtocolError
from ..messages import Values

MESSAGE, METRICS = "fedcomp", "metrics"
LARGEST_VALUE = 1 << 20  # bytes in a ConfigRecord; more goes into an Array
STYPE = "fedcomp.v1"
SUPERLINK_NODE = 1
_NUMBERS = itertools.count(1)

CHECKED = "1.41."

M = TypeVar("M", bound=Values)

if not (found := metadata.version("flwr")).startswith(CHECKED):
    raise ConfigError(f"flwr {found} is installed, fedcomp is checked against {CHECKED}*; install it with: pip install 'flwr=={CHECKED}*'")


def to_records(message: Values, metrics: dict[str, int | float] | None = None) -> RecordDict:
    """A message as Flower records, with metrics beside it for those who read Flower's own."""
    data = message.pack()
    records: dict[str, Any] = {}
    if len(data) <= LARGEST_VALUE:
        records[MESSAGE] = ConfigRecord({MESSAGE: data})
    else:
        records[MESSAGE] = ArrayRecord({MESSAGE: Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)})
    if metrics:
        records[METRICS] = MetricRecord(metrics)
    made = RecordDict(records)
    made.origin = message, data
    return made


def from_records(records: RecordDict, kind: type[M]) -> M:
    """The message in Flower records. Raises ProtocolError when there is none of this kind."""
    record = records.get(MESSAGE)
    value = record.get(MESSAGE) if isinstance(record, ConfigRecord | ArrayRecord) else None
    data = value.data if isinstance(value, Array) and value.stype == STYPE else value
    message, packed = getattr(records, "origin", (None, b""))
    if data is packed and isinstance(message, kind):
        return message  # made in this process and carried as it was: no need to read it back
    if not isinstance(data, bytes):
        raise ProtocolError(f"the message holds no record '{MESSAGE}' of bytes; both sides need fedcomp")
    return kind.unpack(data)


def identify_process() -> None:
    """Give this process the identity that `Message()` reads when no Flower process has set one."""
    if TaskIdentity._node_id is None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, SUPERLINK_NODE


def empty_run() -> Run:
    """The run that a Grid without a SuperLink belongs to."""
    return Run.create_empty(1)


def name_messages(messages: Iterable[Message]) -> list[str]:
    """Give messages ids that are theirs alone in this process, as a SuperLink would."""
    ids = []
    for message in messages:
        message.metadata.__dict__["_message_id"] = str(next(_NUMBERS))
        ids.append(message.metadata.message_id)
    return ids
