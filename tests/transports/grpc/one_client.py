"""A client in another process, which reconnects when its connection is lost."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

from forks import FORKS
from grpc_ends import LARGEST, attend

from fedcomp.errors import UnreachableError
from fedcomp.transports.grpc import GrpcConnection


@contextmanager
def one_client(target: str) -> Iterator[BaseProcess]:
    """Start a process of client 0. The process is killed at the end of the `with` block."""
    process = FORKS.Process(target=_run, args=(target,))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(20)


def _run(target: str) -> None:
    asyncio.run(_attend(target))


async def _attend(target: str) -> None:
    while True:
        try:
            await attend(GrpcConnection(target, largest=LARGEST, client=0), 0)
        except UnreachableError:
            await asyncio.sleep(0.1)
