"""The server's model in a run with `compression_mod`, and its past broadcasts.

In each round, the server decodes the model x_i of each client i and updates the weights W that the clients have:

    x_i = W + C(a_i)
    W ← W + C'(e + (y − W))

C encodes and decodes a vector with the uplink codec, and C' with the downlink codec. The vector a_i is the update of client i plus the
client's error-feedback memory (the parts of its updates that were not sent), and e is the error-feedback memory of the downlink. The vector
y is the wrapped strategy's aggregate of the x_i.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, MetricRecord

from ... import seeds
from ...codecs import Codec
from ...errors import ConfigError, NonFiniteError, ProtocolError
from ...messages import DENSE, NEED_DENSE, UPDATE, Assignment, Report
from ...server.broadcasts import Broadcasts
from ...server.exchange import Traffic, check_addressee, check_version
from .packed_records import ArrayLayout, Parcel
from .records import MESSAGE, from_records

ADD_MOD = "add compression_mod to the ClientApp's mods"
# A client's id is its Flower node id modulo IDS, so that the id fits into a signed 64-bit integer.
IDS = 1 << 63


@dataclass
class PhaseExchange:
    """One phase ("train" or "evaluate") of a round: the assignment (request) sent to each node, and a record of the replies so far."""

    round: int
    phase: str
    model: "Model"
    traffic: Traffic = field(default_factory=Traffic)
    assignments: dict[int, Assignment] = field(default_factory=dict)  # by node
    answered: set[int] = field(default_factory=set)  # nodes
    tickets: dict[int, str] = field(default_factory=dict)  # by client: ticket (hash) of its update


@dataclass(eq=False)
class Model:
    """A model, the broadcasts that bring clients up to date, and the version and the last accepted update of each client."""

    arrays: ArrayRecord  # the model as a Flower record
    layout: ArrayLayout
    uplink: Codec
    broadcasts: Broadcasts
    seed: int
    # Values that identify the run in each message. Clients ignore their stored states of other runs.
    announced: dict[str, str]
    tickets: dict[int, str]  # by client: ticket (hash) of its last accepted update
    # By client: the model version in its last report.
    versions: dict[int, str] = field(default_factory=dict)

    def equals(self, arrays: ArrayRecord) -> bool:
        """Return whether a record equals the current model."""
        if arrays is self.arrays:
            return True
        if not self.layout.fits(arrays):
            return False
        uncompressed = self.layout.uncompressed(self.arrays).items()
        same = all(arrays[name].data == array.data for name, array in uncompressed)
        return same and torch.equal(self.layout.vector(arrays), self._received())

    def _received(self) -> torch.Tensor:
        return self.layout.as_received(self.broadcasts.weights, self.arrays)

    def pack(self, message: Message, key: str, exchange: PhaseExchange) -> None:
        """Replace the record `key` of a message, which is the model, by the broadcasts that the receiving node has missed.

        Raises ConfigError for a second message to a node in one phase of a round.
        """
        node = message.metadata.dst_node_id
        if node in exchange.assignments:
            raise ConfigError(
                f"the strategy sends node {node} two messages in one phase of a round; Compressed supports one message per node, so use a "
                "strategy that samples each node once"
            )
        b, client = self.broadcasts, node % IDS
        is_known = client in self.versions
        download = b.download(self.versions[client]) if is_known else b.dense()
        values = dict(self.announced)
        if download.form == DENSE:
            values["form"] = self.layout.pack().decode()
        if not is_known and self.tickets:
            values["taken"] = "".join(self.tickets.values())
        announced = [part.encode() for pair in values.items() for part in pair]
        head = exchange.round, exchange.phase, client, download.form, download.base
        weights = b.version, b.fingerprint, download.frames
        assignment = Assignment(*head, *weights, self.tickets.get(client, ""), announced)
        exchange.assignments[node] = assignment
        parcel = Parcel.of(assignment, key, self.layout.uncompressed(self.arrays))
        sent, newest = [*announced, *parcel.array_data], b.newest_bytes
        exchange.traffic.add_download(client, download, sent, first=not is_known, newest=newest)
        message.content = parcel.put(message.content, key)

    def open(self, reply: Message, exchange: PhaseExchange) -> None:
        """Replace the encoded update in a reply by the client's model. Raises FedcompError for a reply that cannot be used."""
        node = reply.metadata.src_node_id
        if node in exchange.answered:
            raise ProtocolError(
                "the node has already answered in this phase; only its first reply counts"
            )
        exchange.answered.add(node)
        if MESSAGE not in reply.content:
            raise ProtocolError(f"the client sent an uncompressed record; {ADD_MOD}")
        parcel = from_records(reply.content, Parcel)
        report = Report.unpack(parcel.message)
        check_addressee(report, exchange.assignments[node])
        size = len(report.frame) + sum(map(len, parcel.array_data))
        exchange.traffic.uplink[report.client] += size
        if report.version:
            self.versions[report.client] = report.version
        if report.kind == NEED_DENSE:
            self.versions.pop(report.client, None)
        if report.kind != UPDATE:
            raise ProtocolError(f"{report.stage}: {report.reason}")
        check_version(report, exchange.assignments[node])
        arrays = self._trained(report, parcel) if parcel.record else None
        reply.content = parcel.unpacked(reply.content, arrays)
        if arrays is not None:
            exchange.tickets[report.client] = report.ticket

    def check_error(self, reply: Message) -> None:
        """Raise ProtocolError for an error from a client that has never sent a compressed update, because its app may lack the mod.

        The wrapped strategy handles the errors of other clients.
        """
        if reply.metadata.src_node_id % IDS not in self.versions:
            raise ProtocolError(
                f"the client's app failed before it sent a compressed record ({reply.error.reason}); if compression_mod is not "
                f"among its mods, {ADD_MOD}"
            )

    def _trained(self, report: Report, parcel: Parcel) -> ArrayRecord:
        """Return the client's model: the weights that it received plus its update, if any."""
        weights = self.broadcasts.weights.clone()
        if report.frame:
            self.uplink.accumulate(report.frame, weights, layout=self.layout.vector_layout)
        if not weights.isfinite().all():
            raise NonFiniteError("the model has NaN or infinity after this update was added")
        self.layout.check_uncompressed(parcel.uncompressed)
        return self.layout.record(weights, parcel.uncompressed)

    def accept(self, exchange: PhaseExchange, clients: Iterable[int]) -> None:
        """Record that the strategy accepted the updates of `clients`. The next message to each client has the ticket of its update."""
        tickets = exchange.tickets
        self.tickets |= {client: tickets[client] for client in clients if tickets.get(client)}

    def advance(self, round: int, arrays: ArrayRecord) -> None:
        """Move the model towards the strategy's result `arrays`: encode their difference with error feedback, and add it to the model.

        Raises NonFiniteError for NaN or infinity, and ProtocolError for arrays with other names or shapes than the model's. On an error,
        the model does not change.
        """
        if not self.layout.fits(arrays):
            raise ProtocolError(
                "the strategy's aggregate has arrays with other names or shapes than the model; return arrays like those of the model"
            )
        update = self.layout.vector(arrays).sub_(self._received())
        broadcast = self.broadcasts.prepare(round, update, seeds.key(self.seed, "downlink", round))
        if broadcast is not None:
            self.broadcasts.publish(broadcast)
        self.arrays = self.layout.record(self.broadcasts.weights, self.layout.uncompressed(arrays))


