"""A server with TLS in another process."""

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from forks import FORKS
from grpc_ends import Authority, Enrolled

from fedcomp.messages import Invitation
from fedcomp.transports.grpc import Credentials, GrpcTransport, PortSettings


@contextmanager
def one_server(credentials: Credentials) -> Iterator[int]:
    """Start a server process, which ends at the end of the `with` block. Yield the server's port."""
    here, there = FORKS.Pipe()
    process = FORKS.Process(target=_serve, args=(credentials, there))
    process.start()
    there.close()
    try:
        yield here.recv()
    finally:
        here.close()
        process.join(20)
        process.kill()


def _serve(credentials: Credentials, pipe: Connection) -> None:
    invitation = Invitation("ab" * 16, -1, "{}", "", "")
    keys = Enrolled(Authority(), 0)
    settings = PortSettings("127.0.0.1", 0, invitation, 1, 1 << 20, credentials, keys)
    transport = GrpcTransport(settings)
    transport.open()
    pipe.send(transport.port)
    pipe.poll(None)  # until the other end is closed
    transport.close()
