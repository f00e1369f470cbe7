"""Rounds over real sockets."""

import pytest
from grpc_ends import (
    LARGEST,
    RUN,
    Authority,
    Enrolled,
    Loop,
    assignment,
    attend,
    report,
    serving,
)

from fedcomp.messages import Farewell
from fedcomp.transports.grpc import GrpcConnection


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def server_credentials(authority):
    return authority.server()


@pytest.fixture
def loop():
    loop = Loop()
    yield loop
    loop.close()


def connect(server, client=-1, credentials=None) -> GrpcConnection:
    return GrpcConnection(server.target, largest=LARGEST, credentials=credentials, client=client)


def test_rounds_of_several_clients(loop):
    with serving(3) as server:
        ends = [loop.start(attend(connect(server, client), client)) for client in range(3)]
        server.wait_for_clients(0, 1, 2)
        for round in (1, 2, 3):
            sent = {client: assignment(client, round) for client in range(3)}
            server.transport.send([*sent.values()])
            answers = server.receive(3)
            assert {client: d.answer for client, d in answers.items()} == {
                client: report(a) for client, a in sent.items()
            }
        server.transport.dismiss(3)
        assert [end.result(10) for end in ends] == [Farewell(RUN, 3)] * 3


def test_tls(loop, authority, server_credentials):
    enrolled = Enrolled(authority, 2)
    with serving(2, enrolled=enrolled, credentials=server_credentials) as server:
        for client, mine in enumerate(enrolled.credentials):
            loop.start(attend(connect(server, credentials=mine), client))
        server.wait_for_clients(0, 1)
        server.transport.send([assignment(0), assignment(1)])
        assert server.receive(2)[1].answer == report(assignment(1))
        print(server.transport.traffic(), server.transport.counts())
