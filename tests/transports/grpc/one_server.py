"""A server process: one_server.py FOLDER, which holds its certificate, key and CA. Ends when its standard input is closed."""

import sys
from pathlib import Path

from grpc_ends import Authority, Enrolled

from fedcomp.messages import Invitation
from fedcomp.transports.grpc import Credentials, GrpcTransport, PortSettings

folder = Path(sys.argv[1])
credentials = Credentials(*((folder / name).read_bytes() for name in ("certificate", "key", "ca")))
invitation = Invitation("ab" * 16, -1, "{}", "", "")
keys = Enrolled(Authority(), 0)
transport = GrpcTransport(PortSettings("127.0.0.1", 0, invitation, 1, 1 << 20, credentials, keys))
transport.open()
print(transport.port, flush=True)
sys.stdin.read()
transport.close()
