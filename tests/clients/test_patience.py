"""Clients that cannot reach their server report the reason, keep trying, and print few lines."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from deployment import free_port
from tiny_task import task

from fedcomp.deployment.client_process import ClientProcess, HostedClient, Target
from fedcomp.deployment.deployed_client import DeployedClient
from fedcomp.deployment.handshake import ClientSetup, SharedObjects
from fedcomp.deployment.start import Endpoint
from fedcomp.errors import UnreachableError, UserError
from fedcomp.keys.enrolment import Enrolment
from fedcomp.keys.key_folder import make
from fedcomp.keys.registry import Registry
from fedcomp.messages import Invitation
from fedcomp.transports.grpc import GrpcTransport, PortSettings

RETRY_S = (0.01, 0.02, 0.03, 0.04, 0.05)
LAST = "trying every 0.05 s from now on"


def process(
    port: int, output: list[str], clients: int = 1, enrolment: Enrolment | None = None, **options
) -> ClientProcess:
    train, common = task.train(), SharedObjects()
    hosted_clients = {}
    for client in range(clients):
        own = ClientSetup(task, train, torch.device("cpu"), client, client, shared=common)
        hosted_clients[client] = HostedClient(
            Target("127.0.0.1", port, enrolment), DeployedClient(own, None)
        )
    return ClientProcess(
        hosted_clients,
        lambda sentence: output.append(str(sentence)),
        **{"retry_s": RETRY_S} | options,
    )


@contextmanager
def running(clients: ClientProcess, ends_with: type[BaseException] | None = None) -> Iterator[None]:
    """Run clients in a thread. `ends_with`: the type of an error that may end them."""

    def run() -> None:
        with suppress(*[ends_with] if ends_with else []):
            clients.run()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        clients.end()
        thread.join(20)


def wait_for(output: list[str], text: str) -> None:
    deadline = time.monotonic() + 20
    while not any(text in sentence for sentence in output):
        assert time.monotonic() < deadline, output
        time.sleep(0.02)


def test_a_lost_server_is_reported_once_and_again_at_the_longest_pause():
    output = []
    with pytest.raises(UnreachableError, match="nothing listens on"):
        process(free_port(), output, patience_s=1.0).run()
    assert [sentence.rpartition("; ")[2] for sentence in output] == [
        "trying again in 0.01 s",
        f"{LAST}, for 1 s in all (the server may be down, or the run may be over)",
    ]


def test_a_new_reason_is_reported_once(tmp_path):
    """The new reason is a malformed registry. Clients try again until it is repaired."""
    make(tmp_path / "keys", 1)
    enrolment = Enrolment.read(tmp_path / "keys" / "clients" / "0.toml")
    registry = Registry(tmp_path / "keys" / "registry.toml")
    whole = registry.path.read_text()
    registry.path.write_text("???")
    assert "is not TOML" in registry.problem
    invitation = Invitation("ab" * 16, -1, "{}", "", "")
    credentials = Endpoint(keys=tmp_path / "keys").credentials()
    settings = PortSettings("127.0.0.1", free_port(), invitation, 1, 1 << 20, credentials, registry)
    server = GrpcTransport(settings)
    output, port = [], server.port
    clients = process(port, output, enrolment=enrolment)
    with running(clients, ends_with=UserError):
        wait_for(output, f"{LAST}, without a time limit")
        server.open()
        wait_for(output, "is not TOML")
        server.close()
        server.open()
        registry.path.write_text(whole)
        wait_for(output, "connected to")
    server.close()
    reasons = [sentence.partition("; trying")[0] for sentence in output if LAST in sentence]
    assert len(set(reasons)) == len(reasons) and reasons[0].startswith("nothing listens on")


def test_many_clients_report_a_missing_server_in_few_combined_messages():
    """A client that is delayed by more than a second reports separately, so a busy machine may need more than two messages."""
    output = []
    with running(process(free_port(), output, 20)):
        wait_for(output, LAST)
        wait_for(output, "trying again in")
    assert output[0].startswith("clients 0") and "nothing listens on" in output[0]
    assert {sentence.rpartition("; ")[2] for sentence in output} == {
        "trying again in 0.01 s",
        f"{LAST}, without a time limit (the server may be down, or the run may be over)",
    }
    assert len(output) < 20


def test_many_clients_give_up_with_one_combined_message():
    output = []
    with pytest.raises(UnreachableError) as caught:
        process(free_port(), output, 3, patience_s=0.2).run()
    assert str(caught.value).startswith(
        "3 of 3 clients could not continue: clients 0 to 2; the first reason: nothing"
    )
    ended = [sentence for sentence in output if ": ended: " in sentence]
    assert len(ended) == 1 and ended[0].startswith("clients 0 to 2: ended: nothing listens on")
