"""Runs with relays give the same model as runs without relays, even if a relay is restarted during a round."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from one_process import PATIENCE_S, TASK, Deployed, deployed, rounds_until
from run_files import model, records
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedcomp import RunConfig
from fedcomp.cli.main import app
from fedcomp.deployment.start import Endpoint
from fedcomp.errors import UserError
from fedcomp.keys.key_folder import add_relay, make, revoke
from fedcomp.keys.registry import Registry
from fedcomp.sim import simulate
from fedcomp.transports.grpc import GrpcTransport, PortSettings, RelayTerms
from fedcomp.transports.grpc.traffic import counts_bytes

ADDED = {"uplink": "topk:density=1/4+s2:union=4", "downlink": "identity", "clients": 4}


def lines(folder: Path) -> list[dict]:
    return records(folder / "run")


def same_model(one: Path, other: Path) -> bool:
    return model(one / "run") == model(other / "run")


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("relay") / "keys"
    make(folder, 5)
    add_relay(folder, ["relay.example"])
    add_relay(folder, [])
    return folder


def test_clients_behind_a_relay_give_the_same_model_as_without(tmp_path, keys):
    options = {"clients": 4, "rounds": 2, "uplink": "topk:density=1/4"}
    with deployed(tmp_path / "direct", keys, **options) as run:
        run.serve([0, 1, 2, 3])
    with deployed(tmp_path / "relay", keys, **options) as run:
        run.serve([3], behind=[[0, 1, 2]])
        (relay,) = run.relays
        for process in (*run.clients, relay):
            process.thread.join(PATIENCE_S)
            assert process.ended and process.error is None
        assert relay.has_logged(
            f"connects clients at 127.0.0.1:{relay.port} with the server localhost:{run.port} in a run of 4 clients"
        )
        assert relay.has_logged("and forwards each encoded update")
        assert relay.has_logged("the run is over after round 2")
        assert not run.warnings
    assert same_model(tmp_path / "relay", tmp_path / "direct")
    same = ("accepted", "rejected", "uplink_bytes", "downlink_bytes", "loss")
    for line, other in zip(lines(tmp_path / "relay"), lines(tmp_path / "direct"), strict=True):
        assert [line[name] for name in same] == [other[name] for name in same]
        for mine, direct in zip(line["by_client"], other["by_client"], strict=True):
            assert mine["downlink_bytes"] == direct["downlink_bytes"]
            assert mine["uplink_bytes"] == direct["uplink_bytes"] > 0
    assert sum(line["downlink_bytes"] for line in lines(tmp_path / "relay")) > 0


@pytest.mark.skipif(not counts_bytes(), reason="the platform counts no bytes of connections")
def test_bytes_at_the_port_are_not_attributed_to_clients_behind_a_relay(tmp_path):
    with deployed(tmp_path, clients=3) as run:
        run.serve([2], behind=[[0, 1]])
    for line in lines(tmp_path):
        by_client = {figures["client"]: figures for figures in line["by_client"]}
        for client in (0, 1):
            assert by_client[client]["wire_bytes_in"] is by_client[client]["wire_bytes_out"] is None
        own = by_client[2]["wire_bytes_in"], by_client[2]["wire_bytes_out"]
        assert all(own) and line["wire_bytes_in"] > own[0] and line["wire_bytes_out"] > own[1]


def test_a_run_with_several_relays_gives_the_same_model(tmp_path, keys):
    with deployed(tmp_path, keys, clients=5) as run:
        assert run.serve([4], behind=[[0, 1], [2, 3]]).client_updates == 10
        assert not run.warnings


# Relays that add.


def simulated(folder: Path, **options) -> dict[str, torch.Tensor]:
    usual = {"participation": 1.0, "batch_size": 10, "seed": 5, "device": "cpu", "rounds": 2}
    simulate(RunConfig(task=TASK, out=str(folder / "run"), engine="serial", **usual | options))
    return load_file(folder / "run" / "model.safetensors")


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(one[name], other[name], atol=1e-6) for name in one
    )


@pytest.mark.parametrize("direct", [False, True], ids=["all at the relay", "one at the server"])
def test_a_relay_that_adds_gives_the_same_model_as_a_simulation(tmp_path, direct):
    expected = simulated(tmp_path / "simulated", relays=1, rounds=2, **ADDED)
    with deployed(tmp_path, relays=1, rounds=2, **ADDED) as run:
        run.serve(*[[3]] * direct, behind=[[0, 1, 2] if direct else [0, 1, 2, 3]])
        assert run.relays[0].has_logged("and adds up their encoded updates")
        assert len(run.warnings) == 1 and "--insecure" in run.warnings[0]
    assert close(load_file(tmp_path / "run" / "model.safetensors"), expected)
    for line in lines(tmp_path):
        assert line["accepted"] == 4 and line["skipped"] == 0
        sent = [figures["uplink_bytes"] for figures in line["by_client"]]
        assert [bool(size) for size in sent] == [True, False, False, direct]


def test_tables_that_are_too_small_cause_one_warning(tmp_path):
    small = {"uplink": "topk:density=1/4+s2:columns=4", "memory": "none"}
    with deployed(tmp_path, relays=1, rounds=3, **ADDED | small) as run:
        run.serve(behind=[[0, 1, 2, 3]])
        (sentence,) = [text for text in run.warnings if "in the sums of the relays" in text]
        assert "round 1: " in sentence and "a larger 'union' or more 'columns'" in sentence


def test_a_client_that_ends_does_not_delay_the_updates_of_the_others(tmp_path):
    def cohort() -> list[int]:
        return [client["client"] for client in lines(tmp_path)[-1]["by_client"]]

    def script() -> Iterator[None]:
        run.clients[1].end()
        yield from rounds_until(lambda: cohort() == [0, 1, 2], run.warnings)
        yield
        run.start(3, at=run.relays[0])
        yield from rounds_until(lambda: cohort() == [0, 1, 2, 3], run.warnings)

    options = ADDED | {"relays": 1, "rounds": 10**6, "deadline": 1.0}
    with deployed(tmp_path, **options) as run:
        run.serve(behind=[[0, 1, 2]], script=script(), then=lambda: run.start(3, at=run.relays[0]))
    assert sum(line["rejected"] for line in lines(tmp_path)) <= 1


def test_a_sealed_election_through_a_relay_gives_the_same_model(tmp_path, keys):
    options = {
        "strategy": "election:byzantine=2,form=ballots,sealed=true",
        "clients": 5,
        "partition": "classes:1",
        "local_steps": 1,
        "batch_size": 1,
        "lr": 0.02,
        "weight_decay": 0.5,
        "rounds": 2,
    }
    with deployed(tmp_path / "direct", keys, **options) as run:
        run.serve([0, 1, 2, 3, 4])
    with deployed(tmp_path / "relay", keys, **options) as run:
        run.serve([4], behind=[[0, 1, 2, 3]])
        assert not run.warnings
    assert same_model(tmp_path / "relay", tmp_path / "direct")
    assert all(line["accepted"] == 5 for line in lines(tmp_path / "relay"))


# Faults.


def restart_relay(run: Deployed) -> None:
    (relay,) = run.relays
    relay.end()
    assert relay.ended
    relay.start(run.port, relay.process.target.enrolment)


@pytest.mark.parametrize("adds", [False, True], ids=["bundles", "adds"])
def test_a_relay_restarted_during_a_round_loses_no_update(tmp_path, keys, adds):
    options = {"rounds": 3, **(ADDED | {"relays": 1} if adds else {"clients": 4})}
    with deployed(tmp_path / "undisturbed", keys, **options) as run:
        run.serve([3], behind=[[0, 1, 2]])
    disturbed = []

    def disturb(round: int, answered: int) -> None:
        if round == 2 and round not in disturbed:
            disturbed.append(round)
            restart_relay(run)

    with deployed(tmp_path / "disturbed", keys, **options) as run:
        run.serve([3], behind=[[0, 1, 2]], on_answer=disturb)
        assert disturbed == [2] and not run.warnings
        assert sum("connects clients at" in text for text in run.relays[0].output) == 2
    assert [line["accepted"] for line in lines(tmp_path / "disturbed")] == [4] * 3
    if adds:  # sums over other groups of clients are rounded differently
        names = ("undisturbed", "disturbed")
        assert close(*(load_file(tmp_path / n / "run" / "model.safetensors") for n in names))
    else:
        assert same_model(tmp_path / "disturbed", tmp_path / "undisturbed")


def test_a_relay_and_its_clients_reconnect_to_a_restarted_server(tmp_path, keys):
    options = {"clients": 4, "rounds": 2, "uplink": "topk:density=1/4"}
    with deployed(tmp_path / "undisturbed", keys, **options) as run:
        run.serve([3], behind=[[0, 1, 2]])
    with deployed(tmp_path / "disturbed", keys, **options) as run:
        assert run.serve([3], behind=[[0, 1, 2]], script=iter([None])) is None
        run.config = replace(run.config, resume=True)
        assert run.serve().client_updates == 8
        assert run.relays[0].has_logged("trying again")
    assert same_model(tmp_path / "disturbed", tmp_path / "undisturbed")


def test_a_relay_with_stay_serves_the_next_run(tmp_path):
    def next_clients() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while sum("connects clients at" in text for text in relay.output) < 2:
            assert time.monotonic() < deadline, (relay.output, relay.error)
            time.sleep(0.02)
        run.start(0, 1, at=relay)

    with deployed(tmp_path, clients=2) as run:
        run.serve(then=lambda: run.start(0, 1, at=run.relay(stay=True)))
        (relay,) = run.relays
        run.config = replace(run.config, out=str(tmp_path / "next"))
        assert run.serve(then=next_clients).client_updates == 4
        assert relay.has_logged("the run is over after round 2; waiting for the next run")
        assert not relay.ended and relay.port


def test_a_relay_that_is_revoked_ends_and_its_clients_wait_for_another(tmp_path):
    keys = tmp_path / "keys"
    make(keys, 3)
    for _ in range(2):
        add_relay(keys, [])

    def script() -> Iterator[None]:
        first = run.relays[0]
        revoke(keys, "relay-0")
        yield from rounds_until(lambda: first.ended, first.output)
        assert isinstance(first.error, UserError) and "relay 0 is revoked" in str(first.error)
        yield from rounds_until(lambda: run.clients[1].has_logged("trying every"))
        assert not run.clients[1].ended
        assert lines(tmp_path)[-1]["accepted"] == 2
        run.start(2, at=run.relay())
        yield from rounds_until(lambda: lines(tmp_path)[-1]["accepted"] == 3)

    with deployed(tmp_path, keys, clients=3, rounds=10**6, deadline=1.0) as run:
        run.serve([0, 1], behind=[[2]], script=script())


# The command line.


def sentence(*words: object) -> str:
    """Return the error message of a `fedcomp` command, which must be a single line."""
    result = CliRunner().invoke(app, [str(word) for word in words], prog_name="fedcomp")
    assert result.exit_code == 2, (result.output, result.exception)
    (line,) = result.stderr.splitlines()
    assert line.startswith("fedcomp: ") and not result.stdout
    return line.removeprefix("fedcomp: ")


@contextmanager
def transport(**settings) -> Iterator[GrpcTransport]:
    terms = RelayTerms("ab" * 16, "{}", "", "", 1, 1 << 20, 1 << 20)
    made = GrpcTransport(
        PortSettings("127.0.0.1", 0, terms.invitation, 1, 1 << 20, relay_terms=terms, **settings)
    )
    made.open()
    yield made
    made.close()


@pytest.fixture
def server() -> Iterator[GrpcTransport]:
    with transport() as made:
        yield made


def test_a_relay_needs_an_enrolment(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDCOMP_ENROLMENT", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    output = sentence("relay", "--server", "localhost:1")
    assert output.startswith("this relay has no enrolment file ")
    assert all(
        text in output for text in ("fedcomp keys add --relay", "--enrolment FILE", "--insecure")
    )
    assert "cannot be read" in sentence("relay", "--enrolment", tmp_path / "absent.toml")


def test_a_relay_refuses_the_enrolment_of_a_client(keys, monkeypatch):
    file = keys / "clients" / "1.toml"
    expected = (
        f"{file} is the enrolment of client 1, but a relay needs its own enrolment; make one on the server with: "
        "fedcomp keys add --relay --host HOST"
    )
    assert sentence("relay", "--enrolment", file) == expected
    monkeypatch.setenv("FEDCOMP_ENROLMENT", str(file))
    assert sentence("relay", "--server", "localhost:1") == expected


def test_options_of_a_relay_that_exclude_each_other_are_refused(keys):
    file = keys / "relays" / "0.toml"
    assert sentence("relay", "--insecure", "--enrolment", file, "--server", "h:1") == (
        "--insecure uses no keys, but --enrolment is given; leave one of them out"
    )
    assert sentence("relay", "--insecure") == "--server is missing; give --server host:port"
    assert "inf is not in the range" in sentence("relay", "--insecure", "--patience", "inf")
    assert "--port" in sentence("relay", "--insecure", "--server", "h:1", "--port", 65536)
    assert "'h'" in sentence("relay", "--insecure", "--server", "h")


def test_a_relay_reports_that_its_port_is_in_use(server, capfd):
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        output = sentence(
            "relay", "--insecure", "--server", f"localhost:{server.port}", "--port", port
        )
    assert output.startswith(f"port {port} of 127.0.0.1 cannot be opened")
    assert "choose another port with --port" in output and "GRPC" not in output
    assert "add_port" not in capfd.readouterr().err  # a line that gRPC itself would print


def test_a_relay_reports_a_missing_server_and_a_server_of_another_ca(server, tmp_path, keys):
    with socket.create_server(("127.0.0.1", 0)) as trial:
        free = trial.getsockname()[1]
    output = sentence("relay", "--insecure", "--server", f"localhost:{free}", "--patience", 0)
    assert f"localhost:{free}" in output
    make(tmp_path / "other", 1)
    credentials = Endpoint(keys=tmp_path / "other").credentials()
    with transport(credentials=credentials, keys=Registry(tmp_path / "other/registry.toml")) as at:
        mine = ("--enrolment", keys / "relays" / "0.toml", "--server", f"localhost:{at.port}")
        assert "certificate" in sentence("relay", *mine, "--patience", 0, "--port", 0)


def test_relays_are_refused_with_flower(tmp_path):
    output = sentence(
        *("server", "start", "--insecure", "--task", TASK, "--out", tmp_path / "run"),
        *("--relays", 1, "--transport", "flower", "--uplink", "identity", "--port", 0),
    )
    assert "--relays needs --transport grpc" in output
    assert not (tmp_path / "run").exists()
