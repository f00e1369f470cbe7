"""The traffic of each client: frames that were not sent to silent clients, and a running total over all of its connections."""

from collections.abc import Iterator

import pytest
from one_process import deployed, rounds_until
from run_files import records

from fedcomp.callbacks import Rejection
from fedcomp.deployment.client_traffic import ClientTraffic
from fedcomp.keys.key_folder import make, renew
from fedcomp.server.exchange import Traffic
from fedcomp.server.round_loop import RoundResult
from fedcomp.strategies.base import DEADLINE
from fedcomp.transports.grpc import WireBytes
from fedcomp.transports.grpc.traffic import TrafficReport, counts_bytes


class Port:
    """A port whose counters the test sets: bytes received and sent by client, or None if the platform does not count bytes."""

    counted: dict[int, tuple[int, int]] | None = None

    def traffic(self) -> TrafficReport | None:
        if self.counted is None:
            return None
        return TrafficReport(WireBytes(), {c: WireBytes(*n) for c, n in self.counted.items()})


def a_round(downlink: dict[int, int], answered: set[int]) -> RoundResult:
    """Return a round in which the clients that did not answer missed the deadline."""
    frames = Traffic({c: 10 for c in answered}, downlink, {c: 0.5 for c in answered})
    missed = [Rejection(c, DEADLINE, "no reply") for c in sorted(downlink.keys() - answered)]
    return RoundResult(1, sorted(downlink), [], missed, frames, None)


def test_frames_that_the_port_did_not_send_to_a_silent_client_are_not_counted():
    port = Port()
    traffic = ClientTraffic(port)
    port.counted = {0: (300, 1200), 1: (90, 1100), 2: (90, 80)}
    _, by_client = traffic.take(a_round({0: 1000, 1: 1000, 2: 1000}, answered={0}), {})
    assert [r.downlink_bytes for r in by_client] == [1000, 1000, 0]
    assert [r.wire_bytes_out for r in by_client] == [1200, 1100, 80]
    assert [r.stage for r in by_client] == ["", DEADLINE, DEADLINE]

    # The bytes of the previous round do not count again. Client 0 answered, so it has received its frames in any case.
    port.counted = {0: (600, 1250), 1: (120, 1150), 2: (150, 1700)}
    _, by_client = traffic.take(a_round({0: 500, 1: 500, 2: 500}, answered={0}), {})
    assert [r.downlink_bytes for r in by_client] == [500, 0, 500]
    assert [r.wire_bytes_out for r in by_client] == [50, 50, 1620]
    assert [r.wire_bytes_in for r in by_client] == [300, 30, 60]


def test_all_frames_count_if_the_platform_counts_no_bytes():
    _, by_client = ClientTraffic(Port()).take(a_round({0: 1000, 1: 1000}, answered={0}), {})
    assert [r.downlink_bytes for r in by_client] == [1000, 1000]
    assert [(r.wire_bytes_in, r.wire_bytes_out) for r in by_client] == [(None, None)] * 2


@pytest.mark.deploy
@pytest.mark.skipif(not counts_bytes(), reason="the platform counts no bytes of connections")
def test_a_client_with_a_renewed_key_keeps_one_running_total(tmp_path):
    keys = tmp_path / "keys"
    make(keys, 3)
    totals: list[tuple[int, int]] = []

    def script() -> Iterator[None]:
        mine = run.clients[1]
        for _ in range(2):
            renew(keys, 1)
            yield from rounds_until(lambda old=mine: old.ended, mine.output)
            totals.append(run.callback.port().by_client[1])
            mine = run.start(1)
            yield from rounds_until(lambda new=mine: new.has_logged("bytes up"), mine.output)
        yield
        totals.append(run.callback.port().by_client[1])

    options = {"clients": 3, "participation": 2 / 3, "rounds": 10**6, "deadline": 1.0}
    with deployed(tmp_path, keys, **options) as run:
        run.serve([0, 2], [1], script=script())
    clients = [client for record in records(tmp_path / "run") for client in record["by_client"]]
    mine = [client for client in clients if client["client"] == 1]
    for i, name in enumerate(("wire_bytes_in", "wire_bytes_out")):
        first, before, after = (total[i] for total in totals)
        assert 0 < first <= before < after
        assert before < sum(f[name] for f in mine) <= after
        assert all(f[name] >= 0 for f in mine)
