"""The bytes that each client of a deployment sends and receives in a round, for metrics.jsonl."""

from collections.abc import Mapping

from ..callbacks import ClientRecord
from ..server.round_loop import RoundResult
from ..transports.grpc import GrpcTransport, WireBytes

NOTHING = WireBytes()


class ClientTraffic:
    """The bytes that the clients of a transport send and receive."""

    def __init__(self, transport: GrpcTransport):
        self.transport = transport
        # Bytes that earlier calls of `take` have returned, of the whole port and by client.
        self._total = NOTHING
        self._recorded: dict[int, WireBytes] = {}

    def take(
        self, result: RoundResult, metrics: Mapping[int, Mapping[str, float]]
    ) -> tuple[WireBytes | None, tuple[ClientRecord, ...]]:
        """Return the bytes at the server's port since the last call, and a record for each client of the round.

        The bytes are None if the operating system does not count the bytes of connections. A client of the round was drawn for its cohort
        or was sent an assignment. `metrics`: by client, the metrics that the client reported.
        """
        frames, report = result.traffic, self.transport.traffic()
        rejected = {rejection.client: rejection for rejection in result.rejections}
        total: WireBytes | None = None
        if report is not None:
            total, self._total = report.total.minus(self._total), report.total
        by_client, records = (report.by_client if report else {}), []
        for client in sorted({*result.cohort, *frames.downlink}):
            # `counted` is None if bytes are not counted, or if the client is connected through a relay.
            counted = by_client.get(client)
            wire = (counted or NOTHING).minus(self._recorded.get(client, NOTHING))
            self._recorded[client] = counted or NOTHING
            rejection = rejected.get(client)
            downlink_bytes = frames.downlink.get(client, 0)
            silent = rejection and client not in frames.latency_s
            if silent and counted and wire.bytes_out < downlink_bytes:
                downlink_bytes = 0  # the assignment was not sent completely
            records.append(
                ClientRecord(
                    client=client,
                    uplink_bytes=frames.uplink.get(client, 0),
                    downlink_bytes=downlink_bytes,
                    wire_bytes_in=wire.bytes_in if counted else None,
                    wire_bytes_out=wire.bytes_out if counted else None,
                    latency_s=frames.latency_s.get(client),
                    versions_behind=frames.versions_behind.get(client),
                    staleness=frames.staleness.get(client, 0),
                    stage=rejection.stage if rejection else "",
                    reason=rejection.reason if rejection else "",
                    metrics=metrics.get(client, {}),
                )
            )
        return total, tuple(records)
