"""A client process that reconnects when its connection is lost: one_client.py HOST:PORT."""

import asyncio
import sys

from grpc_ends import LARGEST, attend

from fedcomp.errors import UnreachableError
from fedcomp.transports.grpc import GrpcConnection


async def main() -> None:
    while True:
        try:
            await attend(GrpcConnection(sys.argv[1], largest=LARGEST, client=0), 0)
        except UnreachableError:
            await asyncio.sleep(0.5)


if __name__ == "__main__":
    asyncio.run(main())
