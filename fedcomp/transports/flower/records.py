"""fedcomp's messages as Flower records.

A message of up to 1 MiB is a value in a ConfigRecord. A larger message is an Array, because Flower sends arrays in chunks. The Array has
its own `stype` (name of a serialisation format), so that no Flower strategy averages it as if it were a model.
"""

from typing import TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from ...errors import ProtocolError
from ...messages import WireMessage

MESSAGE, METRICS = "fedcomp", "metrics"  # names of records
MAX_CONFIG_BYTES = 1 << 20  # largest message that is sent as a ConfigRecord
STYPE = "fedcomp.v1"

M = TypeVar("M", bound=WireMessage)


def to_records(message: WireMessage, metrics: dict[str, int | float] | None = None) -> RecordDict:
    """Return a message as Flower records, with `metrics` as a MetricRecord, from which Flower's own strategies read metrics."""
    data = message.pack()
    if len(data) <= MAX_CONFIG_BYTES:
        records = RecordDict({MESSAGE: ConfigRecord({MESSAGE: data})})
    else:
        array = Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)
        records = RecordDict({MESSAGE: ArrayRecord({MESSAGE: array})})
    if metrics:
        records[METRICS] = MetricRecord({**metrics})
    return records


def from_records(records: RecordDict, kind: type[M]) -> M:
    """Return the fedcomp message in Flower records. Raises ProtocolError if the records hold no message of this kind."""
    record = records.get(MESSAGE)
    value = record.get(MESSAGE) if isinstance(record, ConfigRecord | ArrayRecord) else None
    data = value.data if isinstance(value, Array) and value.stype == STYPE else value
    if not isinstance(data, bytes):
        raise ProtocolError(
            f"the message has no record '{MESSAGE}' with a fedcomp message; use fedcomp in both the ServerApp and the ClientApp"
        )
    return kind.unpack(data)
