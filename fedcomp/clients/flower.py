"""Everything that touches the inside of Flower: records of our messages, and the private symbols that an in-process Grid needs.

Checked against flwr 1.41. Opaque bytes travel in a ConfigRecord up to 1 MiB and above that as an Array, which Flower sends in chunks; the Array's
`stype` keeps everyone from averaging it by accident.
"""

import uuid
from collections.abc import Iterable
from typing import Any, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from ..errors import ProtocolError
from ..messages import Values

MESSAGE, BLOBS, METRICS = "fedcomp", "fedcomp.blobs", "metrics"
LARGEST_VALUE = 1 << 20  # bytes in a ConfigRecord; more goes into an Array
STYPE = "fedcomp.v1"
SUPERLINK_NODE = 1

M = TypeVar("M", bound=Values)


def to_records(message: Values, metrics: dict[str, int | float] | None = None) -> RecordDict:
    """A message as Flower records; bytes are not copied where they are small."""
    values, blobs = message.to_values(), {}
    for name, value in values.items():
        parts = value if isinstance(value, list) else [value]
        if any(isinstance(part, bytes) and len(part) > LARGEST_VALUE for part in parts):
            blobs |= {f"{name}.{i}": _array(part) for i, part in enumerate(parts)}
            values[name] = [b"" for _ in parts] if isinstance(value, list) else b""
    records: dict[str, Any] = {MESSAGE: ConfigRecord(values)}
    if blobs:
        records[BLOBS] = ArrayRecord(blobs)
    if metrics:
        records[METRICS] = MetricRecord(metrics)
    return RecordDict(records)


def from_records(records: RecordDict, kind: type[M]) -> M:
    """The message in Flower records. Raises ProtocolError when there is none of this kind."""
    if MESSAGE not in records.config_records:
        raise ProtocolError(f"the message holds no record '{MESSAGE}'; both sides need fedcomp")
    values = dict(records.config_records[MESSAGE])
    for key, array in records.array_records.get(BLOBS, {}).items():
        name, _, index = key.rpartition(".")
        if array.stype != STYPE or name not in values or not index.isdecimal():
            raise ProtocolError(f"the message holds an array '{key}' of type '{array.stype}' that is not ours")
        if isinstance(values[name], list):
            values[name] = [*values[name]]
            if int(index) >= len(values[name]):
                raise ProtocolError(f"the message holds an array '{key}' beyond its list")
            values[name][int(index)] = array.data
        else:
            values[name] = array.data
    return kind.from_values(values)


def _array(data: bytes) -> Array:
    return Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)


def identify_process() -> None:
    """Give this process the identity that `Message()` reads when no Flower process has set one."""
    if TaskIdentity._node_id is None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, SUPERLINK_NODE


def name_messages(messages: Iterable[Message]) -> list[str]:
    """Give messages the ids that a SuperLink would give them."""
    ids = []
    for message in messages:
        message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
        ids.append(message.metadata.message_id)
    return ids
