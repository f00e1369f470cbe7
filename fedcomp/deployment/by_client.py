"""Figures of each client of a deployment: those of a round for its record, and those of the public port at any moment."""

from ..callbacks import ClientRecord, PortFigures
from ..server.round_loop import RoundResult
from .guard import Guard
from .traffic import Traffic


class ByClient:
    """Knows which keys at the port are whose."""

    def __init__(self, guard: Guard):
        self.guard = guard
        self._owners: dict[
            bytes | str, int
        ] = {}  # by public key; never changed in place, for other threads read it
        self._settled: dict[int, Traffic] = {}  # what is in records

    def know(self, client: int, key: bytes) -> None:
        """A client has joined with this public key, PEM; what an earlier key of it carried stays its own."""
        self._owners = self._owners | {key: client}

    def traffic(self) -> dict[int, Traffic]:
        """Of the clients that have joined, since the port was opened."""
        carried = self.guard.traffic
        clients: dict[int, Traffic] = {}
        for key, client in self._owners.items():
            clients[client] = clients.get(client, Traffic()).plus(carried.get(key, Traffic()))
        return clients

    def port(self) -> PortFigures:
        """May be called in any thread."""
        everybody, mine = self.guard.traffic.values(), self.traffic()
        return PortFigures(
            connections=len(self.guard.visits),
            refused=dict(self.guard.refused),
            received_bytes=sum(traffic.received_bytes for traffic in everybody),
            sent_bytes=sum(traffic.sent_bytes for traffic in everybody),
            by_client={client: tuple(traffic) for client, traffic in mine.items()},
        )

    def records(self, outcome: RoundResult) -> tuple[ClientRecord, ...]:
        """One for each client that was asked in the round, or whose answer was taken in it."""
        cost = outcome.traffic
        rejected = {rejection.client: rejection for rejection in outcome.rejections}
        carried, records = self.traffic(), []
        silent = (
            rejected.keys() - cost.seconds.keys()
        )  # to whom the port may have sent nothing: then no frame has left for them
        for client in sorted({*outcome.cohort, *cost.downlink}):
            wire = carried.get(client, Traffic()).minus(self._settled.get(client, Traffic()))
            self._settled[client] = carried.get(client, Traffic())
            records.append(
                ClientRecord(
                    client=client,
                    uplink_bytes=cost.uplink.get(client, 0),
                    downlink_bytes=0
                    if client in silent and wire.sent_bytes < cost.downlink.get(client, 0)
                    else cost.downlink.get(client, 0),
                    wire_bytes_in=wire.received_bytes,
                    wire_bytes_out=wire.sent_bytes,
                    latency_s=cost.seconds.get(client),
                    versions_behind=cost.behind.get(client),
                    staleness=cost.lateness.get(client, 0),
                    stage=rejected[client].stage if client in rejected else "",
                    reason=rejected[client].reason if client in rejected else "",
                )
            )
        return tuple(records)
