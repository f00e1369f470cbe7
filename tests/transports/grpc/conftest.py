"""Certificates, made once, and clients in the event loop of the process."""

from collections.abc import Iterator

import pytest
from grpc_ends import Authority, Enrolled, Loop

from fedcomp.transports.grpc import Credentials


@pytest.fixture(scope="session")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="session")
def server_credentials(authority: Authority) -> Credentials:
    return authority.server()


@pytest.fixture
def enrolled(authority: Authority) -> Enrolled:
    return Enrolled(authority, 3)


@pytest.fixture
def secure(enrolled: Enrolled, server_credentials: Credentials) -> dict[str, object]:
    """Return the settings of a server with TLS that accepts the keys in `enrolled`."""
    return {"enrolled": enrolled, "credentials": server_credentials}


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()