def inconsistent(replies: Sequence[Message], weight: str, trained: bool) -> dict[int, str]:
    """Return the replies that cannot be averaged with most other replies: the reason by index in `replies`.

    A reply needs one MetricRecord with a positive metric `weight` and, if `trained`, one ArrayRecord. The records and metrics must have the
    same names as in most replies. The caller must leave the returned replies out, because Flower would end the run at the first of them.
    """
    faults: dict[int, str] = {}
    shapes: dict[int, tuple[Any, ...]] = {}
    for i, reply in enumerate(replies):
        metrics, arrays = reply.content.metric_records, reply.content.array_records
        key, record = next(iter(metrics.items()), ("", MetricRecord()))
        value = record.get(weight)
        if len(metrics) != 1:
            faults[i] = f"the reply has {len(metrics)} records of metrics; return one"
        elif trained and len(arrays) != 1:
            faults[i] = f"the reply has {len(arrays)} records of arrays; return one"
        elif not isinstance(value, int | float) or not 0 < value < float("inf"):
            faults[i] = f"the reply's metrics have no positive number '{weight}'"
        else:
            lengths = [(name, len(v) if isinstance(v, list) else -1) for name, v in record.items()]
            shapes[i] = (key, *sorted(lengths), *arrays)
    most_common = max(shapes.values(), key=list(shapes.values()).count, default=())
    return faults | {
        i: "the reply's records or metrics have other names than in most clients' replies; use the same names on all clients"
        for i, shape in shapes.items()
        if shape != most_common
    }
