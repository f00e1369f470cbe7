"""Message transport over gRPC: one bidirectional stream per client, with mutual TLS. docs/reference/wire-format.md specifies the bytes."""

# Import `options` first: it sets environment variables that gRPC reads when it is imported.
from . import options as _options  # noqa: F401
from .client import GrpcConnection
from .io_loop import io_tasks
from .relay import Relay
from .server import GrpcTransport
from .settings import Credentials, PortSettings
from .traffic import WireBytes
from .wire import Refused, RelayTerms

__all__ = [
    "Credentials",
    "GrpcConnection",
    "GrpcTransport",
    "PortSettings",
    "Refused",
    "Relay",
    "RelayTerms",
    "WireBytes",
    "io_tasks",
]
