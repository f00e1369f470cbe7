"""Message transport over gRPC, with one bidirectional stream per client and mutual TLS, as docs/reference/wire-format.md specifies it."""

# Import `options` first, because it sets environment variables that gRPC reads when gRPC is imported.
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
