"""Whole deployments: bytes at the port, revoked and shared keys, a malformed registry, and many clients."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from one_process import deployed, rounds_until
from run_files import records

from fedcomp.errors import UserError
from fedcomp.keys.key_folder import make, revoke
from fedcomp.transports.grpc import port
from fedcomp.transports.grpc.traffic import counts_bytes

WIRE = ("wire_bytes_in", "wire_bytes_out")


def summary(folder: Path) -> dict:
    return json.loads((folder / "run" / "summary.json").read_text())


@pytest.mark.skipif(not counts_bytes(), reason="the platform counts no bytes of connections")
def test_bytes_at_the_port_are_in_the_metrics_and_the_summary(tmp_path):
    with deployed(tmp_path, clients=2, rounds=3) as run:
        run.serve([0, 1])
    rounds, whole = records(tmp_path / "run"), summary(tmp_path)
    for name, frames in zip(WIRE, ("uplink_bytes", "downlink_bytes")):
        assert whole[name] == sum(line[name] for line in rounds)
        for line in rounds:
            by_client = [figures[name] for figures in line["by_client"]]
            assert line[name] >= sum(by_client) and all(by_client)
            assert line[name] > line[frames]
            assert all(f[name] > f[frames] for f in line["by_client"])


def test_bytes_that_are_not_counted_are_null(tmp_path, monkeypatch):
    monkeypatch.setattr(port, "counts_bytes", lambda: False)  # as on platforms without TCP_INFO
    with deployed(tmp_path, clients=2) as run:
        run.serve([0, 1])
    whole = summary(tmp_path)
    assert [whole[name] for name in WIRE] == [None, None] and whole["client_updates"] == 4
    for line in records(tmp_path / "run"):
        assert [line[name] for name in WIRE] == [None, None]
        assert [[f[name] for name in WIRE] for f in line["by_client"]] == [[None, None]] * 2
        assert all(f["uplink_bytes"] for f in line["by_client"])


def test_100_clients_in_one_process_run_over_tls(tmp_path):
    make(tmp_path / "keys", 100)
    with deployed(tmp_path, tmp_path / "keys", clients=100, rounds=1, batch_size=2) as run:
        assert run.serve(range(100)).client_updates == 100
        clients = run.clients[0]
        clients.thread.join(20)
        assert clients.ended and clients.error is None
        assert clients.has_logged("the run is over after round 1")


def test_a_running_server_follows_changed_keys_and_survives_a_malformed_registry(tmp_path):
    keys = tmp_path / "keys"
    make(keys, 3)
    registry = keys / "registry.toml"
    whole = registry.read_text()

    def script() -> Iterator[None]:
        run.clients[1].process.end()
        yield from rounds_until(lambda: run.clients[1].ended)
        registry.write_text(whole + "???")
        yield from rounds_until(lambda: any("is not TOML" in text for text in run.warnings))
        late = run.start(2)
        yield from rounds_until(lambda: late.has_logged("trying again"), late.output)
        assert "is not TOML" in late.output[0]
        assert not late.has_logged("connected")
        registry.write_text(whole)
        yield from rounds_until(lambda: late.has_logged("joined the run as client 2"), late.output)
        assert sum("is valid again" in text for text in run.warnings) == 1

        newer = run.start(2)
        yield from rounds_until(lambda: late.ended, late.output)
        assert isinstance(late.error, UserError)
        assert "a newer connection has joined as client 2, and the server keeps" in str(late.error)

        joined = "joined the run as client 2"
        yield from rounds_until(lambda: newer.has_logged(joined), newer.output)
        revoke(keys, 2)
        yield from rounds_until(lambda: newer.ended, newer.output)
        assert isinstance(newer.error, UserError) and "client 2 is revoked" in str(newer.error)
        again = run.start(2)
        yield from rounds_until(lambda: again.ended, again.output)
        assert "client 2 is revoked" in str(again.error)
        yield  # another round with the other clients
        assert not run.clients[0].ended

    options = {"clients": 3, "participation": 2 / 3, "rounds": 10**6, "deadline": 1.0}
    with deployed(tmp_path, keys, **options) as run:
        run.serve([0, 1], [2], script=script())
        assert not run.clients[0].has_logged("trying")  # connected clients stay connected
